"""Our pools with vLLM on one GPU beside plain `vllm serve` on it: answers, tokens a second, and what a late feature and a killed pod change.

    python -m bench.vllm_on_gpu [--rounds 3] [--tokens 64] [--share 1]

Run it with the interpreter of vLLM's CUDA environment. All serve one qwen2_vl with random weights in bfloat16, as large as a Qwen2-VL-2B
but for its vocabulary, and run side by side; while one is measured, the others have nothing to do. KV moves between processes on the
same GPU, over gloo and over NIXL. Greedy answers of one request at a time are compared: token for token between our layouts, and
with those of `vllm serve`, whose tower is another and rounds otherwise. The report is written anew whenever a system has been measured,
so a run that is cut off leaves what it has. `--small` is a model and a load for a dry run, on CPUs too.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import logging
import os
import signal
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import torch
import transformers
import yaml
from PIL import Image
from rich.console import Console
from rich.table import Table

from bench.layouts import Request, Run, content, drive
from bench.report import keep, percentiles
from bench.versus_vllm import ON_CPUS, WORDS, vllm_server
from mmd_api.spec.engine import EngineSpec
from mmd_cli.local import up
from mmd_cli.local.engines import interpreter_for
from mmd_cli.local.up import LocalDeployment
from support.oracles import random_model

LARGE = random_model.Size(
    hidden=1536, layers=28, heads=12, kv_heads=2, feed_forward_ratio=6, vision_hidden=512, vision_layers=32
)
SMALL = random_model.Size(hidden=128)
GPU = torch.cuda.is_available()
PEER = "vllm serve"
ONE = {"replicas": 1, "gpus": int(GPU)}
FROZEN_SECONDS = 2.0
ROUND_SECONDS = 100.0
console = Console(width=150)


@dataclass(frozen=True)
class Layout:
    """One of our deployments."""

    pools: dict[str, dict[str, Any]]
    backend: str = "Gloo"
    engine: dict[str, Any] = field(default_factory=dict)


MONOLITH = "monolithic"
OURS = {
    MONOLITH: Layout({"decode": ONE}),
    "monolithic, eager": Layout({"decode": ONE}, engine={"enforceEager": True}),
    "E-P-D, gloo": Layout({"encoder": ONE, "prefill": {**ONE, "replicas": 2}, "decode": ONE}),
    "E-P-D, NIXL": Layout({"encoder": ONE, "prefill": ONE, "decode": ONE}, "Nixl"),
}
FAULTS = "E-P-D, gloo"


def resource(layout: Layout, model: Path, options: argparse.Namespace) -> dict[str, Any]:
    """A deployment of one layout on this GPU."""
    kv = {"kvCacheMebibytes": 64 if options.small else 2048}
    own: dict[str, dict[str, Any]] = {"encoder": {}, "prefill": {**kv, "chunkTokens": 1024}}
    own["decode"] = {**kv, "maxSequences": 64}
    pools = {pool: {**settings, **own[pool]} for pool, settings in layout.pools.items()}
    engine = {"type": "VLLM", "decode": {"maxNumBatchedTokens": 1024, **layout.engine}}
    if "prefill" in pools:
        engine["prefill"] = {"maxNumBatchedTokens": 1024}
    return {
        "apiVersion": "serving.multimodal.dev/v1alpha1",
        "kind": "MultimodalDeployment",
        "metadata": {"name": "bench"},
        "spec": {
            "model": {"id": str(model), "dtype": options.dtype, "maxModelLen": 2048},
            "engine": engine,
            **pools,
            "transfer": {"kv": {"backend": layout.backend}},
        },
    }


def write_model(small: bool, dtype: str) -> Path:
    """The checkpoint; its images may have up to 256 tokens."""
    folder = Path(f".cache/models/gpu-{'small' if small else 'large'}").resolve()
    if not (folder / "model.safetensors").exists():
        kind = torch.float32 if dtype == "Float32" else torch.bfloat16
        random_model.build("qwen2_vl", folder, size=SMALL if small else LARGE, dtype=kind)
        for file in folder.glob("*processor_config.json"):
            file.write_text(file.read_text().replace(str(36 * 28 * 28), str(256 * 28 * 28)))
    return folder


def picture(rng: np.random.Generator) -> bytes:
    """A PNG of coloured squares, 448 pixels wide and high."""
    pixels = np.kron(rng.integers(0, 256, (28, 28, 3), dtype=np.uint8), np.ones((16, 16, 1), np.uint8))
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


@dataclass(frozen=True)
class Load:
    """Requests of one kind, and how many of them are in flight."""

    name: str
    images: bool
    concurrency: int
    count: int

    def requests(self, number: int, options: argparse.Namespace) -> list[Request]:
        """Those of a round: nobody has asked them before."""
        count = 4 if options.small else max(1, round(self.count * options.share))
        rng = np.random.default_rng([number, *self.name.encode()])
        return [
            Request(
                f"Request {number} {n}: {' '.join(rng.choice(WORDS, 40))}. Describe it.",
                picture(rng) if self.images else None,
            )
            for n in range(count)
        ]


LOADS = (
    Load("text, 1 at once", False, 1, 8),
    Load("images, 1 at once", True, 1, 8),
    Load("text, 64 at once", False, 64, 256),
    Load("images, 32 at once", True, 32, 96),
)


async def whole(url: str, model: str, wanted: list[Request], concurrency: int, tokens: int) -> Run:
    """As `drive`, without streams, whose every token costs the client more than the GPU."""
    run, queue = Run(0.0, {}), list(enumerate(wanted))[::-1]
    timeout = aiohttp.ClientTimeout(120)

    async def worker(session: aiohttp.ClientSession) -> None:
        while queue:
            number, request = queue.pop()
            run.answers[number] = await one(session, url, model, request, tokens)
            run.tokens += tokens

    begin = time.perf_counter()
    async with aiohttp.ClientSession(timeout=timeout) as session:
        await asyncio.gather(*(worker(session) for _ in range(concurrency)))
    run.seconds = time.perf_counter() - begin
    return run


async def one(session: aiohttp.ClientSession, url: str, model: str, request: Request, tokens: int) -> str:
    """The answer to one request."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": content(request)}],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    async with session.post(f"{url}/v1/chat/completions", json=body) as reply:
        told = await reply.json()
        if reply.status != 200:
            raise RuntimeError(f"{reply.status}: {told}")
        return str(told["choices"][0]["message"]["content"])


