"""What KV in 8 or 4 bits saves, on its way from prefill to decode or in the pool, and what it changes, on CPUs, in process.

    python -m bench.kv_formats [--prompts 16] [--prompt-tokens 128] [--tokens 64] [--models builtin/demo]

One engine prefills each prompt, and for each format of `spec.transfer.kv.wireFormat` another one decodes it from the KV that was packed and
unpacked. Answers are greedy, and compared with those from exact KV: the share of answers that are the same to their end, of tokens that come before
the first that differs, and of tokens that are equal at their place, which after that is chance. The error of KV is that of all its values together,
||found - exact|| / ||exact||. Packing and unpacking are timed with the KV of one prompt, the best of the rounds, on as many threads as `--threads`.

For each type of `spec.engine.kvDtype`, an engine with such a pool prefills and decodes the prompts; the error is that of the prompts' KV there, in which
that of each layer adds to those below. The time of a token is the processor's in the fastest step of one sequence of about `--context` tokens.

Weights are random, but in `builtin/demo`: their logits lie closer together than a trained model's, so that more tokens change. The error of KV
depends on its outliers, which random weights do not have: measure your own model, a folder or a hub id, with `--models`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
import transformers
from rich.console import Console
from rich.table import Table

from bench.native_step import engine
from bench.report import keep
from bench.versus_vllm import SIZE
from mmd_api.spec.engine import KvDtype
from mmd_api.spec.transfer import KvWireFormat
from mmd_workers.engine.engine import Engine
from mmd_workers.engine.interface import SamplingParams, SequenceInput
from mmd_workers.kv.quantize import KvWire
from support.oracles import random_model

VOCAB = 250  # below the tokens of media
RANDOM = ("llava", "qwen2_5_vl", "gemma3")
console = Console(width=140)


@dataclass(frozen=True)
class Prefilled:
    """A prompt, the first token of its answer, the rotary position of that, and its KV."""

    token_ids: list[int]
    first: list[int]
    next_position: int
    kv: list[torch.Tensor]


def prefilled(made: Engine, token_ids: list[int]) -> Prefilled:
    """Compute a prompt and forget it there."""
    prompt = made.model.lower(token_ids, [])
    made.add(SequenceInput("prompt", prompt, sampling_of(1), stop_after_prefill=True))
    tokens = [token.token_id for token in stepped(made)]
    kv = made.read_kv("prompt", 0, len(token_ids))
    made.abort("prompt")
    return Prefilled(token_ids, tokens, prompt.next_position, kv)


def answer(made: Engine, prompt: Prefilled, kv: list[torch.Tensor], tokens: int) -> list[int]:
    """The greedy answer from this KV."""
    made.reserve("answer", len(prompt.token_ids), tokens)
    made.write_kv("answer", 0, kv)
    made.attach("answer", prompt.token_ids, sampling_of(tokens), prompt.first, prompt.next_position, [])
    return [*prompt.first, *(token.token_id for token in stepped(made))]


def sampling_of(tokens: int) -> SamplingParams:
    """Greedy, exactly so many tokens."""
    return SamplingParams(max_tokens=tokens, ignore_eos=True)


def stepped(made: Engine) -> list[Any]:
    """The tokens of all steps until nothing is left."""
    found: list[Any] = []
    while made.has_work():
        output = made.step()
        if output.failed:
            raise SystemExit(f"the engine failed: {output.failed}")
        found += output.tokens
    return found


def relative_error(found: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    """Of all values together."""
    pairs = list(zip(found, exact, strict=True))
    wrong = sum(float((a.double() - b.double()).square().sum()) for a, b in pairs)
    return float((wrong / sum(float(b.double().square().sum()) for _, b in pairs)) ** 0.5)


def first_difference(found: list[int], exact: list[int]) -> int:
    """The number of equal tokens before the first that differs."""
    return next((i for i, (a, b) in enumerate(zip(found, exact, strict=True)) if a != b), len(exact))


def best_milliseconds(run: Callable[[], object], rounds: int) -> float:
    """Of the fastest of some rounds."""
    took = []
    for _ in range(rounds + 1):  # the first one warms up
        begun = time.perf_counter()
        run()
        took.append(1000 * (time.perf_counter() - begun))
    return min(took[1:])


def agreement(found: list[list[int]], exact: list[list[int]], tokens: int) -> dict[str, float]:
    """Shares of answers and of their tokens that are the same."""
    same = [first_difference(a, b) for a, b in zip(found, exact, strict=True)]
    equal = [sum(a == b for a, b in zip(*pair, strict=True)) for pair in zip(found, exact, strict=True)]
    return {
        "same_answers": sum(count == tokens for count in same) / len(same),
        "tokens_before_difference": sum(same) / (len(same) * tokens),
        "equal_tokens": sum(equal) / (len(equal) * tokens),
        "median_first_difference": statistics.median(same),
    }


def milliseconds_per_token(made: Engine, prompt: Prefilled, context: int, rounds: int) -> float:
    """Processor time of the fastest step of one sequence with so long a context, the KV of a prompt again and again."""
    size = len(prompt.token_ids)
    starts = range(0, max(1, context // size) * size, size)
    made.reserve("long", len(starts) * size, rounds)
    for start in starts:
        made.write_kv("long", start, prompt.kv)
    token_ids = prompt.token_ids * len(starts)
    made.attach("long", token_ids, sampling_of(rounds), prompt.first, len(token_ids), [])
    took = []
    while made.has_work():
        begun = time.process_time()
        made.step()
        took.append(1000 * (time.process_time() - begun))
    return min(took)


def pools(
    model: str, prompts: list[Prefilled], exact: list[list[int]], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """A line for each type of the pool, beside the answers from the model's own."""
    lines = list[dict[str, Any]]()
    for kv_dtype in get_args(KvDtype):
        made = engine(Path(model), kv_dtype=kv_dtype)
        own = [prefilled(made, prompt.token_ids) for prompt in prompts]
        found = [answer(made, prompt, prompt.kv, options.tokens) for prompt in own]
        wire = KvWire(made.model.kv_layout, kv_dtype)
        errors = [relative_error(wire.unpack(a.kv), b.kv) for a, b in zip(own, prompts, strict=True)]
        lines.append(
            {
                "model": model,
                "dtype": made.model.kv_layout.dtype,
                "kv_dtype": kv_dtype,
                "bytes_per_token": made.kv.layout.bytes_per_token(),
                "pool_tokens": made.kv.num_blocks * made.kv.block_tokens,
                "relative_error": statistics.mean(errors),
                **agreement(found, exact, options.tokens),
                "token_ms": milliseconds_per_token(made, own[0], options.context, options.rounds + 1),
            }
        )
    return lines


