"""Tokens a second of our layouts with either engine and of plain `vllm serve`, over HTTP, on the same cores, in one run.

    make vllm && python -m bench.versus_vllm [--rounds 3] [--requests 24] [--tokens 64] [--engine VLLM] [--eager]

Both compile the model, which our pods do on CPUs where `enforceEager` is false, unless `--eager` is given. All serve the same float32 llava of 50 M parameters with random weights, and get the same requests in turns: in each round
vLLM's server, then each of ours. vLLM's server starts once, because it compiles for minutes, and is stopped by SIGSTOP while others
run. A ratio is ours to the server's of the same round; the report has its median, least and greatest, and how many answers are equal.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import transformers
import yaml
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file

from bench.layouts import LAYOUTS, Request, Run, drive, picture, resource
from bench.report import keep, percentiles
from mmd_cli.local import up
from support.oracles import random_model

VLLM = Path(".cache/vllm").resolve()
MODEL = Path(".cache/models/legible-llava").resolve()
MODEL_OF_VLLM = MODEL.with_name(f"{MODEL.name}-vllm")
SIZE = random_model.Size(
    hidden=512,
    layers=14,
    heads=8,
    kv_heads=8,
    feed_forward_ratio=3,
    vision_hidden=256,
    vision_layers=6,
    image_pixels=224,
)
WORDS = ["red", "green", "blue", "circle", "square", "left", "right", "tone", "video"]
PORT = 18731
START_SECONDS = 600.0
OURS = {
    f"{engine} {layout}": (engine, layout)
    for engine in ("Native", "VLLM")
    for layout in ("monolithic", "E-P-D")
}
console = Console(width=150)


@dataclass(frozen=True)
class Load:
    """A line of the table: which requests, how many at once."""

    name: str
    concurrency: int
    images: Callable[[np.random.Generator, int], bytes | None]

    def requests(self, count: int, seed: int) -> list[Request]:
        """The same for the same seed."""
        rng = np.random.default_rng([seed, *self.name.encode()])
        return [
            Request(
                f"Request {seed} {number}: {' '.join(rng.choice(WORDS, 8))}. Describe it.",
                self.images(rng, number),
            )
            for number in range(count)
        ]


def fresh(rng: np.random.Generator, number: int) -> bytes | None:
    return picture(rng)


def repeated(rng: np.random.Generator, number: int) -> bytes | None:
    return picture(np.random.default_rng(number % 4))


def none(rng: np.random.Generator, number: int) -> bytes | None:
    return None


PREFILL_STEP_TOKENS = 1024  # of a pool where no answer waits for the end of a step
LOCAL_PREFILL_TOKENS = 128  # more than the texts have
LOADS = (
    Load("fresh images, concurrency 8", 8, fresh),
    Load("fresh images, concurrency 1", 1, fresh),
    Load("repeated images, concurrency 8", 8, repeated),
    Load("text, concurrency 8", 8, none),
)


def write_models() -> None:
    """The checkpoint, and a copy with the names of the tower's weights that vLLM knows.

    Greedy answers are legible: a token that is no character would show its client nothing, and its time would be that of a later one.
    """
    if (MODEL_OF_VLLM / "model.safetensors").exists():
        return
    random_model.build("llava", MODEL, size=SIZE)
    weights = load_file(MODEL / "model.safetensors")
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    for token_id in range(len(tokenizer)):
        text = tokenizer.decode([token_id], skip_special_tokens=True)
        if not text or not text.isprintable() or "\ufffd" in text:
            weights["language_model.lm_head.weight"][token_id] = 0  # below the greatest of the other logits
    save_file(weights, MODEL / "model.safetensors", metadata={"format": "pt"})
    MODEL_OF_VLLM.mkdir(parents=True, exist_ok=True)
    for file in MODEL.iterdir():
        if file.suffix != ".safetensors":
            (MODEL_OF_VLLM / file.name).write_bytes(file.read_bytes())
    tower = "vision_tower."
    weights = load_file(MODEL / "model.safetensors")
    named = {
        f"{tower}vision_model.{key.removeprefix(tower)}" if key.startswith(tower) else key: value
        for key, value in weights.items()
    }
    save_file(named, MODEL_OF_VLLM / "model.safetensors", metadata={"format": "pt"})


ON_CPUS = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": str(os.cpu_count()),
    "KMP_BLOCKTIME": "1",
    "LD_PRELOAD": str(VLLM / "lib" / "libiomp5.so"),
}
"""The server with both cores, without pinning, and its engine without a worker process: its fastest form here."""


class Vllm:
    """`vllm serve` in its environment. It runs only inside `running`."""

    def __init__(
        self,
        log: Path,
        python: str,
        model: Path,
        name: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
    ) -> None:
        """`arguments`: of `vllm serve`, besides those that say which model it serves where."""
        self.url = f"http://127.0.0.1:{PORT}"
        self._log = log
        self._command = [
            *(python, "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--served-model-name", name),
            *("--host", "127.0.0.1", "--port", str(PORT), *arguments),
        ]
        self._environment = {**os.environ, "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", **environment}

    def start(self) -> None:
        """Start the server."""
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    async def ready(self) -> float:
        """Seconds until it answers.

        Raises:
            SystemExit: it ended, or was not ready in time; the message names its log.
        """
        begun = time.monotonic()
        async with aiohttp.ClientSession() as session:
            while time.monotonic() - begun < START_SECONDS and self._process.poll() is None:
                try:
                    async with session.get(f"{self.url}/health", timeout=aiohttp.ClientTimeout(5)) as answer:
                        if answer.status == 200:
                            return time.monotonic() - begun
                except (aiohttp.ClientError, TimeoutError):
                    pass
                await asyncio.sleep(0.5)
        self.stop()
        raise SystemExit(f"vllm serve is not ready after {time.monotonic() - begun:.0f} s; see {self._log}")

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let it run, and freeze it afterwards: idle it would take a twentieth of a core from others."""
        os.killpg(self._process.pid, signal.SIGCONT)
        try:
            yield
        finally:
            os.killpg(self._process.pid, signal.SIGSTOP)

    def stop(self) -> None:
        """End it and what it started."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(30)


@contextmanager
def vllm_server(*given: Any) -> Iterator[Vllm]:
    """`vllm serve`, given what `Vllm` is; ended with the block."""
    server = Vllm(*given)
    server.start()
    try:
        yield server
    finally:
        server.stop()


async def measure(url: str, options: argparse.Namespace, number: int) -> dict[str, Run]:
    """Every load once on a server that is up."""
    await drive(url, MODEL.name, LOADS[0].requests(8, 10_000 + number), 8, 8)
    return {
        load.name: await drive(
            url, MODEL.name, load.requests(options.requests, number), load.concurrency, options.tokens
        )
        for load in LOADS
    }


def settings(engine: str, spec: dict[str, Any], eager: bool) -> dict[str, Any]:
    """`spec.engine` of one of our layouts."""
    if engine != "VLLM":
        return {"type": engine}
    pools: dict[str, dict[str, Any]] = {"decode": {"enforceEager": eager}}
    if "prefill" in spec:
        pools["prefill"] = {"enforceEager": eager, "maxNumBatchedTokens": PREFILL_STEP_TOKENS}
    return {"type": engine, **pools}


async def ours(
    engine: str, layout: str, options: argparse.Namespace, number: int
) -> tuple[float, dict[str, Run]]:
    """One of our layouts, started for this round: seconds until Ready, and its runs."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "bench.yaml"
        body = resource(LAYOUTS[layout], MODEL, 8)
        body["spec"]["engine"] = settings(engine, body["spec"], options.eager)
        body["spec"]["decode"]["localPrefillTokens"] = LOCAL_PREFILL_TOKENS
        file.write_text(yaml.safe_dump(body))
        begun = time.monotonic()
        async with up.running(up.load(file), log_line=lambda *_: None) as local:
            ready = time.monotonic() - begun
            return ready, await measure(local.gateway_url, options, number)


