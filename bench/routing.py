"""Time to the first token under the router, compared with round robin, the least loaded pod and the longest cached prefix; and what a decision takes.

    python -m bench.routing [--workers 1000] [--seconds 10] [--real-seconds 40]

All policies choose the prefill pod, in the gateway's own router; decode pods are chosen in the same way for all. The many workers are those of `mmd
simulate` with assumed numbers; their prefix caches are real block pools that report their changes. A few real workers of the demo model answer
under each policy too, one after the other: a gateway with its router joins them, and gets prefixes and images that no policy before had (open
loop, Poisson arrivals). Times leave out the first quarter, in which caches are cold.

Two mixes: long prefixes that many requests share, as of documents or conversations, and images that many ask about, each with fresh text behind.
Which one a request has is drawn by Zipf's law.

A decision is timed over as many workers as named, while heartbeats of all of them come twice a second, for prompts of 250 blocks of which pods
have parts.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import itertools
import logging
import multiprocessing
import os
import random
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import yaml
from rich.console import Console
from rich.table import Table

from bench.isolation import resource
from bench.openloop import WORDS, Ask, arrivals, asked, drive
from bench.report import keep, percentiles
from mmd_api.contract import environment as env
from mmd_api.contract.load import PodLoad
from mmd_api.contract.pools import MODALITIES
from mmd_api.resource import load
from mmd_cli import samples
from mmd_cli.client import media_part
from mmd_cli.local import up
from mmd_cli.local.pods import free_port
from mmd_cli.simulated_router import SimulatedPrompt, SimulatedRouter
from mmd_operator.simulate.calibration import Calibration
from mmd_operator.simulate.runs import Planner
from mmd_operator.simulate.traces import Trace
from mmd_workers.caches.index import CacheIndex
from mmd_workers.features.held import feature_identity
from mmd_workers.gateway.placement.router import FeatureNeed, Placement, PlacementLimits, Router, RouteRequest
from mmd_workers.gateway.process import gateway_process
from mmd_workers.process.settings import WorkerSettings
from mmd_workers.wire.messages.every_pod import CacheReport, Heartbeat

SPEC = Path(__file__).parents[1] / "examples" / "gpu.yaml"
BLOCK = 16
FEATURES = 512  # of an encoder pod
POOL_SHARES = {"encoder": 0.2, "prefill": 0.4, "decode": 0.4}
ZIPF = 1.1
GROUPS_PER_WORKER = 2
UTILIZATION = 0.75  # of prefill, if nothing were cached
MIXES = {
    "shared prefixes": {"shared_tokens": 4096, "own_tokens": 448, "images": 0},
    "repeated images": {"shared_tokens": 1600, "own_tokens": 192, "images": 1},
}
OUTPUT_TOKENS = 64
DECISIONS = 4000
REAL_PREFILL_PODS, REAL_KV_MEBIBYTES, REAL_RATE, REAL_GROUPS, REAL_OUTPUT_TOKENS = 3, 24, 8.0, 15, 4
"""One pod has room for the prefixes of four groups, and all pods for nearly all of them."""
SHARED_WORDS = 1500
READY_SECONDS = 120.0
console = Console(width=130)


# --- policies -----------------------------------------------------------------------------------------------------------


class RoundRobin(Router):
    """One pod after the other."""

    _next = 0

    def _costs(self, request: Any, fleet: Any, estimates: Any, cached: Any, *_: Any) -> Any:
        self._next = (self._next + 1) % len(fleet.prefill)
        return (np.arange(len(fleet.prefill)) != self._next) * 1000.0


class LeastLoaded(Router):
    """The pod with the fewest requests."""

    def _costs(self, request: Any, fleet: Any, estimates: Any, cached: Any, *_: Any) -> Any:
        return fleet.prefill.waiting_requests + fleet.prefill.own_requests


class PrefixOnly(Router):
    """The pod with the longest cached prefix; without any, any."""

    def _costs(self, request: Any, fleet: Any, estimates: Any, cached: Any, *_: Any) -> Any:
        return request.num_tokens - cached


POLICIES: dict[str, type[Router]] = {
    "router": Router,
    "round robin": RoundRobin,
    "least loaded": LeastLoaded,
    "prefix only": PrefixOnly,
}


# --- simulated ----------------------------------------------------------------------------------------------------------


def identity(*parts: object) -> bytes:
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()


def simulated(mix: str, workers: int, seconds: float) -> dict[str, Any]:
    """Every policy on the same requests."""
    shape, calibration, spec = MIXES[mix], Calibration.load(None), load(SPEC).spec
    sizes = {pool: max(1, round(workers * share)) for pool, share in POOL_SHARES.items()}
    tokens = shape["shared_tokens"] + shape["own_tokens"]
    each = calibration.prefill.overhead_seconds + tokens / calibration.prefill.tokens_per_second
    rate = UTILIZATION * sizes["prefill"] / each
    rng = np.random.default_rng(7)
    at = np.array(arrivals(rate, seconds, rng))
    num_groups = GROUPS_PER_WORKER * workers
    groups = zipf(rng, num_groups, len(at))
    ones = np.ones(len(at), np.int64)
    media = {modality: ones * (shape["images"] if modality == "image" else 0) for modality in MODALITIES}
    trace = Trace(mix, at, media, ones * tokens, ones * OUTPUT_TOKENS)
    shared = [
        [identity(mix, group, block) for block in range(shape["shared_tokens"] // BLOCK)]
        for group in range(num_groups)
    ]

    @lru_cache(maxsize=20_000)
    def prompt(request: int) -> SimulatedPrompt:
        own = [identity("own", request, block) for block in range(shape["own_tokens"] // BLOCK)]
        return SimulatedPrompt(
            [*shared[groups[request]], *own], shape["shared_tokens"] if shape["images"] else 0
        )

    found = {}
    for name, policy in POLICIES.items():
        with console.status(f"{mix}, {workers} simulated workers: {name}"):
            routers: list[SimulatedRouter] = []

            def placing(
                *parts: Any, policy: type[Router] = policy, made: list[SimulatedRouter] = routers
            ) -> Any:
                made.append(SimulatedRouter(*parts, prompts=prompt, router=policy))
                return made[-1]

            run = Planner(spec, trace, calibration, placing=placing).static(sizes)
            ttft = run.result.ttft_seconds
            warm = ttft[len(ttft) // 4 :]  # caches are cold at first
            found[name] = {
                "requests": len(trace),
                "lost": dict(run.result.lost),
                "ttft_seconds": _summary(warm[~np.isnan(warm)].tolist()),
            }
    return {"workers": sizes, "requests_per_second": rate, "policies": found}


def _summary(times: list[float]) -> dict[str, float]:
    return {"mean": float(np.mean(times)), **percentiles(times, (50, 99))} if times else {}


def zipf(rng: np.random.Generator, groups: int, count: int) -> list[int]:
    """Group of each request: the n-th most popular is drawn with 1 / n ** 1.1."""
    weights = 1 / np.arange(1, groups + 1) ** ZIPF
    drawn: list[int] = rng.choice(groups, count, p=weights / weights.sum()).tolist()
    return drawn


# --- decisions ----------------------------------------------------------------------------------------------------------


def decisions(workers: int) -> dict[str, Any]:
    """Microseconds of a decision, with what the heartbeats since the one before cost."""
    rng = random.Random(1)
    sizes = {pool: max(1, round(workers * share)) for pool, share in POOL_SHARES.items()}
    roles = {"encoder": "encode", "prefill": "prefill", "decode": "decode"}
    beats = [
        _beat(f"{pool}-{number:04}", roles[pool], rng)
        for pool, size in sizes.items()
        for number in range(size)
    ]
    index, kept = CacheIndex(), CacheIndex()
    prefixes = [[identity("decision", group, block) for block in range(240)] for group in range(200)]
    system = [identity("system", block) for block in range(10)]
    for beat in beats:
        if beat.pool != "encoder":
            held = {*system, *(b for some in rng.sample(prefixes, 5) for b in some[: rng.randrange(40, 240)])}
            index.take(CacheReport(beat.pod, "i", 1, BLOCK, list(held), []))
        else:
            cached = {feature_identity(f"feature-{rng.randrange(4000)}") for _ in range(FEATURES)}
            kept.take(CacheReport(beat.pod, "i", 1, 1, list(cached), []))
    found = {}
    for kind, media in (("text", 0), ("two images", 2)):
        router = Router("r", PlacementLimits(10**6), random.Random(0), index, kept)
        router.kv.note("a", "b", same_node=False, tokens=1000, num_bytes=10**8, seconds=0.1, now=0.0)
        times, now, heartbeats_due = [], 0.0, 0.0
        for number in range(DECISIONS):
            now += 0.002
            heartbeats_due += 2 * workers * 0.002
            while heartbeats_due >= 1:
                heartbeats_due -= 1
                place = rng.randrange(len(beats))
                beats[place] = replace(beats[place], sent=now)
            features = tuple(
                FeatureNeed(f"feature-{rng.randrange(4000)}", "image", 576, 576) for _ in range(media)
            )
            blocks = [*system, *rng.choice(prefixes)]
            request = RouteRequest(str(number), 4000, 200, features, {BLOCK: blocks})
            newest = beats.copy()
            begun = time.thread_time()
            outcome = router.route(request, newest, now)
            times.append(1e6 * (time.thread_time() - begun))
            assert isinstance(outcome, Placement)
            router.confirm(outcome, {beat.pod: beat for beat in newest}.get)
        found[kind] = {"mean": float(np.mean(times)), **percentiles(times, (50, 99))}
    return {"workers": sizes, "decisions": DECISIONS, "microseconds": found}


def _beat(name: str, role: Any, rng: random.Random) -> Heartbeat:
    load = PodLoad(
        encode_queued_work={"image": rng.randrange(1000)} if role == "encode" else {},
        encode_work_per_second={"image": 1000.0} if role == "encode" else {},
        prefill_waiting_tokens=rng.randrange(20_000),
        prefill_tokens_per_second=16_000.0,
        decode_running=rng.randrange(64),
        decode_max_sequences=64,
        kv_blocks_total=20_000,
        kv_blocks_free=rng.randrange(20_000),
        kv_block_tokens=BLOCK,
        itl_seconds=0.02,
    )
    pool = {"encode": "encoder"}.get(role, role)
    node = f"node-{rng.randrange(125)}"
    return Heartbeat(name, pool, [role], "i", "r", "ready", "", 0.0, load, node=node)


# --- real workers -------------------------------------------------------------------------------------------------------


async def real(seconds: float) -> dict[str, Any]:
    """Every policy on the same workers, with as many requests of as many groups, by mix."""
    found: dict[str, dict[str, Any]] = {mix: {} for mix in REAL_MIXES}
    made = resource("E-P-D", "Native")
    made["metadata"]["name"] = "bench-routing"
    made["spec"]["observability"] = {"logLevel": "Warning"}
    made["spec"]["prefill"] |= {"replicas": REAL_PREFILL_PODS, "kvCacheMebibytes": REAL_KV_MEBIBYTES}
    async with contextlib.AsyncExitStack() as stack:
        file = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "deployment.yaml"
        file.write_text(yaml.safe_dump(made))
        local = await stack.enter_async_context(up.running(up.load(file), log_line=lambda *_: None))
        for (mix, shared), (number, name) in itertools.product(REAL_MIXES.items(), enumerate(POLICIES)):
            with console.status(f"{REAL_PREFILL_PODS} real prefill pods, {mix}: {name}"):
                async with _gateway(local.pod("gateway").environment, name) as url:
                    await drive(url, _asks(shared, 2.0, 1000 + number))  # of other groups
                    answered = await drive(url, _asks(shared, seconds, number))
            warm = [one.ttft_seconds for one in answered if one.at > seconds / 4]
            times = [ttft for ttft in warm if ttft is not None]
            found[mix][name] = {
                "requests": len(answered),
                "lost": {"failed": sum(one.ttft_seconds is None for one in answered)},
                "ttft_seconds": _summary(times),
            }
    return {
        "prefill_pods": REAL_PREFILL_PODS,
        "requests_per_second": REAL_RATE,
        "groups": REAL_GROUPS,
        "mixes": {mix: {"policies": policies} for mix, policies in found.items()},
    }


def _prefix(seed: int) -> dict[str, Any]:
    words = np.random.default_rng([seed, 13]).choice(WORDS, SHARED_WORDS)
    return {"type": "text", "text": f"{seed} {' '.join(words)}"}


def _image(seed: int) -> dict[str, Any]:
    drawn = samples.draw("image", seed)
    return media_part("image", drawn.bytes, drawn.mime)


REAL_MIXES: dict[str, Callable[[int], dict[str, Any]]] = {
    "shared prefixes": _prefix,
    "repeated images": _image,
}
"""What the requests of a group have in common, by the number of the group."""


def _asks(shared: Callable[[int], dict[str, Any]], seconds: float, number: int) -> list[Ask]:
    """The same draws for each number, of groups that are its own."""
    rng = np.random.default_rng(11)
    times = arrivals(REAL_RATE, seconds, rng)
    groups = zipf(rng, REAL_GROUPS, len(times))
    parts = [shared(REAL_GROUPS * number + group) for group in range(REAL_GROUPS)]
    own = [{"type": "text", "text": f" {place} What is it?"} for place in range(len(times))]
    return [
        asked("text", at, [parts[group], text], REAL_OUTPUT_TOKENS)
        for at, group, text in zip(times, groups, own, strict=True)
    ]


@contextlib.asynccontextmanager
async def _gateway(environment: dict[str, str], policy: str) -> AsyncIterator[str]:
    """One more gateway of a deployment, with this policy; its address."""
    port = free_port()
    own = {env.POD_NAME: f"bench-{policy.replace(' ', '-')}", env.HTTP_PORT: str(port)}
    own[env.ADMIN_PORT] = str(free_port())
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(environment | own, policy))
    process.start()
    url = f"http://127.0.0.1:{port}"
    try:
        async with httpx.AsyncClient(base_url=url) as client, asyncio.timeout(READY_SECONDS):
            while not await _knows_all(client):
                await asyncio.sleep(0.2)
        yield url
    finally:
        process.terminate()
        await asyncio.to_thread(process.join, READY_SECONDS)
        process.kill()


async def _knows_all(client: httpx.AsyncClient) -> bool:
    try:
        ready = (await client.get("/ready")).json()
    except httpx.HTTPError:
        return False
    return bool(ready.get("ready_pods", {}).get("prefill", 0) == REAL_PREFILL_PODS)


def _serve(environment: dict[str, str], policy: str) -> None:
    os.environ.update(environment)
    gateway_process.Router = POLICIES[policy]  # type: ignore[misc]  # the policy under test
    gateway_process.run(WorkerSettings.from_environment())


# --- report -------------------------------------------------------------------------------------------------------------


def table(title: str, found: dict[str, Any]) -> Table:
    made = Table(title=title, title_justify="left")
    for column in ("mix", "policy", "requests", "TTFT mean", "TTFT p50", "TTFT p99"):
        made.add_column(column, justify="left" if column in ("mix", "policy") else "right")
    for mix, result in found.items():
        for policy, one in result["policies"].items():
            cells = (
                f"{1000 * one['ttft_seconds'].get(p, float('nan')):.0f} ms" for p in ("mean", "p50", "p99")
            )
            made.add_row(mix, policy, str(one["requests"]), *cells)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=10.0, help="of simulated load")
    parser.add_argument(
        "--real-seconds", type=float, default=40.0, help="of load on real workers, for each policy"
    )
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    took = decisions(options.workers)
    for kind, microseconds in took["microseconds"].items():
        console.print(
            f"a decision, {kind}: " + ", ".join(f"{n} {us:.0f} µs" for n, us in microseconds.items())
        )
    real_workers = asyncio.run(real(options.real_seconds))
    console.print(table(f"{REAL_PREFILL_PODS} real prefill pods", real_workers["mixes"]))
    body: dict[str, Any] = {"options": vars(options), "decision": took, "real": real_workers}
    body["simulated"] = {mix: simulated(mix, options.workers, options.seconds) for mix in MIXES}
    console.print(table(f"{options.workers} simulated workers", body["simulated"]))
    console.print(f"report: {keep('routing', body)}", highlight=False)


if __name__ == "__main__":
    main()
