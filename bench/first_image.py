"""What the first image after a start costs: TTFT of the first three images that a fresh deployment is asked about.

    python -m bench.first_image [--starts 8]

Each start is one of examples/demo.yaml, with every pod Ready before the first question. The images differ, so that no cache has
them, and come one after the other, so that none waits for another. The report has every time and, of each request, its phases.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from bench.report import keep
from mmd_cli.client import media_part
from mmd_cli.local import up
from mmd_cli.samples import draw

DEMO = Path(__file__).parents[1] / "examples" / "demo.yaml"
IMAGES = 3
SEED = 50_000


async def ask(client: httpx.AsyncClient, admin: str, seed: int) -> dict[str, Any]:
    """Milliseconds until the first token about an image, and from the arrival of the request to both ends of each phase."""
    sample = draw("image", seed)
    content = [media_part(sample.kind, sample.bytes, sample.mime), {"type": "text", "text": sample.question}]
    body = {
        "model": "builtin/demo",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 8,
        "temperature": 0,
        "stream": True,
    }
    begun = time.monotonic()
    ttft, request_id = 0.0, ""
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            request_id = chunk["id"]
            if not ttft and any(choice["delta"].get("content") for choice in chunk["choices"]):
                ttft = 1000 * (time.monotonic() - begun)
    async with httpx.AsyncClient() as http:
        timeline = (await http.get(f"{admin}/debug/requests/{request_id}")).json()
    phases = {
        phase["name"]: [round(1000 * (phase[edge] - timeline["arrived"]), 1) for edge in ("start", "end")]
        for phase in timeline["phases"]
    }
    return {"ttft_ms": ttft, "phases_ms": phases}


async def measure(starts: int) -> list[list[dict[str, Any]]]:
    found = []
    for start in range(starts):
        async with (
            up.running(up.load(DEMO), log_line=lambda *_: None) as local,
            httpx.AsyncClient(base_url=local.gateway_url, timeout=120) as client,
        ):
            while (await client.get("/ready")).status_code != 200:  # it has not heard of every pod yet
                await asyncio.sleep(0.05)
            seeds = range(SEED + IMAGES * start, SEED + IMAGES * (start + 1))
            found.append([await ask(client, local.admin_url, seed) for seed in seeds])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--starts", type=int, default=8)
    starts = parser.parse_args().starts
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MMD_STATE_DIR"] = folder
        load = os.getloadavg()[0]
        found = asyncio.run(measure(starts))
    columns = [[one[n]["ttft_ms"] for one in found] for n in range(IMAGES)]
    table = Table(title=f"TTFT of the first images after each of {starts} starts (ms)", title_justify="left")
    summary = []
    for name in ("image", "median", "least", "most"):
        table.add_column(name, justify="right")
    for number, times in enumerate(columns, 1):
        row = {"median": statistics.median(times), "least": min(times), "most": max(times)}
        summary.append({"image": number, **row})
        table.add_row(str(number), *(f"{value:.0f}" for value in row.values()))
    path = keep("first_image", {"load_before": load, "ttft_ms": summary, "starts": found})
    console = Console(width=100)
    console.print(table)
    console.print(str(path))


if __name__ == "__main__":
    main()
