"""What scraping costs: tokens a second of a real deployment under steady load, with a scrape of every pod each second and without.

    python -m bench.scrape_cost [--rounds 12] [--seconds 15] [--concurrency 8]

One deployment, one load that never pauses; rounds with and without scrapes take turns (A/B/A/B ...), so that what drifts on the
machine meets both. The scraper is a separate process, as Prometheus is. The report has every round, the ratio of each pair with its
spread, and what a scrape costs the pods in CPU time while nothing else happens, which is far less noisy than throughput.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import psutil
from rich.console import Console
from rich.table import Table

from bench.report import keep
from mmd_cli.client import media_part
from mmd_cli.local import up
from mmd_cli.samples import draw

DEMO = Path(__file__).parents[1] / "examples" / "demo.yaml"
EDGE_SECONDS = 1.0
"""Left out at the beginning of each round: what the one before left in flight."""
SCRAPER = """
import sys, threading, time, urllib.request
urls, on = sys.argv[1:], threading.Event()
def listen():
    for line in sys.stdin:
        on.set() if line.strip() == "on" else on.clear()
threading.Thread(target=listen, daemon=True).start()
while True:
    on.wait()
    begun = time.monotonic()
    for url in urls:
        request = urllib.request.Request(url, headers={"Accept": "application/openmetrics-text;version=1.0.0"})
        urllib.request.urlopen(request, timeout=5).read()
    time.sleep(max(0.0, 1.0 - (time.monotonic() - begun)))
"""


@dataclass
class Load:
    """Clients that ask without a pause, about text and about images. `tokens` are the arrivals of pieces of answers."""

    url: str
    concurrency: int
    tokens: list[float] = field(default_factory=list)
    answers: int = 0

    async def run(self) -> None:
        images = [draw("image", seed) for seed in range(200)]
        numbers = itertools.count()
        client = openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)

        async def one() -> None:
            while True:
                number = next(numbers)
                content: list[dict[str, Any]] = [{"type": "text", "text": f"Tell me about number {number}."}]
                if number % 2:
                    image = images[number // 2 % len(images)]
                    content.insert(0, media_part(image.kind, image.bytes, image.mime))
                stream = await client.chat.completions.create(
                    model="builtin/demo",
                    messages=[{"role": "user", "content": content}],  # type: ignore[list-item, misc]
                    max_tokens=64,
                    temperature=0,
                    stream=True,
                    extra_body={"ignore_eos": True},
                )
                async for _ in stream:
                    self.tokens.append(time.monotonic())
                self.answers += 1

        await asyncio.gather(*(one() for _ in range(self.concurrency)))


class Scraper:
    """A process that scrapes every pod once a second while it is told to."""

    def __init__(self, urls: list[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-c", SCRAPER, *urls], stdin=subprocess.PIPE, text=True
        )

    def turn(self, on: bool) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("on\n" if on else "off\n")
        self._process.stdin.flush()

    def stop(self) -> None:
        if self._process.poll() is not None:
            raise RuntimeError(f"the scraper ended with {self._process.returncode}")
        self._process.terminate()
        self._process.wait(10)


async def at_rest(pids: list[int], scraper: Scraper, seconds: float) -> dict[str, float]:
    """CPU seconds that all pods together use in a second, without and with scrapes."""
    found = {}
    processes = [psutil.Process(pid) for pid in pids]
    for name, on in (("without", False), ("with", True)):
        scraper.turn(on)
        await asyncio.sleep(EDGE_SECONDS)
        before, begun = sum(sum(p.cpu_times()[:2]) for p in processes), time.monotonic()
        await asyncio.sleep(seconds)
        used = sum(sum(p.cpu_times()[:2]) for p in processes) - before
        found[name] = used / (time.monotonic() - begun)
    scraper.turn(False)
    return found


async def measure(rounds: int, seconds: float, concurrency: int) -> dict[str, Any]:
    async with up.running(up.load(DEMO), log_line=lambda *_: None) as local:
        scraper = Scraper([f"{pod.admin_url}/metrics" for pod in local.pods])
        pids = [child.pid for child in local.supervisor.children.values() if child.pid is not None]
        load = Load(local.gateway_url, concurrency)
        asking = asyncio.create_task(load.run())
        rates: dict[str, list[float]] = {"without": [], "with": []}
        try:
            await asyncio.sleep(2 * seconds)  # warm
            for number in range(2 * rounds):
                name = "with" if number % 2 else "without"
                scraper.turn(name == "with")
                await asyncio.sleep(EDGE_SECONDS)
                begun, before = time.monotonic(), len(load.tokens)
                await asyncio.sleep(seconds)
                rates[name].append((len(load.tokens) - before) / (time.monotonic() - begun))
                if asking.done():
                    await asking  # raises
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        await asyncio.sleep(3.0)
        rest = await at_rest(pids, scraper, seconds)
        scraper.stop()
        pods = len(local.pods)
    ratios = [b / a for a, b in zip(rates["without"], rates["with"], strict=True)]
    return {
        "pods": pods,
        "round_seconds": seconds,
        "concurrency": concurrency,
        "tokens_per_second": rates,
        "ratio_with_over_without": {
            "pairs": ratios,
            "mean": statistics.mean(ratios),
            "median": statistics.median(ratios),
            "standard_error": statistics.stdev(ratios) / len(ratios) ** 0.5,
            "least": min(ratios),
            "most": max(ratios),
        },
        "cpu_seconds_a_second_at_rest": rest,
        "cpu_seconds_a_scrape": (rest["with"] - rest["without"]) / pods,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=12, help="pairs of rounds")
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--concurrency", type=int, default=8)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MMD_STATE_DIR"] = folder
        found = asyncio.run(measure(options.rounds, options.seconds, options.concurrency))
    path = keep("scrape_cost", found)
    table = Table(title="Scraping every pod each second", title_justify="left")
    for column in ("", "tokens a second", "ratio"):
        table.add_column(column, justify="right")
    ratio = found["ratio_with_over_without"]
    for name, rates in found["tokens_per_second"].items():
        spread = f"{statistics.mean(rates):.1f} ± {statistics.stdev(rates):.1f}"
        told = f"{ratio['mean']:.4f} ± {ratio['standard_error']:.4f}" if name == "with" else ""
        table.add_row(name, spread, told)
    console = Console(width=100)
    console.print(table)
    console.print(f"CPU of one scrape on the pod, at rest: {1000 * found['cpu_seconds_a_scrape']:.2f} ms")
    console.print(str(path))


if __name__ == "__main__":
    main()
