"""Time to the first token of a quiet tenant while another tenant floods the deployment with videos.

    python -m bench.fairness [--videos 12] [--clients 48] [--texts 8] [--images 2] [--seconds 144]

Two deployments of the demo model, with a pool for each stage, on the same cores: one with API keys, where the gateway admits requests of
two tenants in turn, and one without, where all start at once. Each answers short texts and images of the quiet tenant alone, and at the same
moments beside two floods of videos of 1280x720 pixels, each another file:

- paced: as many a second as encoders about keep up with (open loop, Poisson arrivals: it waits for no answers);
- backlog: more than they can take, of clients that all wait for an answer and then send the next video at once (closed loop), so that
  all but a few of them wait all the time.

The ratio of the two p99 is what a flood costs the quiet tenant; beside it stands where the ratios of 95 of 100 resamples of the same times
lie (percentile bootstrap). Texts need no encoder: what they lose to either flood is their share of the cores, which pods with devices of their own
do not lose. So the same texts and images are asked a third time while all cores compute, with the priority that encoders have and for
nobody, and the last column compares with that. Images wait behind the backlog where nothing orders it.

All take turns of some seconds, again and again, so that whatever else this machine does falls on all alike. At the end of a turn the
flooding client hangs up on what has not been answered.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import multiprocessing
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import yaml
from rich.console import Console
from rich.table import Table

from bench.isolation import TOKENS, TURN_SECONDS, Storm, interval, phone_videos, resource, texts
from bench.openloop import Answered, Ask, Kind, arrivals, ask, drive, keep_busy
from bench.report import keep, percentiles
from mmd_api.tenants import hash_of, new_key
from mmd_cli.local import up
from mmd_cli.local.pods import NO_SECRETS, LocalSecrets

WORDS = 30
KINDS: tuple[Kind, ...] = ("text", "image")
PACED, BACKLOG = "paced", "backlog"
ALONE, BUSY = "alone", "busy cores"
"""What is compared with: nothing else, and no flood but cores that compute."""
FILES_OF_BACKLOG = 100_000  # more than are asked about in one turn, or by the paced flood in all
GOAL = 1.2
FLOOD_NICE = 10
FAIR, UNFAIR = "with tenants", "without"
console = Console(width=150)


@dataclass
class Flood:
    """One flood, and what was seen beside it."""

    beside: list[Answered] = field(default_factory=list)
    videos: list[Answered] = field(default_factory=list)
    asked: int = 0  # of the videos
    seconds: float = 0.0
    most_queued: float = 0.0


@dataclass
class Served:
    """One deployment, and what was seen of it alone and in each flood. `keys`: of the quiet tenant and the other; empty without tenants."""

    local: up.LocalDeployment
    keys: tuple[str, str]
    alone: list[Answered] = field(default_factory=list)
    floods: dict[str, Flood] = field(
        default_factory=lambda: {name: Flood() for name in (BUSY, PACED, BACKLOG)}
    )

    async def quiet_turn(self, asks: list[Ask]) -> None:
        """The quiet tenant alone."""
        self.alone += await drive(self.local.gateway_url, asks, self.keys[0])

    async def flooded_turn(self, asks: list[Ask], name: str, run: Run) -> None:
        """The quiet tenant beside a flood, which ends with its turn. It comes from a process of its own, so that it delays no clock here."""
        flood = self.floods[name]
        spawning = multiprocessing.get_context("spawn")
        reader, writer = spawning.Pipe(duplex=False)
        client = spawning.Process(target=run, args=(self.local.gateway_url, self.keys[1], writer))
        client.start()
        writer.close()
        await asyncio.to_thread(reader.recv)  # it is about to begin
        collecting = asyncio.create_task(asyncio.to_thread(_until_closed, reader))
        watching = asyncio.create_task(self._watch(flood))
        begun = time.monotonic()
        flood.beside += await drive(self.local.gateway_url, asks, self.keys[0])
        flood.seconds += time.monotonic() - begun
        client.kill()
        asked, answered = await collecting
        client.join()
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
        flood.asked += asked
        flood.videos += answered
        await self._until_idle()

    async def _watch(self, flood: Flood) -> None:
        while True:
            metrics = await self._metrics()
            flood.most_queued = max(flood.most_queued, _total(metrics, "mmd_tenant_queued_seconds"))
            await asyncio.sleep(0.5)

    async def _until_idle(self) -> None:
        while _total(await self._metrics(), "mmd_gateway_sequences"):
            await asyncio.sleep(0.1)
        await asyncio.sleep(1.0)  # pods free what was cancelled

    async def _metrics(self) -> str:
        async with httpx.AsyncClient(base_url=self.local.admin_url, timeout=60) as client:
            return (await client.get("/metrics")).text

    def report(self) -> dict[str, Any]:
        """Times in seconds."""
        return {
            "alone": {kind: _seen(self.alone, kind) for kind in KINDS},
            "floods": {name: self._report_of(flood) for name, flood in self.floods.items()},
        }

    def _report_of(self, flood: Flood) -> dict[str, Any]:
        found: dict[str, Any] = {}
        outcomes = Counter(_outcome(one) for one in flood.videos)
        for kind in KINDS:
            beside, seen = _times(flood.beside, kind), _seen(flood.beside, kind)
            others = {ALONE: self.alone, BUSY: self.floods[BUSY].beside}
            seen["ratio_of_p99"] = {
                name: _ratio(beside, _times(other, kind)) for name, other in others.items()
            }
            found[kind] = seen
        return {
            **found,
            "videos": {
                **outcomes,
                "given_up": flood.asked - len(flood.videos),
                "a_second": {what: round(count / flood.seconds, 2) for what, count in outcomes.items()},
                "ttft_seconds": percentiles(_times(flood.videos, "video")),
            },
            "most_queued_seconds": flood.most_queued,
        }


Run = Callable[[str, str, Connection], None]
"""What the flooding client runs, with the URL, its key, and where it sends each answer, and None for each request, before which it sends one
None as it begins. It yields the cores to whatever is measured beside it.
"""


def _paced(videos: list[Ask], url: str, key: str, seen: Connection) -> None:
    os.nice(FLOOD_NICE)
    seen.send(None)
    asyncio.run(drive(url, videos, key, seen.send, lambda: seen.send(None)))


def _backlog(files: list[bytes], first: int, clients: int, url: str, key: str, seen: Connection) -> None:
    os.nice(FLOOD_NICE)
    videos = Storm(0.0, files).endless(first)
    seen.send(None)
    asyncio.run(keep_busy(url, videos, clients, key, seen.send, lambda: seen.send(None)))


def _busy(_url: str, _key: str, seen: Connection) -> None:
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    seen.send(None)
    matrix = np.random.default_rng(1).random((512, 512), dtype=np.float32)
    while True:
        np.matmul(matrix, matrix)


def _until_closed(seen: Connection) -> tuple[int, list[Answered]]:
    """How many requests there were, and all answers."""
    asked, found = 0, []
    with contextlib.suppress(EOFError):
        while True:
            answered: Answered | None = seen.recv()
            if answered is None:
                asked += 1
            else:
                found.append(answered)
    return asked, found


def _seen(answered: list[Answered], kind: Kind) -> dict[str, Any]:
    asked, times = [one for one in answered if one.kind == kind], _times(answered, kind)
    return {
        "requests": len(asked),
        "failed": len(asked) - len(times),
        "ttft_seconds": percentiles(times),
    }


def _ratio(beside: list[float], other: list[float]) -> dict[str, Any]:
    """Of two p99, with where it lies; empty where either has no times."""
    if not (beside and other):
        return {}
    ratio = percentiles(beside)["p99"] / percentiles(other)["p99"]
    return {"ratio": ratio, "interval": interval(beside, other)}


def _times(seen: list[Answered], kind: Kind) -> list[float]:
    return [one.ttft_seconds for one in seen if one.kind == kind and one.ttft_seconds is not None]


def _outcome(one: Answered) -> str:
    """`answered`, or the code of the error."""
    if one.ttft_seconds is not None:
        return "answered"
    return next(
        (
            code
            for code in ("rate_limit_exceeded", "too_many_requests", "overloaded", "deadline_exceeded")
            if code in one.error
        ),
        "failed",
    )


def _total(metrics: str, name: str) -> float:
    return sum(
        float(line.split()[-1]) for line in metrics.splitlines() if line.startswith((f"{name}{{", f"{name} "))
    )


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Both deployments, quiet and flooded, in turns."""
    paced = Storm(options.videos, phone_videos())
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        served = {}
        for name, keys in ((FAIR, (new_key(), new_key())), (UNFAIR, ("", ""))):
            warming = Served(await _up(stack, folder, keys), keys)
            await warming.quiet_turn(asks_of(options, 1, 2)[:20])
            await warming.flooded_turn(
                asks_of(options, 1, 3)[:20], PACED, partial(_paced, paced.turn(1)[:20])
            )
            served[name] = Served(warming.local, keys)
        for turn in range(max(1, round(options.seconds / TURN_SECONDS))):
            for number, one in enumerate(served.values()):
                seed = 1000 * options.seed + 10 * turn + number
                await one.quiet_turn(asks_of(options, seed, seed))
                await one.flooded_turn(asks_of(options, seed, seed + 900), BUSY, _busy)
                await one.flooded_turn(
                    asks_of(options, seed, seed + 300), PACED, partial(_paced, paced.turn(seed + 500))
                )
                first = FILES_OF_BACKLOG * (1 + 2 * turn + number)  # no file is in two turns
                flooding = partial(_backlog, paced.files, first, options.clients)
                await one.flooded_turn(asks_of(options, seed, seed + 600), BACKLOG, flooding)
        return {name: one.report() for name, one in served.items()}


