"""A request in the engine's terms."""

from __future__ import annotations

from mmd_workers.engine.types import SamplingParams
from mmd_workers.model.types import LanguageModel
from mmd_workers.wire.messages import GenerateRequest


def sampling_of(request: GenerateRequest, model: LanguageModel) -> SamplingParams:
    """How to choose this request's tokens, with what the model says of stopping and of ids that must not appear."""
    wanted = request.sampling
    return SamplingParams(
        max_tokens=wanted.max_tokens,
        temperature=wanted.temperature,
        top_p=wanted.top_p,
        top_k=wanted.top_k,
        seed=wanted.seed,
        logprobs=wanted.logprobs,
        ignore_eos=wanted.ignore_eos,
        eos_token_ids=model.eos_token_ids,
        suppress_token_ids=model.suppress_token_ids,
    )


def media_spans_of(request: GenerateRequest) -> list[tuple[int, int, str]]:
    """(start, length, feature id) of every run of placeholders, for the identity of KV blocks."""
    return [(start, length, ref.feature_id) for ref in request.features for start, length in ref.ranges]