def measure(model: str, options: argparse.Namespace) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A line for each format on the wire, and one for each type of the pool."""
    made = engine(Path(model))
    rng = np.random.default_rng(options.seed)
    shape = (options.prompts, options.prompt_tokens)
    prompts = [
        prefilled(made, ids) for ids in rng.integers(3, min(VOCAB, made.model.vocab_size), shape).tolist()
    ]
    exact = [answer(made, prompt, prompt.kv, options.tokens) for prompt in prompts]
    lines = list[dict[str, Any]]()
    for wire_format in get_args(KvWireFormat):
        wire = KvWire(made.model.kv_layout, wire_format)
        moved = [wire.unpack(wire.pack(prompt.kv)) for prompt in prompts]
        found = [answer(made, prompt, kv, options.tokens) for prompt, kv in zip(prompts, moved, strict=True)]
        packed = wire.pack(prompts[0].kv)
        lines.append(
            {
                "model": model,
                "dtype": made.model.kv_layout.dtype,
                "format": wire_format,
                "bytes_per_token": wire.bytes_per_token,
                "relative_error": statistics.mean(
                    relative_error(kv, prompt.kv) for kv, prompt in zip(moved, prompts, strict=True)
                ),
                **agreement(found, exact, options.tokens),
                "pack_ms": best_milliseconds(lambda w=wire: w.pack(prompts[0].kv), options.rounds),  # type: ignore[misc]
                "unpack_ms": best_milliseconds(lambda w=wire, p=packed: w.unpack(p), options.rounds),  # type: ignore[misc]
                "exact_bytes": sum(tensor.nbytes for tensor in prompts[0].kv),
            }
        )
    return lines, pools(model, prompts, exact, options)


def table(title: str, lines: list[dict[str, Any]], form: str, times: tuple[str, ...]) -> Table:
    """The report for a reader. `form`: the key of a line's format."""
    made = Table(title=title, title_justify="left")
    headings = ("model", "format", "bytes/token", "error of KV", "same answers", "tokens before a difference")
    for heading in (*headings, "equal tokens", *(name.replace("_", " ") for name in times)):
        made.add_column(heading)
    for line in lines:
        shares = (line[name] for name in ("same_answers", "tokens_before_difference", "equal_tokens"))
        made.add_row(
            Path(line["model"]).name,
            line[form],
            str(line["bytes_per_token"]),
            f"{line['relative_error']:.2%}",
            *(f"{share:.1%}" for share in shares),
            *(f"{line[name]:.2f}" for name in times),
        )
    return made


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["builtin/demo", *RANDOM], help="ids, or random ones")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument(
        "--rounds", type=int, default=20, help="of packing and unpacking, and steps that are timed"
    )
    parser.add_argument(
        "--context", type=int, default=4000, help="tokens of a sequence whose steps are timed"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(options.threads)
    lines, of_pools = list[dict[str, Any]](), list[dict[str, Any]]()
    for model in options.models:
        folder = Path(f".cache/models/bench-{model}").resolve()
        if model in RANDOM and not (folder / "config.json").exists():
            random_model.build(model, folder, size=SIZE)
        moved, kept = measure(str(folder) if model in RANDOM else model, options)
        lines, of_pools = lines + moved, of_pools + kept
    console.print(
        table("KV on its way, and greedy answers from it", lines, "format", ("pack_ms", "unpack_ms"))
    )
    console.print(table("KV in the pool, and greedy answers from it", of_pools, "kv_dtype", ("token_ms",)))
    for name, found in (("kv_formats", lines), ("kv_pools", of_pools)):
        body = {"options": vars(options), "model": vars(SIZE), "lines": found}
        console.print(f"report: {keep(name, body)}", highlight=False)


if __name__ == "__main__":
    main()
