"""What a grammar costs: tokens a second of the native engine with one in every sequence beside none, in process.

    python -m bench.grammars [--rounds 5] [--tokens 64] [--batches 1 8 32] [--temperature 0]

The same prompts run with and without in turns, on one engine; the second begins every other round. The grammar is a list of objects that
is longer than any answer, so both make the same number of tokens. A ratio is of one round.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import transformers
from rich.console import Console
from rich.table import Table

from bench.native_step import engine
from bench.report import keep
from bench.versus_vllm import SIZE
from examples import random_model
from mmd_api.contract.answers import Grammar
from mmd_workers.engine.engine import Engine
from mmd_workers.engine.interface import SamplingParams, SequenceInput
from mmd_workers.model.grammar import Grammars, load_tokenizer

ENTRY = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "count": {"type": "integer", "minimum": 0, "maximum": 999},
        "kind": {"enum": ["circle", "square", "triangle"]},
    },
    "required": ["name", "count", "kind"],
    "additionalProperties": False,
}
GRAMMAR = Grammar("json_schema", json.dumps({"type": "array", "items": ENTRY, "minItems": 1000}))
KINDS = ("without", "with a grammar")
console = Console(width=100)


def rate(
    made: Engine,
    grammars: Grammars | None,
    prompts: list[list[int]],
    sampling: SamplingParams,
    clock: Callable[[], float],
) -> float:
    """Tokens a second of the steps that decode the whole batch."""
    for number, ids in enumerate(prompts):
        begun = grammars.begin(GRAMMAR) if grammars is not None else None
        made.add(SequenceInput(str(number), made.model.lower(ids, []), sampling, constraint=begun))
    tokens, spent = 0, 0.0
    while made.has_work():
        begin = clock()
        output = made.step()
        if output.failed:
            raise output.failed[0][1]
        if not output.prefill_tokens:
            spent += clock() - begin
            tokens += len(output.tokens)
    return tokens / spent


def main() -> None:
    """Measure both and print one table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="of all threads in place of wall time: for a machine that is busy",
    )
    options = parser.parse_args()
    clock = time.process_time if options.cpu_time else time.perf_counter
    transformers.logging.set_verbosity_error()
    folder = Path(".cache/models/bench-llava").resolve()
    if not (folder / "config.json").exists():
        random_model.build("llava", folder, size=SIZE)
    made = engine(folder, fused=True)
    grammars = Grammars(partial(load_tokenizer, folder), made.model.vocab_size, made.model.eos_token_ids)
    sampling = SamplingParams(options.tokens, temperature=options.temperature, ignore_eos=True)
    rates: dict[int, dict[str, list[float]]] = {
        size: {kind: [] for kind in KINDS} for size in options.batches
    }
    for kind in KINDS:
        rate(made, grammars if kind == KINDS[1] else None, [[5] * options.prompt], sampling, clock)
    for number, size in itertools.product(range(options.rounds), options.batches):
        prompts = (
            np.random.default_rng([number, size])
            .integers(3, made.model.vocab_size, (size, options.prompt))
            .tolist()
        )
        for kind in sorted(KINDS, reverse=bool(number % 2)):
            rates[size][kind].append(
                rate(made, grammars if kind == KINDS[1] else None, prompts, sampling, clock)
            )
    table = Table(
        title=f"tokens a second, median of the rounds; {made.model.vocab_size} tokens in the vocabulary"
    )
    for heading in ("sequences", *KINDS, "ratio (rounds)"):
        table.add_column(heading)
    for size, found in rates.items():
        ratios = [b / a for a, b in zip(found[KINDS[0]], found[KINDS[1]], strict=True)]
        table.add_row(
            str(size),
            *(f"{statistics.median(found[kind]):.0f}" for kind in KINDS),
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
        )
    console.print(table)
    body = {"options": vars(options), "model": vars(SIZE), "tokens_per_second": rates}
    console.print(f"report: {keep('grammars', body)}", highlight=False)


if __name__ == "__main__":
    main()