async def measure(url: str, model: str, number: int, options: argparse.Namespace) -> dict[str, Run]:
    """Every load once."""
    return {
        load.name: await (drive if load.concurrency == 1 else whole)(
            url, model, load.requests(number, options), load.concurrency, options.tokens
        )
        for load in LOADS
    }


@asynccontextmanager
async def running(layout: str, model: Path, options: argparse.Namespace) -> AsyncIterator[LocalDeployment]:
    """One of our deployments; what its pods log goes to a file."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "bench.yaml"
        file.write_text(yaml.safe_dump(resource(OURS[layout], model, options)))
        log = (options.logs / f"{layout.replace(' ', '')}.log").open("w", buffering=1)
        with log:
            lines = up.running(
                up.load(file),
                log_line=lambda pod, line: print(pod, line, file=log),
                ready_seconds=options.start_seconds,
            )
            async with lines as local:
                yield local


class Held:
    """A deployment that runs on a task of its own, beside others, until it is let go."""

    def __init__(self, layout: str, model: Path, options: argparse.Namespace) -> None:
        self.begun = time.monotonic()
        self.seconds = 0.0
        self._stop = asyncio.Event()
        self._ready: asyncio.Future[LocalDeployment] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._hold(layout, model, options), name=layout)

    async def _hold(self, layout: str, model: Path, options: argparse.Namespace) -> None:
        try:
            async with running(layout, model, options) as local:
                self.seconds = time.monotonic() - self.begun
                self._ready.set_result(local)
                await self._stop.wait()
        except Exception as error:  # noqa: BLE001  the others are measured
            if not self._ready.done():
                self._ready.set_exception(error)
            else:
                console.print(f"{layout}: {error}", markup=False)

    async def ready(self) -> LocalDeployment:
        """The deployment, once it answers."""
        return await self._ready

    async def let_go(self) -> None:
        """End it."""
        self._stop.set()
        await self._task


async def faults(local: LocalDeployment, model: str, options: argparse.Namespace) -> dict[str, Any]:
    """An encoder that stands still while a text and an image are asked, and a prefill pod that is killed under load."""
    load, tokens = LOADS[3], options.tokens
    asked = load.requests(1000, options)
    image, text = asked[0], Request("How many? " + asked[0].text, None)
    timeout = aiohttp.ClientTimeout(120)
    async with aiohttp.ClientSession(timeout=timeout) as session:

        async def timed(request: Request) -> tuple[str, float]:
            begin = time.perf_counter()
            answer = await one(session, local.gateway_url, model, request, tokens)
            return answer, time.perf_counter() - begin

        encoder = local.supervisor.children[local.pod("encoder").name].pid
        assert encoder is not None
        os.kill(encoder, signal.SIGSTOP)
        late = asyncio.create_task(timed(image))
        await asyncio.sleep(0.2)
        _, meanwhile = await timed(text)
        waits = not late.done()
        await asyncio.sleep(max(0.0, FROZEN_SECONDS - 0.2 - meanwhile))
        os.kill(encoder, signal.SIGCONT)
        answer, took = await late
        again, _ = await timed(image)
    alone = await whole(local.gateway_url, model, asked, 1, tokens)
    under_load = asyncio.create_task(whole(local.gateway_url, model, asked, load.concurrency, tokens))
    await asyncio.sleep(0.3)
    prefill = local.supervisor.children[local.pod("prefill").name].pid
    assert prefill is not None
    in_flight = not under_load.done()
    os.kill(prefill, signal.SIGKILL)
    killed = await under_load
    return {
        "late_feature": {
            "frozen_seconds": FROZEN_SECONDS,
            "text_meanwhile_seconds": meanwhile,
            "image_waited": waits,
            "image_seconds": took,
            "equal_to_the_answer_in_time": answer == again,
        },
        "killed_prefill": {
            "requests": len(asked),
            "under_load": in_flight,
            "answered": len(killed.answers),
            "seconds": killed.seconds,
            "equal_to_those_one_at_a_time": sum(
                killed.answers[n] == alone.answers[n] for n in killed.answers
            ),
        },
    }


async def compare(
    peer: Any, model: Path, options: argparse.Namespace
) -> tuple[dict[str, list[dict[str, Run]]], dict[str, float], dict[str, Any]]:
    """By system, in the order of the rounds: its runs by load; seconds until Ready; and what faults change."""
    wanted = {name: layout for name, layout in OURS.items() if name in options.layouts}
    held = {name: Held(name, model, options) for name in wanted}
    found: dict[str, list[dict[str, Run]]] = {}
    ready: dict[str, float] = {}
    urls: dict[str, str] = {}
    seen: dict[str, Any] = {}
    try:
        if peer is not None:
            try:
                async with asyncio.timeout(options.start_seconds):
                    ready[PEER], urls[PEER] = await peer.ready(), peer.url
            except (SystemExit, TimeoutError) as error:
                seen[PEER] = f"{type(error).__name__}: {error}"
                console.print(f"{PEER}: {seen[PEER]}", markup=False)
        for name, one_of_ours in held.items():
            try:
                local = await one_of_ours.ready()
            except Exception as error:  # noqa: BLE001
                seen[name] = f"{type(error).__name__}: {error}"
                console.print(f"{name}: {seen[name]}", markup=False)
                continue
            ready[name], urls[name] = one_of_ours.seconds, local.gateway_url
            console.print(f"{name}: ready after {ready[name]:.0f} s")
        for number in range(-1, options.rounds):  # the first warms up
            for name, url in list(urls.items()):
                begin = time.monotonic()
                try:
                    async with asyncio.timeout(ROUND_SECONDS):
                        runs = await measure(url, model.name, number % 1000, options)
                except Exception as error:  # noqa: BLE001
                    seen[name] = f"round {number}: {type(error).__name__}: {error}"
                    console.print(f"{name}: {seen[name]}", markup=False)
                    del urls[name]  # its later rounds would be compared with others' of another number
                    continue
                console.print(f"round {number} {name}: {time.monotonic() - begin:.1f} s {speeds(runs)}")
                if number >= 0:
                    found.setdefault(name, []).append(runs)
                else:
                    seen.setdefault("warm_up_tokens_per_second", {})[name] = {
                        load: run.tokens / run.seconds for load, run in runs.items()
                    }
                report(found, ready, seen, options)
        if FAULTS in urls:
            try:
                local = await held[FAULTS].ready()
                async with asyncio.timeout(ROUND_SECONDS):
                    seen["faults"] = await faults(local, model.name, options)
            except Exception as error:  # noqa: BLE001
                seen["faults"] = f"{type(error).__name__}: {error}"
            report(found, ready, seen, options)
    finally:
        await asyncio.gather(*(one_of_ours.let_go() for one_of_ours in held.values()))
    return found, ready, seen


def speeds(runs: dict[str, Run]) -> str:
    """Tokens a second of each load, on a line."""
    return ", ".join(f"{load}: {run.tokens / run.seconds:.0f}" for load, run in runs.items())


def equal(one: list[dict[str, Run]], other: list[dict[str, Run]], load: str) -> str:
    """How many answers of the rounds that both have are the same."""
    pairs = [(a[load].answers, b[load].answers) for a, b in zip(one, other, strict=False)]
    return f"{sum(a[n] == b[n] for a, b in pairs for n in a)}/{sum(len(a) for a, _ in pairs)}"


def lines(found: dict[str, list[dict[str, Run]]]) -> list[dict[str, Any]]:
    """One for each load and system."""
    made = []
    for load in (load.name for load in LOADS):
        for name, rounds in found.items():
            runs = [one_round[load] for one_round in rounds]
            line = {
                "load": load,
                "system": name,
                "tokens_per_second": [run.tokens / run.seconds for run in runs],
                "ttft_seconds": percentiles([value for run in runs for value in run.ttft]),
                "itl_seconds": percentiles([value for run in runs for value in run.itl]),
            }
            if name != PEER and PEER in found:
                line["ratio"] = [
                    (run.tokens / run.seconds) / (peer[load].tokens / peer[load].seconds)
                    for run, peer in zip(runs, found[PEER], strict=False)
                ]
                line["equal_to_vllm_serve"] = equal(rounds, found[PEER], load)
            if name != MONOLITH and MONOLITH in found:
                line["equal_to_monolithic"] = equal(rounds, found[MONOLITH], load)
            made.append(line)
    return made


def table(rows: list[dict[str, Any]]) -> Table:
    """The report for a reader."""
    made = Table(title="vLLM in our layouts and `vllm serve`, one GPU", title_justify="left")
    headings = (
        "load",
        "system",
        "tokens/s",
        "ratio (rounds)",
        "TTFT p50 ms",
        "ITL p50 ms",
        "= serve",
        "= monolithic",
    )
    for heading in headings:
        made.add_column(heading)
    for row in rows:
        ratios = row.get("ratio", [])
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else ""
        times = [row[key].get("p50") for key in ("ttft_seconds", "itl_seconds")]
        made.add_row(
            row["load"],
            row["system"],
            f"{statistics.median(row['tokens_per_second']):.0f}",
            spread,
            *("" if value is None else f"{1000 * value:.1f}" for value in times),
            row.get("equal_to_vllm_serve", ""),
            row.get("equal_to_monolithic", ""),
        )
    return made


def gpu() -> dict[str, Any]:
    """The card and what runs on it."""
    from importlib.metadata import version

    packages = {name: version(name) for name in ("vllm", "torch", "triton", "nixl-cu13")}
    card = torch.cuda.get_device_properties(0)
    return {"name": card.name, "memory_gib": round(card.total_memory / 2**30, 1), "packages": packages}


def report(
    found: dict[str, list[dict[str, Run]]],
    ready: dict[str, float],
    seen: dict[str, Any],
    options: argparse.Namespace,
) -> Path:
    """Keep what has been measured so far."""
    body = {
        "gpu": gpu() if GPU else None,
        "options": {
            key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()
        },
        "model": {"architecture": "qwen2_vl", **vars(SMALL if options.small else LARGE)},
        "ready_seconds": ready,
        "seen": seen,
        "lines": lines(found),
    }
    return keep("vllm_on_gpu", body)


def main() -> None:
    """Run all side by side and print one table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--share", type=float, default=1.0, help="of the requests of each load that is asked")
    parser.add_argument("--layouts", nargs="*", default=list(OURS), choices=list(OURS))
    parser.add_argument("--start-seconds", type=float, default=400.0, help="until a system is left out")
    parser.add_argument("--without-peer", action="store_true", help="leave `vllm serve` out")
    parser.add_argument("--dtype", default="BFloat16", choices=["BFloat16", "Float32"])
    parser.add_argument("--small", action="store_true", help="a small model and a few requests: a dry run")
    parser.add_argument("--logs", type=Path, default=Path(".cache"), help="folder for what pods log")
    options = parser.parse_args()
    options.logs.mkdir(parents=True, exist_ok=True)
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    model = write_model(options.small, options.dtype)
    arguments = [
        *("--dtype", options.dtype.lower(), "--max-model-len", "2048", "--max-num-seqs", "64"),
        *("--max-num-batched-tokens", "1024", "--limit-mm-per-prompt", json.dumps({"image": 1, "video": 0})),
        *(
            ["--gpu-memory-utilization", "0.25"]
            if GPU
            else ["--gpu-memory-utilization", "0.2", "--enforce-eager"]
        ),
    ]
    if options.without_peer:
        found, ready, seen = asyncio.run(compare(None, model, options))
    else:
        python = interpreter_for(EngineSpec(type="VLLM")).python
        log = options.logs / "vllm-serve.log"
        environment = {} if GPU else ON_CPUS
        with vllm_server(log, python, model, model.name, arguments, environment) as server:
            found, ready, seen = asyncio.run(compare(server, model, options))
    console.print(table(lines(found)))
    console.print("seconds until Ready: " + ", ".join(f"{name} {value:.0f}" for name, value in ready.items()))
    console.print_json(data=seen)
    console.print(str(report(found, ready, seen, options)))


if __name__ == "__main__":
    main()
