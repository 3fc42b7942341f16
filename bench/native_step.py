"""A step of the native engine on CPUs, in process: whole decoder layers as one call of the kernels beside the path of other architectures.

    python -m bench.native_step [--rounds 5] [--tokens 64] [--prompt 294] [--batches 1 8 16] [--architecture llava]

Both engines have the same weights and get the same prompts, in turns; the second begins every other round. The tokens must be equal.
A ratio is of one round; the report has its median, least and greatest.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from rich.console import Console
from rich.table import Table

from bench.report import keep
from bench.versus_vllm import SIZE
from mmd_api.spec.model import ModelSpec
from mmd_workers.engine.engine import Engine
from mmd_workers.engine.interface import SamplingParams, SequenceInput
from mmd_workers.model.language import load_language_model
from support.oracles import random_model

PATHS = {"modules": False, "fused layers": True}
console = Console(width=120)


@dataclass
class Line:
    """One load: tokens a second of each path, by round."""

    name: str
    rates: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in PATHS})

    def as_dict(self) -> dict[str, Any]:
        old, new = self.rates.values()
        ratios = [b / a for a, b in zip(old, new, strict=True)]
        return {
            "load": self.name,
            "ratio": statistics.median(ratios),
            "ratio_min": min(ratios),
            "ratio_max": max(ratios),
            "tokens_per_second": self.rates,
        }


def engine(folder: Path, **settings: Any) -> Engine:
    """An engine with weights of its own. `settings`: others of `Engine`."""
    return Engine(
        load_language_model(ModelSpec(id=str(folder), dtype="Float32"), torch.device("cpu")),
        kv_cache_bytes=512 * 2**20,
        block_tokens=16,
        max_sequences=64,
        chunk_tokens=512,
        prefix_cache=False,
        max_model_len=4096,
        **settings,
    )


def measure(
    made: Engine, prompts: list[list[int]], tokens: int, clock: Callable[[], float]
) -> tuple[float, float, list[list[int]]]:
    """Tokens a second of prefill and of decode of one batch, and its tokens."""
    for number, ids in enumerate(prompts):
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
        made.add(SequenceInput(str(number), made.model.lower(ids, []), sampling))
    answers: list[list[int]] = [[] for _ in prompts]
    spent = {True: 0.0, False: 0.0}
    generated = 0
    while made.has_work():
        begun = clock()
        output = made.step()
        spent[output.prefill_tokens > 0] += clock() - begun
        generated += 0 if output.prefill_tokens else len(output.tokens)
        for token in output.tokens:
            answers[int(token.sequence_id)].append(token.token_id)
    return sum(map(len, prompts)) / spent[True], generated / spent[False], answers


def table(lines: list[dict[str, Any]]) -> Table:
    """The report for a reader."""
    made = Table(title="tokens a second, median of the rounds", title_justify="left")
    for heading in ("load", *PATHS, "ratio (rounds)"):
        made.add_column(heading)
    for line in lines:
        made.add_row(
            line["load"],
            *(f"{statistics.median(rates):.0f}" for rates in line["tokens_per_second"].values()),
            f"{line['ratio']:.2f} ({line['ratio_min']:.2f} to {line['ratio_max']:.2f})",
        )
    return made


def main() -> None:
    """Measure both paths and print one table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--prompt", type=int, default=294, help="tokens of each prompt")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--architecture", default="llava")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="of all threads in place of wall time: for one thread on a machine that is busy",
    )
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(options.threads)
    clock = time.process_time if options.cpu_time else time.perf_counter
    folder = Path(f".cache/models/bench-{options.architecture}").resolve()
    if not (folder / "config.json").exists():
        random_model.build(options.architecture, folder, size=SIZE)
    engines = {name: engine(folder, fused_layers=fused) for name, fused in PATHS.items()}
    lines = {
        (phase, size): Line(f"{phase}, {size} sequences")
        for phase in ("prefill", "decode")
        for size in options.batches
    }
    vocab, equal, asked = min(made.model.vocab_size for made in engines.values()), 0, 0
    for made in engines.values():
        measure(made, [[5] * options.prompt], 4, clock)
    for number, size in itertools.product(range(options.rounds), options.batches):
        rng = np.random.default_rng([number, size])
        prompts = rng.integers(3, vocab, (size, options.prompt)).tolist()
        answers = {}
        for name in sorted(PATHS, reverse=bool(number % 2)):
            prefill, decode, answers[name] = measure(engines[name], prompts, options.tokens, clock)
            lines["prefill", size].rates[name].append(prefill)
            lines["decode", size].rates[name].append(decode)
        old, new = answers.values()
        equal += sum(a == b for a, b in zip(old, new, strict=True))
        asked += size
    rows = [line.as_dict() for line in lines.values()]
    console.print(table(rows))
    console.print(f"equal answers: {equal}/{asked}")
    body = {
        "options": vars(options),
        "model": vars(SIZE),
        "lines": rows,
        "equal_answers": f"{equal}/{asked}",
    }
    console.print(f"report: {keep('native_step', body)}", highlight=False)


if __name__ == "__main__":
    main()
