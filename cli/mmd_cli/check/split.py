"""The split model: fills features into a prompt, and generates with the engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from mmd_api.contract.errors import UnsupportedInputError
from mmd_cli.check.model import BLOCK_TOKENS, CHUNK_TOKENS, NEW_TOKENS, Checked
from mmd_cli.check.prompts import Medium
from mmd_workers.engine.engine import Engine
from mmd_workers.engine.interface import SamplingParams, SequenceInput
from mmd_workers.model.language import HfLanguageModel
from mmd_workers.model.prompt import LoweredPrompt, PromptLayout


def lowered(checked: Checked, layout: PromptLayout, media: Sequence[Medium]) -> LoweredPrompt:
    """The lowered prompt, filled with the features of its media."""
    prompt = checked.language.lower(layout.token_ids, layout.media)
    for number, (medium, laid) in enumerate(zip(media, layout.media, strict=True)):
        if checked.encoder is None:
            raise UnsupportedInputError(f"this model does not accept {laid.modality}")
        decoded = medium.decoded(laid.sampling.frame_indices, laid.sampling.num_samples)
        (feature,) = checked.encoder.encode([checked.encoder.process(decoded, laid)])
        checked.language.fill(prompt, number, feature)
    return prompt


def run(
    checked: Checked, prompt: LoweredPrompt, layout: PromptLayout, media: Sequence[Medium]
) -> tuple[list[int], torch.Tensor]:
    """The engine's greedy tokens, and the logits of each step."""
    language = checked.language
    length = len(layout.token_ids) + NEW_TOKENS
    engine = Engine(
        language,
        kv_cache_bytes=(length // BLOCK_TOKENS + 2) * BLOCK_TOKENS * language.kv_layout.bytes_per_token(),
        block_tokens=BLOCK_TOKENS,
        max_sequences=1,
        chunk_tokens=CHUNK_TOKENS,
        prefix_cache=False,
        max_model_len=max(checked.max_model_len, length),
    )
    sampling = SamplingParams(
        max_tokens=NEW_TOKENS, ignore_eos=True, suppress_token_ids=language.suppress_token_ids
    )
    spans = [
        (start, count, medium.info.digest)
        for medium, laid in zip(media, layout.media, strict=True)
        for start, count in laid.ranges
    ]
    engine.add(SequenceInput("check", prompt, sampling, spans))
    tokens: list[int] = []
    with _logits_of(language) as rows:
        while len(tokens) < NEW_TOKENS:
            output = engine.step()
            for _, error in output.failed:
                raise error
            tokens += [token.token_id for token in output.tokens]
    return tokens, torch.cat(rows)


@contextmanager
def _logits_of(language: HfLanguageModel) -> Iterator[list[torch.Tensor]]:
    """Collect the logits that the language model's head returns."""
    rows: list[torch.Tensor] = []
    logits = language.logits

    def recorded(hidden: torch.Tensor) -> torch.Tensor:
        output = logits(hidden)
        rows.append(output.clone().cpu())
        return output

    language.logits = recorded  # type: ignore[method-assign]
    try:
        yield rows
    finally:
        del language.logits
