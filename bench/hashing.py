"""Milliseconds to hash the blocks of a long prompt, by the plain definition and as the code does it, in one run.

    python -m bench.hashing [--tokens 16384] [--frames 0 64 768] [--rounds 30]

The plain definition hashes every block by itself and looks at every medium for each of them. Both must give the
same identities. Rounds of the two alternate; a line has the medians, the best round, and the median of the ratios. The last column is what a decode
pod does where the offer brought the identities.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.report import keep
from mmd_workers.engine.memory.blocks import MediaSpan, completed_identities, leading_identities

BLOCK_TOKENS = 16
console = Console()


def plain(tokens: Sequence[int], spans: Sequence[MediaSpan], size: int, root: bytes = b"") -> list[bytes]:
    """Identities by their definition."""
    identities, parent = [], root
    for start in range(0, len(tokens) // size * size, size):
        block = struct.pack(f"<{size}q", *tokens[start : start + size])
        digest = hashlib.blake2b(parent + block, digest_size=16)
        for span_start, length, feature_id in spans:
            if span_start < start + size and span_start + length > start:
                digest.update(f"|{span_start - start}:{length}:{feature_id}".encode())
        parent = digest.digest()
        identities.append(parent)
    return identities


def prompt(tokens: int, frames: int) -> tuple[list[int], list[MediaSpan]]:
    """Token ids, and one video of `frames` runs of placeholders, a token apart."""
    ids = [(number * 7919) % 150_000 for number in range(tokens)]
    if not frames:
        return ids, []
    every, feature_id = tokens // frames, hashlib.sha256(b"video").hexdigest()
    return ids, [(number * every, every - 1, feature_id) for number in range(frames)]


def milliseconds(run: Callable[[], object]) -> float:
    """Duration of one call."""
    begin = time.perf_counter()
    run()
    return 1000 * (time.perf_counter() - begin)


def line(tokens: int, frames: int, rounds: int) -> dict[str, Any]:
    """One prompt: medians over all rounds, which alternate."""
    ids, spans = prompt(tokens, frames)
    identities = plain(ids, spans, BLOCK_TOKENS)
    if leading_identities(ids, spans, b"", BLOCK_TOKENS) != identities:
        raise SystemExit("the identities differ from those of the plain definition")
    before, now, offered = [], [], []
    for _ in range(rounds):
        before.append(milliseconds(lambda: plain(ids, spans, BLOCK_TOKENS)))
        now.append(milliseconds(lambda: leading_identities(ids, spans, b"", BLOCK_TOKENS)))
        offered.append(milliseconds(lambda: completed_identities(identities, ids, spans, BLOCK_TOKENS)))
    ratios = [first / second for first, second in zip(before, now, strict=True)]
    return {
        "tokens": tokens,
        "frames": frames,
        "plain_milliseconds": statistics.median(before),
        "milliseconds": statistics.median(now),
        "best_milliseconds": min(now),
        "ratio": statistics.median(ratios),
        "attach_milliseconds": statistics.median(offered),
    }


def table(lines: Sequence[dict[str, Any]]) -> Table:
    """The report for a reader."""
    made = Table(title=f"hashing a prompt in blocks of {BLOCK_TOKENS} tokens, ms", title_justify="left")
    for heading in ("tokens", "frames", "plain", "now", "best", "ratio", "with an offer's"):
        made.add_column(heading, justify="right")
    for item in lines:
        made.add_row(
            f"{item['tokens']}",
            f"{item['frames']}",
            f"{item['plain_milliseconds']:.2f}",
            f"{item['milliseconds']:.2f}",
            f"{item['best_milliseconds']:.2f}",
            f"{item['ratio']:.1f}",
            f"{item['attach_milliseconds']:.2f}",
        )
    return made


def main() -> None:
    """Measure every prompt and print one table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--frames", type=int, nargs="+", default=[0, 64, 768])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--name", default="hashing")
    options = parser.parse_args()
    lines = [line(options.tokens, frames, options.rounds) for frames in options.frames]
    console.print(table(lines))
    path = keep(options.name, {"options": vars(options), "prompts": lines})
    console.print(f"report: {path}", highlight=False)


if __name__ == "__main__":
    main()
