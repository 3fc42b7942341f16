"""What prompt lookup gives and costs: the native engine with drafts beside itself without, on CPUs, in process.

    python -m bench.drafts [--rounds 3] [--tokens 128] [--most 8] [--batches 1 4 8]

A model with random weights quotes nothing, so answers are scripted: each step computes logits and samples from them as ever, and then the script's
token is taken. So steps cost what they cost, and drafts are right as often as in an answer of that kind: a prompt that is given back with one token
in so many changed, one of which every other stretch is quoted, and one that repeats nothing, which is the price. Both engines have the same weights
and get the same prompts, in turns; the second begins every other round. A ratio is of one round; the report has its median, least and greatest.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from rich.console import Console
from rich.table import Table

from bench.native_step import engine
from bench.report import keep
from bench.versus_vllm import SIZE
from mmd_workers.engine import model_runner
from mmd_workers.engine.choosing.masks import Masks
from mmd_workers.engine.choosing.sampler import Draw, Sampled, sample
from mmd_workers.engine.engine import Engine
from mmd_workers.engine.interface import SamplingParams, SequenceInput
from support.oracles import random_model

Tokens = npt.NDArray[np.int64]
VOCAB = 250
PROMPT_TOKENS = 256
STRETCH = 32
"""Tokens that are quoted before as many new ones."""
console = Console(width=120)


def edited(rng: np.random.Generator, prompt: Tokens, tokens: int, every: int) -> Tokens:
    """A prompt given back, with one token in `every` changed."""
    given = np.resize(prompt, tokens)
    changed = rng.random(tokens) < 1 / every
    return np.where(changed, rng.integers(3, VOCAB, tokens), given)


def quoting(rng: np.random.Generator, prompt: Tokens, tokens: int) -> Tokens:
    """Stretches of a prompt, between others that are new."""
    quoted = np.arange(tokens) // STRETCH % 2 == 0
    return np.where(quoted, np.resize(prompt, tokens), rng.integers(3, VOCAB, tokens))


ANSWERS: dict[str, Callable[[np.random.Generator, Tokens, int], Tokens]] = {
    "one token in 20 changed": partial(edited, every=20),
    "one token in 5 changed": partial(edited, every=5),
    "half of it quoted": quoting,
    "nothing repeats": lambda rng, _prompt, tokens: rng.integers(3, VOCAB, tokens),
}


class Script:
    """Stands in for the engine's sampler: samples, and then says what the script of the sequence, whose number is the seed, has at that place."""

    def __init__(self) -> None:
        self.answers: list[list[int]] = []

    def __call__(
        self, logits: torch.Tensor, draws: Sequence[Draw], masks: Masks | None
    ) -> list[Sampled | None]:
        """As `sampler.sample`."""
        sample(logits, draws, masks)
        return [Sampled(self.answers[draw.sampling.seed][draw.index]) for draw in draws]


def table(lines: list[dict[str, Any]]) -> Table:
    """The report for a reader."""
    made = Table(title="tokens a second, median of the rounds", title_justify="left")
    for heading in ("answers", "sequences", "without", "with drafts", "ratio (rounds)", "drafts accepted"):
        made.add_column(heading)
    for line in lines:
        accepted = f"{line['accepted'] / line['drafted']:.0%}" if line["drafted"] else "no drafts"
        made.add_row(
            line["answers"],
            str(line["sequences"]),
            *(f"{statistics.median(rates):.0f}" for rates in line["tokens_per_second"].values()),
            f"{line['ratio']:.2f} ({line['ratio_min']:.2f} to {line['ratio_max']:.2f})",
            accepted,
        )
    return made


def decode(made: Engine, prompts: list[list[int]], tokens: int) -> tuple[float, list[list[int]]]:
    """Tokens a second while nothing is prefilled, and the answers."""
    for number, ids in enumerate(prompts):
        sampling = SamplingParams(max_tokens=tokens, seed=number, ignore_eos=True)
        made.add(SequenceInput(str(number), made.model.lower(ids, []), sampling))
    answers: list[list[int]] = [[] for _ in prompts]
    seconds, generated = 0.0, 0
    while made.has_work():
        begun = time.perf_counter()
        output = made.step()
        if not output.prefill_tokens:
            seconds += time.perf_counter() - begun
            generated += len(output.tokens)
        for token in output.tokens:
            answers[int(token.sequence_id)].append(token.token_id)
    return generated / seconds, answers


def main() -> None:
    """Measure both and print one table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=192, help="of each answer")
    parser.add_argument("--most", type=int, default=8, help="tokens of a draft, as engine.promptLookupTokens")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 8])
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    folder = Path(".cache/models/bench-llava").resolve()
    if not (folder / "config.json").exists():
        random_model.build("llava", folder, size=SIZE)
    engines = {"without": engine(folder), "with drafts": engine(folder, draft_tokens=options.most)}
    script = Script()
    model_runner.sample = script  # type: ignore[assignment]
    lines = list[dict[str, Any]]()
    for kind, size in itertools.product(ANSWERS, options.batches):
        rates: dict[str, list[float]] = {name: [] for name in engines}
        before = engines["with drafts"].stats()
        for number in range(options.rounds + 1):  # the first one warms up
            rng = np.random.default_rng([number, size])
            prompts = rng.integers(3, VOCAB, (size, PROMPT_TOKENS))
            script.answers = [ANSWERS[kind](rng, prompt, options.tokens).tolist() for prompt in prompts]
            for name in sorted(engines, reverse=bool(number % 2)):
                rate, answers = decode(engines[name], prompts.tolist(), options.tokens)
                if answers != script.answers:
                    raise SystemExit(f"{name}: the answers are not those of the script")
                if number:
                    rates[name].append(rate)
        after = engines["with drafts"].stats()
        ratios = [b / a for a, b in zip(*rates.values(), strict=True)]
        lines.append(
            {
                "answers": kind,
                "sequences": size,
                "ratio": statistics.median(ratios),
                "ratio_min": min(ratios),
                "ratio_max": max(ratios),
                "tokens_per_second": rates,
                "drafted": after.draft_tokens - before.draft_tokens,
                "accepted": after.accepted_tokens - before.accepted_tokens,
            }
        )
    console.print(table(lines))
    body = {"options": vars(options), "model": vars(SIZE), "lines": lines}
    console.print(f"report: {keep('drafts', body)}", highlight=False)


if __name__ == "__main__":
    main()