async def rounds(options: argparse.Namespace, server: Vllm) -> dict[str, list[tuple[float, dict[str, Run]]]]:
    """By system, in the order of the rounds: seconds until Ready, and the runs by load."""
    layouts = {name: layout for name, layout in OURS.items() if options.engine in (None, layout[0])}
    found: dict[str, list[tuple[float, dict[str, Run]]]] = {"vllm": [], **{name: [] for name in layouts}}
    ready = await server.ready()
    for number in range(options.rounds):
        with console.status(f"round {number}: vllm"), server.running():
            found["vllm"].append((ready, await measure(server.url, options, number)))
        for name, (engine, layout) in layouts.items():
            with console.status(f"round {number}: {name}"):
                found[name].append(await ours(engine, layout, options, number))
    return found


def lines(found: dict[str, list[tuple[float, dict[str, Run]]]]) -> list[dict[str, Any]]:
    """One for each load and layout of ours."""
    made = []
    for load in LOADS:
        peers = [runs[load.name] for _, runs in found["vllm"]]
        for name in (name for name in OURS if name in found):
            own = [runs[load.name] for _, runs in found[name]]
            ratios = [
                (one.tokens / one.seconds) / (peer.tokens / peer.seconds)
                for one, peer in zip(own, peers, strict=True)
            ]
            made.append(
                {
                    "load": load.name,
                    "layout": name,
                    "ratio": statistics.median(ratios),
                    "ratio_min": min(ratios),
                    "ratio_max": max(ratios),
                    "tokens_per_second": [run.tokens / run.seconds for run in own],
                    "vllm_tokens_per_second": [run.tokens / run.seconds for run in peers],
                    "ttft_seconds": percentiles([value for run in own for value in run.ttft]),
                    "vllm_ttft_seconds": percentiles([value for run in peers for value in run.ttft]),
                    "equal_answers": sum(
                        one.answers[n] == peer.answers[n]
                        for one, peer in zip(own, peers, strict=True)
                        for n in one.answers
                    ),
                    "answers": sum(len(one.answers) for one in own),
                }
            )
    return made


