"""Time to the first token of text while videos pour in: one process for all compared with one process for each stage, on the same cores.

    python -m bench.isolation [--engine VLLM] [--videos 3] [--texts 8] [--seconds 144]
    python -m bench.isolation --images 0.8 --texts 2 [--seconds 144] [--step-milliseconds 100 60000]

Each layout answers texts alone, and texts at the same moments with a storm of videos beside them (open loop, Poisson arrivals: neither
waits for answers): short questions, and prompts as long as those that are usual in chats. Videos are of 1280x720 pixels, as phones make
them, each another file. The ratio of the two p99 is what text pays for the videos of others; beside it stands where the ratios of
95 of 100 resamples of the same times lie (percentile bootstrap).

A video that has been encoded is a prompt like any other, and texts meet it in prefill and decode. What pixels add to that shows beside a
third load: in the place of each video a text with a prompt of as many tokens.

With `--images` both layouts serve a llava of 50 M parameters without limits of cores, and texts run alone and beside requests of two
fresh images each, for each bound of the time of steps with media; one deployment runs at a time.

All take turns of some seconds, again and again, so that whatever else this machine does falls on all alike. Where text pays is read off
the gateway's timelines, and the processor time of every pod off the kernel.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import logging
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import yaml
from PIL import Image
from rich.console import Console
from rich.table import Table

from bench import layouts, versus_vllm
from bench.openloop import Answered, Ask, Kind, arrivals, ask, asked, drive
from bench.report import keep, percentiles
from mmd_cli import samples
from mmd_cli.client import media_part
from mmd_cli.local import up

KV = {"kvCacheMebibytes": 64}
POOLS: dict[str, dict[str, Any]] = {
    "E-P-D": {
        "encoder": {"cacheMebibytes": 64, "resources": {"cpu": "10m"}},
        "prefill": {**KV, "resources": {"cpu": "1"}},
        "decode": {**KV, "maxSequences": 32, "resources": {"cpu": "1"}},
    },
    "monolithic": {"decode": {**KV, "maxSequences": 32, "resources": {"cpu": "2"}}},
}
"""Processor shares as a cluster would give them: text goes first, encoders have what is left."""
WORDS = {"short": 30, "long": 400}
COMPANION_WORDS = 53
"""Of a text whose prompt is as long as that of a question about a video: 76 tokens."""
TOKENS = 8
ROLES = ("client", "gateway", "encoder", "prefill", "decode")
FILES, SIZE = 8, (1280, 720)
TURN_SECONDS = 12.0
RESAMPLES = 2000
console = Console(width=150)


def resource(layout: str, engine: str) -> dict[str, Any]:
    """The demo model in one layout."""
    pools = {name: {"replicas": 1, "gpus": 0, **own} for name, own in POOLS[layout].items()}
    spec = {
        "model": {"id": "builtin/demo", "dtype": "Float32"},
        "engine": {"type": engine},
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
    """Milliseconds that requests spent in each phase, as the gateway remembers them; `outside`: before it knew of them, and after."""
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
            if one.ttft_seconds is not None and "ttft" in timeline["timings"]:
                found["outside"].append(1000 * one.ttft_seconds - timeline["timings"]["ttft"])
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
            await phases(local.admin_url, [o for o in answered if o.kind == "text"])
        ).items():
            self.phases[name] += values

    def times(self, kind: Kind) -> list[float]:
        """TTFT in seconds of the requests of a kind that were answered."""
        return [o.ttft_seconds for o in self.answered if o.kind == kind and o.ttft_seconds is not None]

    def report(self) -> dict[str, Any]:
        """Times in seconds and milliseconds as the names say; `cores_used` by pod."""
        kinds: dict[str, Any] = {}
        for kind in sorted({one.kind for one in self.answered}):
            times, requests = self.times(kind), sum(one.kind == kind for one in self.answered)
            kinds[kind] = {
                "requests": requests,
                "failed": requests - len(times),
                "ttft_seconds": percentiles(times),
            }
        return kinds | {
            "cores_used": {pod: used / self.seconds for pod, used in self.processor.items()},
            "text_phases_ms": {name: percentiles(values, (50, 99)) for name, values in self.phases.items()},
        }


def phone_videos() -> list[bytes]:
    """MP4 files of four seconds."""

    def one(seed: int) -> bytes:
        _, frames = samples.draw_video(np.random.default_rng(seed))
        large = [
            np.asarray(Image.fromarray(frame).resize(SIZE, Image.Resampling.BILINEAR)) for frame in frames
        ]
        return samples.encode_video(np.stack(large), crf=23)

    return [one(seed) for seed in range(FILES)]


@dataclass
class Storm:
    """Questions about videos; no two are of the same file."""

    rate: float
    files: list[bytes]
    asked: Iterator[int] = field(default_factory=itertools.count)

    def turn(self, seed: int) -> list[Ask]:
        return [self._ask(at, next(self.asked)) for at in self._times(seed)]

    def endless(self, first: int) -> Iterator[Ask]:
        """One after the other, from this number on."""
        return (self._ask(0.0, number) for number in itertools.count(first))

    def as_texts(self, seed: int) -> list[Ask]:
        """The same turn without pixels: texts with prompts of as many tokens."""
        numbered = enumerate(self._times(seed))
        return [
            ask("companion", at, 1_000_000 * seed + 500_000 + n, COMPANION_WORDS, TOKENS)
            for n, at in numbered
        ]

    def _times(self, seed: int) -> list[float]:
        return arrivals(self.rate, TURN_SECONDS, np.random.default_rng(seed))

    def _ask(self, at: float, number: int) -> Ask:
        file = samples.as_another_file(self.files[number % len(self.files)], number)
        question = {"type": "text", "text": "What happens in the video?"}
        return asked("video", at, [media_part("video", file, "video/mp4"), question], TOKENS)


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Both layouts with texts of each length, alone, beside videos and beside as many texts, in turns."""
    turns = max(1, round(options.seconds / TURN_SECONDS))
    found = {(layout, length): (Stretch(), Stretch(), Stretch()) for layout in POOLS for length in WORDS}
    storm = Storm(options.videos, phone_videos())
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        running = {}
        for layout in POOLS:
            file = folder / f"{layout}.yaml"
            file.write_text(yaml.safe_dump(resource(layout, options.engine)))
            running[layout] = await stack.enter_async_context(
                up.running(up.load(file), log_line=lambda *_: None)
            )
            await drive(running[layout].gateway_url, texts(options, 1, 2, WORDS["long"]) + storm.turn(1))
        for turn in range(turns):
            for number, ((layout, length), (quiet, stormy, control)) in enumerate(found.items()):
                seed = 1000 * options.seed + 10 * turn + number
                url, words = running[layout], WORDS[length]
                await quiet.turn(url, texts(options, seed, seed, words))
                await stormy.turn(url, texts(options, seed, seed + 300, words) + storm.turn(seed + 500))
                await control.turn(url, texts(options, seed, seed + 600, words) + storm.as_texts(seed + 500))
    return {
        f"{layout}, {length} texts": compared(*stretches) for (layout, length), stretches in found.items()
    }


