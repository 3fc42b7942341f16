"""Throughput and time to the first token of five mixes of text, images and videos: in one process and in a pool for each stage, without
asynchronous encoding, and without overlap.

    python -m bench.mixes [--requests 160] [--clients 16] [--rounds 3]

Deployments of the demo model on the same cores get the same mixes in turns: so many clients, each of which sends its next request as soon
as it has an answer of 32 tokens (closed loop). No file or text comes twice. Each round gives a number of requests a second; the report has
their median, least and greatest, and the times of all rounds. A turn lasts until its last answer, when clients have run out of requests. Where a kind
has few requests, its p99 is nearly its longest.

The first comparison has media before 100 words of text: pools, one process, and one process that encodes synchronously
(`bench.synchronous`). The second has 250 words before the media, which is more than a quarter of a chunk: pools that prefill it while media
are encoded, as they do, and pools that do not (`bench.no_overlap`). Those two modules are imported into the pods of their deployments and
are no part of the workers.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import yaml
from rich.console import Console
from rich.table import Table

from bench.isolation import resource
from bench.openloop import Answered, Ask, Kind, ask, keep_busy
from bench.report import keep, percentiles
from mmd_cli.local import up
from mmd_cli.local.engines import Interpreter

TOKENS = 32
MIXES: dict[str, dict[Kind, float]] = {
    "text": {"text": 1.0},
    "9 texts, 1 image": {"text": 0.9, "image": 0.1},
    "8 texts, 1 image, 1 video": {"text": 0.8, "image": 0.1, "video": 0.1},
    "5 texts, 3 images, 2 videos": {"text": 0.5, "image": 0.3, "video": 0.2},
    "videos": {"video": 1.0},
}


@dataclass(frozen=True)
class Variant:
    """A layout of `bench.isolation`, and what its pods import that changes them."""

    layout: str
    imported: tuple[str, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """Deployments that run at the same time and get the same requests."""

    variants: dict[str, Variant]
    words: int
    text_first: bool


COMPARISONS = (
    Comparison(
        {
            "pools": Variant("E-P-D"),
            "one process": Variant("monolithic"),
            "one process, synchronous": Variant("monolithic", ("bench.synchronous",)),
        },
        words=100,
        text_first=False,
    ),
    Comparison(
        {
            "pools, text first": Variant("E-P-D"),
            "pools, text first, no overlap": Variant("E-P-D", ("bench.no_overlap",)),
        },
        words=250,
        text_first=True,
    ),
)
WARM_UP_REQUESTS = 20
LEAST_REQUESTS = 16  # of a kind, for its percentiles
console = Console(width=130)


@dataclass
class Turns:
    """What was seen of one mix in one layout."""

    answered: list[Answered] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)

    async def take(self, url: str, asks: list[Ask], clients: int) -> None:
        """One round."""
        seen: list[Answered] = []
        begun = time.perf_counter()
        await keep_busy(url, asks, clients, "", seen.append, lambda: None)
        self.rates.append(sum(one.ttft_seconds is not None for one in seen) / (time.perf_counter() - begun))
        self.answered += seen

    def report(self) -> dict[str, Any]:
        """Times in seconds; `ttft_seconds` of all, and by kind."""
        kinds = sorted({one.kind for one in self.answered})
        return {
            "requests_per_second": self.rates,
            "failed": sum(one.ttft_seconds is None for one in self.answered),
            "ttft_seconds": percentiles(_times(self.answered)),
            "by_kind": {
                kind: percentiles(times)
                for kind in kinds
                if len(times := _times([one for one in self.answered if one.kind == kind])) >= LEAST_REQUESTS
            },
        }


def _times(answered: list[Answered]) -> list[float]:
    return [one.ttft_seconds for one in answered if one.ttft_seconds is not None]


def asks_of(
    shares: dict[Kind, float], requests: int, seed: int, words: int = 100, *, text_first: bool = False
) -> list[Ask]:
    """So many requests, the kinds as near to their shares as whole numbers allow, in random order."""
    kinds: list[Kind] = [kind for kind, share in shares.items() for _ in range(round(share * requests))]
    order = np.random.default_rng(seed).permutation(len(kinds)).tolist()
    return [
        ask(kinds[place], 0.0, 100_000 * seed + number, words, TOKENS, text_first=text_first)
        for number, place in enumerate(order)
    ]


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Both comparisons, all mixes, in turns."""
    found: dict[str, dict[str, Any]] = {mix: {} for mix in MIXES}
    for comparison in COMPARISONS:
        async with contextlib.AsyncExitStack() as stack:
            urls = {
                name: await stack.enter_async_context(running(variant))
                for name, variant in comparison.variants.items()
            }
            for mix, by_variant in (await take_turns(comparison, urls, options)).items():
                found[mix] |= by_variant
    return found


@contextlib.asynccontextmanager
async def running(variant: Variant) -> AsyncIterator[str]:
    """The URL of a variant's gateway."""
    interpreter = Interpreter(imported=variant.imported)
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(up, "interpreter_for", return_value=interpreter),
    ):
        file = Path(folder) / "bench.yaml"
        file.write_text(yaml.safe_dump(resource(variant.layout, "Native")))
        async with up.running(up.load(file), log_line=lambda *_: None) as local:
            yield local.gateway_url


async def take_turns(
    comparison: Comparison, urls: dict[str, str], options: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """All mixes; reports by mix and variant."""
    found = {mix: {name: Turns() for name in urls} for mix in MIXES}
    seed = 1
    for mix, shares in MIXES.items():
        for number in range(-1, options.rounds):  # the first warms up
            seed += 1  # in each turn the same requests of all variants, which share no cache
            for name, url in urls.items():
                asks = await asyncio.to_thread(
                    asks_of,
                    shares,
                    options.requests if number >= 0 else WARM_UP_REQUESTS,
                    seed,
                    comparison.words,
                    text_first=comparison.text_first,
                )
                with console.status(f"{mix}: {name}"):
                    turns = found[mix][name] if number >= 0 else Turns()
                    await turns.take(url, asks, options.clients)
    return {mix: {name: turns.report() for name, turns in by.items()} for mix, by in found.items()}


def table(found: dict[str, Any]) -> Table:
    """The report for a reader."""
    made = Table(title="throughput, and TTFT in ms (p50 / p99)", title_justify="left")
    for heading in ("mix", "variant", "requests a second", "all", "text", "image", "video", "failed"):
        made.add_column(heading)
    for mix, variants in found.items():
        for name, one in variants.items():
            rates = one["requests_per_second"]
            shown = [
                one["ttft_seconds"],
                *(one["by_kind"].get(kind, {}) for kind in ("text", "image", "video")),
            ]
            made.add_row(
                mix,
                name,
                f"{statistics.median(rates):.1f} ({min(rates):.1f} to {max(rates):.1f})",
                *(" / ".join(f"{1000 * times[p]:.0f}" for p in ("p50", "p99") if times) for times in shown),
                str(one["failed"]),
            )
    return made


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=160, help="of a turn")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    found = asyncio.run(measure(options))
    console.print(table(found))
    console.print(f"report: {keep('mixes', {'options': vars(options), 'mixes': found})}", highlight=False)


if __name__ == "__main__":
    main()