def asks_of(options: argparse.Namespace, moments: int, seed: int) -> list[Ask]:
    """A turn of the quiet tenant. `moments`: at which its requests come; `seed`: what they ask."""
    times = arrivals(options.images, TURN_SECONDS, np.random.default_rng([moments, 2]))
    images = [
        ask("image", at, 1_000_000 * seed + 700_000 + number, WORDS, TOKENS)
        for number, at in enumerate(times)
    ]
    return sorted([*texts(options, moments, seed, WORDS), *images], key=lambda one: one.at)


async def _up(stack: contextlib.AsyncExitStack, folder: Path, keys: tuple[str, str]) -> up.LocalDeployment:
    made = resource("E-P-D", "Native")
    file, secrets = folder / "deployment.yaml", NO_SECRETS
    if all(keys):
        made["metadata"]["name"] = "bench-fair"
        made["spec"]["gateway"]["auth"] = {"keysSecret": "keys"}
        tenants = [
            {"name": name, "keys": [{"hash": hash_of(key)}]}
            for name, key in zip(("quiet", "flood"), keys, strict=True)
        ]
        secrets = LocalSecrets(keys=folder / "keys.yaml")
        (folder / "keys.yaml").write_text(yaml.safe_dump({"tenants": tenants}))
    file.write_text(yaml.safe_dump(made))
    return await stack.enter_async_context(
        up.running(up.load(file), log_line=lambda *_: None, secrets=secrets)
    )


