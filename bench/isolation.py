"""Time to the first token of text while videos pour in: one process for all beside one process for each stage, on the same cores.

    python bench/isolation.py [--videos 8] [--every 0.2] [--seconds 60]

Each layout answers a steady stream of text alone, and the same stream with a storm of videos beside it (open loop: neither waits for
answers). The ratio of the two p99 is what text pays for the videos of others. All four take turns of some seconds, again and again, so that
whatever else this machine does falls on all alike. Where text pays is read off the gateway's timelines, and the processor time of
every pod off the kernel.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import httpx
import yaml
from openloop import Answered, Ask, drive, mixed, steady
from report import keep, percentiles
from rich.console import Console
from rich.table import Table

from mmd_workers.local import up

KV = {"kvCacheMebibytes": 64}
POOLS: dict[str, dict[str, Any]] = {
    "E-P-D": {
        "encoder": {"cacheMebibytes": 64, "resources": {"cpu": "100m"}},
        "prefill": {**KV, "resources": {"cpu": "1"}},
        "decode": {**KV, "maxSequences": 32, "resources": {"cpu": "1"}},
    },
    "monolithic": {"decode": {**KV, "maxSequences": 32, "resources": {"cpu": "2"}}},
}
"""Processor shares as a cluster would give them: text goes first, encoders take what is left."""
WORDS, TOKENS = 30, 8
TURN_SECONDS = 12.0
console = Console()


def resource(layout: str) -> dict[str, Any]:
    """The demo model in one layout."""
    pools = {name: {"replicas": 1, "gpus": 0, **own} for name, own in POOLS[layout].items()}
    spec = {
        "model": {"id": "builtin/demo", "dtype": "Float32"},
        **pools,
        "transfer": {"kv": {"backend": "Gloo"}},
    }
    return {
        "apiVersion": "serving.multimodal.dev/v1alpha1",
        "kind": "MultimodalDeployment",
        "metadata": {"name": f"bench-{layout.lower()}"},
        "spec": {**spec, "gateway": {"resources": {"cpu": "1"}}},
    }


def processor_seconds(local: up.LocalDeployment) -> dict[str, float]:
    """Of each pod with all processes that it started, and of this one, which asks."""
    pods = {child.pid: name for name, child in local.supervisor.children.items()}
    parents: dict[int, int] = {}
    used: dict[int, float] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        pid = int(stat.parent.name)
        parents[pid] = int(fields[1])
        used[pid] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    of_pods: dict[str, float] = defaultdict(float, client=used[os.getpid()])
    for pid, seconds in used.items():
        while pid and pid not in pods:
            pid = parents.get(pid, 0)
        if pid in pods:
            of_pods[pods[pid]] += seconds
    return dict(of_pods)


async def phases(url: str, answered: list[Answered]) -> dict[str, list[float]]:
    """Milliseconds that requests spent in each phase, as the gateway remembers them."""
    found: dict[str, list[float]] = defaultdict(list)
    async with httpx.AsyncClient(base_url=url) as client:
        for one in answered:
            reply = await client.get(f"/debug/requests/{one.request_id}")
            if reply.status_code != 200:
                continue
            timeline = reply.json()
            if timeline["attempts"]:
                found["gateway"].append(1000 * (timeline["attempts"][0]["placed"] - timeline["arrived"]))
            for name in ("queue", "prefill", "kv_transfer", "ttft"):
                if name in timeline["timings"]:
                    found[name].append(timeline["timings"][name])
    return found


class Stretch:
    """What was seen of one layout, alone or in the storm, over all of its turns."""

    def __init__(self) -> None:
        self.answered: list[Answered] = []
        self.phases: dict[str, list[float]] = defaultdict(list)
        self.processor: dict[str, float] = defaultdict(float)
        self.seconds = 0.0

    async def turn(self, local: up.LocalDeployment, asks: list[Ask]) -> None:
        """Some seconds of load."""
        before, begun = processor_seconds(local), time.monotonic()
        answered = await drive(local.gateway_url, asks)
        self.seconds += time.monotonic() - begun
        for pod, now in processor_seconds(local).items():
            self.processor[pod] += now - before.get(pod, 0.0)
        self.answered += answered
        for name, values in (
            await phases(local.gateway_url, [o for o in answered if o.kind == "text"])
        ).items():
            self.phases[name] += values

    def report(self) -> dict[str, Any]:
        """Times in seconds and milliseconds as the names say; `cores_used` by pod."""
        kinds: dict[str, Any] = {}
        for kind in sorted({one.kind for one in self.answered}):
            of = [one for one in self.answered if one.kind == kind]
            times = [one.ttft_seconds for one in of if one.ttft_seconds is not None]
            kinds[kind] = {
                "requests": len(of),
                "failed": len(of) - len(times),
                "ttft_seconds": percentiles(times),
            }
        return kinds | {
            "cores_used": {pod: used / self.seconds for pod, used in self.processor.items()},
            "text_phases_ms": {name: percentiles(values, (50, 99)) for name, values in self.phases.items()},
        }


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Both layouts, alone and in the storm, in turns."""
    turns = max(1, round(options.seconds / TURN_SECONDS))
    found = {layout: {"quiet": Stretch(), "storm": Stretch()} for layout in POOLS}
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        running = {}
        for layout in POOLS:
            file = folder / f"{layout}.yaml"
            file.write_text(yaml.safe_dump(resource(layout)))
            running[layout] = await stack.enter_async_context(
                up.running(up.load(file), log_line=lambda *_: None)
            )
            warm = mixed(4, 5, options.seed, {"text": 0.6, "video": 0.4})
            await drive(running[layout].gateway_url, warm)
        for turn in range(turns):
            for number, (layout, stretches) in enumerate(found.items()):
                seed = 1000 * options.seed + 10 * turn + number
                await stretches["quiet"].turn(running[layout], texts(options, seed))
                storm = mixed(options.videos, TURN_SECONDS, seed, {"video": 1.0})
                await stretches["storm"].turn(running[layout], texts(options, seed + 500) + storm)
    return {
        layout: told(**{name: s.report() for name, s in stretches.items()})
        for layout, stretches in found.items()
    }