async def measure_images(options: argparse.Namespace) -> dict[str, Any]:
    """Each layout of the llava with each bound of a step's time: texts alone, and beside images."""
    versus_vllm.write_models()
    turns = max(1, round(options.seconds / TURN_SECONDS))
    found = {}
    for layout, bound in itertools.product(POOLS, options.step_milliseconds):
        body = layouts.resource(layouts.LAYOUTS[layout], versus_vllm.MODEL, 8)
        step = {} if bound is None else {"stepMilliseconds": bound}
        body["spec"]["engine"] = {**versus_vllm.settings(options.engine, body["spec"], eager=True), **step}
        quiet, storm = Stretch(), Stretch()
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "bench.yaml"
            file.write_text(yaml.safe_dump(body))
            async with up.running(up.load(file), log_line=lambda *_: None) as local:
                await drive(local.gateway_url, of_llava(options, 0, images=True))
                for turn in range(turns):
                    seed = 1000 * options.seed + 2 * turn
                    await quiet.turn(local, of_llava(options, seed, images=False))
                    await storm.turn(local, of_llava(options, seed + 1, images=True))
        name = layout if bound is None else f"{layout}, steps of {bound} ms"
        found[name] = {"quiet": quiet.report(), "storm": storm.report()}
    return found


def of_llava(options: argparse.Namespace, seed: int, *, images: bool) -> list[Ask]:
    """One turn of texts, and of requests with two fresh images each."""
    model, made = versus_vllm.MODEL.name, list[Ask]()
    rates: dict[Kind, float] = {"text": options.texts, "image": options.images if images else 0.0}
    for place, (kind, rate) in enumerate(rates.items()):
        times = arrivals(rate, TURN_SECONDS, np.random.default_rng([seed, place]))
        first = 10_000 * (2 * seed + place)
        made += [
            ask(kind, at, first + number, WORDS["short"], TOKENS, media=2, model=model)
            for number, at in enumerate(times)
        ]
    return made


def table_of_images(found: dict[str, Any]) -> Table:
    """The report for a reader."""
    made = Table(title="TTFT in ms, p50 / p90 / p99", title_justify="left")
    for heading in ("layout", "text alone", "text beside images", "images", "images answered"):
        made.add_column(heading)
    for name, run in found.items():
        text, image = run["storm"].get("text"), run["storm"].get("image")
        times = [one["ttft_seconds"] if one else {} for one in (run["quiet"].get("text"), text, image)]
        shown = (" / ".join(f"{1000 * value:.0f}" for value in values.values()) for values in times)
        answered = "" if image is None else f"{image['requests'] - image['failed']} of {image['requests']}"
        made.add_row(name, *shown, answered)
    return made