def table(found: dict[str, Any]) -> Table:
    """The report for a reader."""
    made = Table(title="TTFT of the quiet tenant in ms, p50 / p99", title_justify="left")
    for heading in (
        "gateway",
        "flood",
        "asked",
        "alone",
        "beside",
        "p99 to alone",
        "p99 to busy cores",
        "failed",
        "videos a second",
        "queued",
    ):
        made.add_column(heading)
    for name, run in found.items():
        for flood, seen in run["floods"].items():
            rates = seen["videos"]["a_second"].items()
            outcomes = ", ".join(f"{rate} {what}" for what, rate in rates)
            for kind in KINDS:
                alone, beside = run["alone"][kind], seen[kind]
                made.add_row(
                    name,
                    flood,
                    kind,
                    *(
                        " / ".join(f"{1000 * seconds[p]:.0f}" for p in ("p50", "p99") if p in seconds)
                        for seconds in (alone["ttft_seconds"], beside["ttft_seconds"])
                    ),
                    *(_shown(beside["ratio_of_p99"][other]) for other in (ALONE, BUSY)),
                    f"{alone['failed']} and {beside['failed']}",
                    outcomes,
                    f"{seen['most_queued_seconds']:.1f} s",
                )
    return made


def _shown(found: dict[str, Any]) -> str:
    if not found:
        return "none"
    lowest, highest = found["interval"]
    return f"{found['ratio']:.2f} ({lowest:.2f} to {highest:.2f})"


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--videos", type=float, default=12.0, help="a second")
    parser.add_argument("--clients", type=int, default=48, help="of the backlog")
    parser.add_argument("--texts", type=float, default=8.0, help="a second")
    parser.add_argument("--images", type=float, default=2.0, help="a second")
    parser.add_argument("--seconds", type=float, default=144.0, help="of each turn, in all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--name", default="fairness")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    found = asyncio.run(measure(options))
    console.print(table(found))
    body = {"options": vars(options), "goal": {"ratio_of_p99": GOAL}, "deployments": found}
    console.print(f"report: {keep(options.name, body)}", highlight=False)


if __name__ == "__main__":
    main()