def texts(options: argparse.Namespace, seed: int) -> list[Ask]:
    """One turn of text."""
    return steady("text", options.every, TURN_SECONDS, seed, WORDS, TOKENS)


def told(quiet: dict[str, Any], storm: dict[str, Any]) -> dict[str, Any]:
    """A layout's two stretches and how they compare."""
    times = (storm["text"]["ttft_seconds"], quiet["text"]["ttft_seconds"])
    return {"quiet": quiet, "storm": storm, "ratio": {p: times[0][p] / times[1][p] for p in times[0]}}


def table(found: dict[str, Any]) -> Table:
    """The report for a reader."""
    made = Table(title="TTFT of text in ms, p50 / p90 / p99", title_justify="left")
    for heading in (
        "layout",
        "text alone",
        "beside videos",
        "ratio of p99",
        "videos: TTFT",
        "cores used in the storm",
    ):
        made.add_column(heading)

    def ms(times: dict[str, float]) -> str:
        return " / ".join(f"{1000 * value:.0f}" for value in times.values())

    for layout, run in found.items():
        cores = ", ".join(
            f"{pod.removeprefix(f'bench-{layout.lower()}-').split('-')[0]} {n:.2f}"
            for pod, n in run["storm"]["cores_used"].items()
        )
        made.add_row(
            layout,
            ms(run["quiet"]["text"]["ttft_seconds"]),
            ms(run["storm"]["text"]["ttft_seconds"]),
            f"{run['ratio']['p99']:.2f}",
            ms(run["storm"]["video"]["ttft_seconds"]),
            cores,
        )
    return made


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--videos", type=float, default=8.0, help="a second")
    parser.add_argument("--every", type=float, default=0.2, help="seconds between texts")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--name", default="isolation")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    found = asyncio.run(measure(options))
    console.print(table(found))
    body = {"options": vars(options), "goal": {"ratio_of_p99": 1.3}, "layouts": found}
    console.print(f"report: {keep(options.name, body)}", highlight=False)


if __name__ == "__main__":
    main()
