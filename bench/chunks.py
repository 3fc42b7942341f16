"""Time between tokens, and time to first token, by the size of a chunk: the native engine on CPUs, in process.

    python -m bench.chunks [--rounds 5] [--chunks 64 256 1024 0] [--prompt 2048] [--decoding 8] [--architecture llava]

Some sequences decode, and a long prompt comes. Until its first token each step computes a chunk of it and the next token of every other sequence, so the
time between two tokens of these is that of a step. 0 is the prompt as a whole. Sizes take turns; every other round begins with the last. Steps alone
are those before the prompt comes. Without media nothing but the chunk bounds a step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from rich.console import Console
from rich.table import Table

from bench.native_step import engine
from bench.report import keep
from bench.versus_vllm import SIZE
from mmd_workers.engine.engine import Engine
from mmd_workers.engine.interface import SamplingParams, SequenceInput
from support.oracles import random_model

VOCAB = 250  # below the tokens of media
QUESTION_TOKENS = 16  # of the sequences that decode
ALONE_STEPS = 16
console = Console(width=120)


@dataclass
class Line:
    """One size of a chunk: milliseconds of all rounds."""

    chunk_tokens: int
    alone: list[float] = field(default_factory=list)  # between tokens, before the prompt comes
    beside: list[float] = field(default_factory=list)  # and beside it
    longest: list[float] = field(default_factory=list)  # of a round
    ttft: list[float] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """For the report."""
        return {
            "chunk_tokens": self.chunk_tokens,
            "steps": len(self.beside) // len(self.ttft),
            "alone_ms": statistics.median(self.alone),
            "between_tokens_ms": statistics.median(self.beside),
            "longest_ms": statistics.median(self.longest),
            "ttft_ms": statistics.median(self.ttft),
            "ttft_ms_by_round": self.ttft,
        }


def add(made: Engine, name: str, token_ids: list[int], tokens: int) -> None:
    """Queue a prompt."""
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    made.add(SequenceInput(name, made.model.lower(token_ids, []), sampling))


def stepped(made: Engine) -> tuple[float, set[str]]:
    """The milliseconds of a step, and which sequences have a token of it."""
    begun = time.perf_counter()
    output = made.step()
    return 1000 * (time.perf_counter() - begun), {token.sequence_id for token in output.tokens}


def measure(made: Engine, line: Line, prompt: list[int], questions: list[list[int]]) -> None:
    """One round."""
    made.scheduler.chunk_tokens = line.chunk_tokens
    names = {str(number) for number in range(len(questions))}
    for number, question in enumerate(questions):
        add(made, str(number), question, made.max_model_len)
    while stepped(made)[1] != names:
        pass
    line.alone += [stepped(made)[0] for _ in range(ALONE_STEPS)]
    add(made, "prompt", prompt, 1)
    beside, ended = list[float](), False
    while not ended:
        spent, told = stepped(made)
        beside.append(spent)
        ended = "prompt" in told
    line.beside += beside
    line.longest.append(max(beside))
    line.ttft.append(sum(beside))
    for name in names:
        made.abort(name)


def table(lines: list[dict[str, Any]]) -> Table:
    """The report for a reader."""
    made = Table(title="milliseconds, median of the rounds", title_justify="left")
    for heading in ("chunk", "steps", "alone", "between tokens", "longest", "first token of the prompt"):
        made.add_column(heading, justify="right")
    for line in lines:
        figures = (line["alone_ms"], line["between_tokens_ms"], line["longest_ms"], line["ttft_ms"])
        made.add_row(str(line["chunk_tokens"]), str(line["steps"]), *(f"{figure:.1f}" for figure in figures))
    return made


def main() -> None:
    """Measure each size and print one table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--chunks", type=int, nargs="+", default=[64, 256, 1024, 0])
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of the long prompt")
    parser.add_argument("--decoding", type=int, default=8, help="sequences that decode")
    parser.add_argument("--architecture", default="llava")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--note", default="", help="for the report, such as what else ran on the machine")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(options.threads)
    folder = Path(f".cache/models/bench-{options.architecture}").resolve()
    if not (folder / "config.json").exists():
        random_model.build(options.architecture, folder, size=SIZE)
    made = engine(folder)
    lines = [Line(size or options.prompt) for size in options.chunks]
    measure(made, Line(512), [5] * options.prompt, [[5] * QUESTION_TOKENS] * options.decoding)
    for number in range(options.rounds):
        rng = np.random.default_rng(number)
        prompt = rng.integers(3, VOCAB, options.prompt).tolist()
        questions = rng.integers(3, VOCAB, (options.decoding, QUESTION_TOKENS)).tolist()
        for line in reversed(lines) if number % 2 else lines:
            measure(made, line, prompt, questions)
    rows = [line.as_dict() for line in lines]
    console.print(table(rows))
    body = {"options": vars(options), "model": vars(SIZE), "lines": rows}
    console.print(f"report: {keep('chunks', body)}", highlight=False)


if __name__ == "__main__":
    main()