def table(rows: list[dict[str, Any]]) -> Table:
    """The report for a reader."""
    made = Table(title="our layouts against vllm serve, tokens a second, same cores", title_justify="left")
    for heading in (
        "load",
        "layout",
        "ours",
        "vllm serve",
        "ratio (rounds)",
        "TTFT p50 ms ours / vllm serve",
        "equal",
    ):
        made.add_column(heading)
    for row in rows:
        made.add_row(
            row["load"],
            row["layout"],
            f"{statistics.median(row['tokens_per_second']):.0f}",
            f"{statistics.median(row['vllm_tokens_per_second']):.0f}",
            f"{row['ratio']:.2f} ({row['ratio_min']:.2f} to {row['ratio_max']:.2f})",
            f"{1000 * row['ttft_seconds']['p50']:.0f} / {1000 * row['vllm_ttft_seconds']['p50']:.0f}",
            f"{row['equal_answers']}/{row['answers']}",
        )
    return made


def vllm_versions() -> dict[str, str]:
    """What the peer ran with."""
    code = "import importlib.metadata as m; print(*(m.version(p) for p in ('vllm-cpu', 'torch', 'transformers')))"
    printed = subprocess.run(
        [VLLM / "bin" / "python", "-c", code], check=True, capture_output=True, text=True
    ).stdout.split()
    return dict(zip(("vllm-cpu", "torch", "transformers"), printed, strict=True))


def main() -> None:
    """Run both and print one table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=24, help="of each load and round")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--engine", choices=("Native", "VLLM"), help="only our layouts with this one")
    parser.add_argument("--eager", action="store_true", help="vLLM does not compile: it starts sooner")
    options = parser.parse_args()
    if not (VLLM / ".installed").exists():
        sys.exit("vLLM is not installed; run `make vllm`")
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    write_models()
    log = VLLM.with_name("vllm-serve.log")
    arguments = [
        *("--dtype", "float32", "--max-model-len", "1024", "--gpu-memory-utilization", "0.4"),
        *("--distributed-executor-backend", "uni", *(["--enforce-eager"] if options.eager else [])),
    ]
    python = str(VLLM / "bin" / "python")
    with vllm_server(log, python, MODEL_OF_VLLM, MODEL.name, arguments, ON_CPUS) as server:
        found = asyncio.run(rounds(options, server))
    rows = lines(found)
    console.print(table(rows))
    ready = {system: statistics.median(seconds for seconds, _ in all_) for system, all_ in found.items()}
    console.print("seconds until Ready: " + ", ".join(f"{name} {value:.0f}" for name, value in ready.items()))
    body = {"vllm": vllm_versions(), "ready_seconds": ready, "tokens": options.tokens, "lines": rows}
    console.print(str(keep("versus_vllm", body)))


if __name__ == "__main__":
    main()