def texts(options: argparse.Namespace, moments: int, seed: int, words: int) -> list[Ask]:
    """One turn of texts that nobody has asked before, at the moments that one seed gives."""
    times = arrivals(options.texts, TURN_SECONDS, np.random.default_rng(moments))
    return [ask("text", at, 1_000_000 * seed + n, words, TOKENS) for n, at in enumerate(times)]


def compared(quiet: Stretch, storm: Stretch, control: Stretch) -> dict[str, Any]:
    """A layout's stretches, and how the storm's times compare with those of the others."""

    stretches = {"quiet": quiet.report(), "storm": storm.report(), "as_texts": control.report()}

    def over(other: str) -> dict[str, float]:
        times, others = (stretches[name]["text"]["ttft_seconds"] for name in ("storm", other))
        return {p: times[p] / others[p] for p in times}

    return {
        **stretches,
        "ratio": over("quiet"),
        "ratio_of_p99_interval": interval(storm.times("text"), quiet.times("text")),
        "ratio_to_texts": over("as_texts"),
    }


def interval(times: list[float], others: list[float]) -> list[float]:
    """95 % interval of the ratio of two p99 by resampling both (Efron, 1979: percentile bootstrap)."""
    rng = np.random.default_rng(0)

    def resampled(of: list[float]) -> np.ndarray[Any, Any]:
        return np.asarray(np.percentile(rng.choice(of, (RESAMPLES, len(of))), 99, axis=1))

    return [float(edge) for edge in np.percentile(resampled(times) / resampled(others), (2.5, 97.5))]


def table(found: dict[str, Any]) -> Table:
    """The report for a reader."""
    made = Table(title="TTFT of text in ms, p50 / p90 / p99", title_justify="left")
    for heading in (
        "layout",
        "text alone",
        "beside videos",
        "ratio of p99",
        "beside texts instead",
        "ratio of p99",
        "videos: TTFT",
        "cores used in the storm",
    ):
        made.add_column(heading)

    def ms(times: dict[str, float]) -> str:
        return " / ".join(f"{1000 * value:.0f}" for value in times.values())

    for layout, run in found.items():
        used = run["storm"]["cores_used"].items()
        lowest, highest = run["ratio_of_p99_interval"]
        cores = ", ".join(f"{role} {n:.2f}" for pod, n in used for role in ROLES if role in pod)
        made.add_row(
            layout,
            ms(run["quiet"]["text"]["ttft_seconds"]),
            ms(run["storm"]["text"]["ttft_seconds"]),
            f"{run['ratio']['p99']:.2f} ({lowest:.2f} to {highest:.2f})",
            ms(run["as_texts"]["text"]["ttft_seconds"]),
            f"{run['ratio_to_texts']['p99']:.2f}",
            ms(run["storm"]["video"]["ttft_seconds"]),
            cores,
        )
    return made


def p99_of_pools_to_one(found: dict[str, Any], length: str) -> float:
    """How long texts beside videos wait in pools, as a share of how long they wait in one process."""
    pools, one = (
        found[f"{layout}, {length} texts"]["storm"]["text"]["ttft_seconds"]["p99"] for layout in POOLS
    )
    return float(pools / one)


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", choices=["Native", "VLLM"], default="Native")
    parser.add_argument("--videos", type=float, default=3.0, help="a second")
    parser.add_argument("--texts", type=float, default=8.0, help="a second")
    parser.add_argument("--seconds", type=float, default=144.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--name", default="isolation")
    parser.add_argument("--images", type=float, help="requests of two images a second, in place of videos")
    parser.add_argument("--step-milliseconds", type=int, nargs="+", default=[None], help="with --images")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    if options.images is not None:
        beside_images = asyncio.run(measure_images(options))
        console.print(table_of_images(beside_images))
        body = {"options": vars(options), "layouts": beside_images}
        console.print(f"report: {keep('isolation_images', body)}", highlight=False)
        return
    found = asyncio.run(measure(options))
    console.print(table(found))
    pools_to_one = {length: p99_of_pools_to_one(found, length) for length in WORDS}
    said = ", ".join(f"{length} {ratio:.2f}" for length, ratio in pools_to_one.items())
    console.print(f"p99 of texts beside videos, E-P-D to monolithic: {said}")
    body = {
        "options": vars(options),
        "goal": {"ratio_of_p99": 1.3},
        "layouts": found,
        "p99_beside_videos_of_pools_to_monolithic": pools_to_one,
    }
    console.print(f"report: {keep(options.name, body)}", highlight=False)


if __name__ == "__main__":
    main()
