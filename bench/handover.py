"""What it costs to hand a prompt over from prefill to decode, by its size, beside what it costs to compute it.

    python -m bench.handover [--engine VLLM] [--words 16 64 160 320] [--rounds 20]

One prefill and one decode pod share the cores; prompts of text that nobody has asked before are asked one at a time. The gateway's
timelines say how long each was prefilled, and how long after the end of that the decode pod decoded: KV is read, announced, sent,
written and committed meanwhile, as far as that was not done while later chunks of the prompt were computed.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import yaml
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig

from bench.layouts import LAYOUTS, resource
from bench.report import keep, percentiles
from bench.versus_vllm import MODEL, WORDS, write_models
from mmd_cli.local import up

PHASES = ("prefill", "hand-over")
console = Console(width=120)


def kv_bytes_per_token() -> int:
    """Of the model of the benches, in float32."""
    text = AutoConfig.from_pretrained(MODEL).get_text_config()
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return int(2 * 4 * text.num_hidden_layers * text.num_key_value_heads * head_dim)


async def ask(client: httpx.AsyncClient, text: str) -> tuple[str, int]:
    """A question for two tokens, one of the prefill pod, one of the decode pod: its id, and the tokens of its prompt."""
    body = {
        "model": MODEL.name,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 2,
        "temperature": 0,
        "ignore_eos": True,
    }
    reply = await client.post("/v1/chat/completions", json=body)
    reply.raise_for_status()
    answer = reply.json()
    return str(answer["id"]), int(answer["usage"]["prompt_tokens"])


@dataclass
class Prompts:
    """Prompts of about one size: their tokens, and the milliseconds of each phase."""

    tokens: list[int] = field(default_factory=list)
    milliseconds: dict[str, list[float]] = field(default_factory=lambda: {phase: [] for phase in PHASES})


async def measure(options: argparse.Namespace) -> list[Prompts]:
    """What the gateway's timelines say of prompts of each size."""
    found = [Prompts() for _ in options.words]
    rng = np.random.default_rng(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "bench.yaml"
        body = resource(LAYOUTS["EP-D"], MODEL, 1)
        body["spec"]["engine"] = {"type": options.engine}
        file.write_text(yaml.safe_dump(body))
        async with up.running(up.load(file), log_line=lambda *_: None) as local:
            asked = httpx.AsyncClient(base_url=local.gateway_url, timeout=120)
            told = httpx.AsyncClient(base_url=local.admin_url, timeout=120)
            async with asked, told:
                for number, (words, prompts) in itertools.product(
                    range(options.rounds + 1), zip(options.words, found, strict=True)
                ):
                    request, tokens = await ask(asked, " ".join(rng.choice(WORDS, words)))
                    timeline = (await told.get(f"/debug/requests/{request}")).json()
                    if number:  # the first round warms up
                        prompts.tokens.append(tokens)
                        prefilled = timeline["timings"]["prefill"]
                        spans = {phase["name"]: phase for phase in timeline["phases"]}
                        waited = spans["decode"]["start"] - spans["prefill"]["end"]
                        for phase, took in zip(PHASES, (prefilled, 1000 * waited), strict=True):
                            prompts.milliseconds[phase].append(took)
    return found


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", choices=["Native", "VLLM"], default="VLLM")
    parser.add_argument("--words", type=int, nargs="+", default=[16, 64, 160, 320], help="of a prompt")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    write_models()
    found = asyncio.run(measure(options))
    made = Table(title=f"{options.engine}: hand-over beside prefill, median ms", title_justify="left")
    for heading in ("tokens", "KV MiB", "prefill", "hand-over", "hand-over / prefill"):
        made.add_column(heading, justify="right")
    lines: list[dict[str, Any]] = []
    for prompts in found:
        prefill, transfer = (percentiles(prompts.milliseconds[phase]) for phase in PHASES)
        tokens = round(float(np.median(prompts.tokens)))
        size = tokens * kv_bytes_per_token()
        ratio = transfer["p50"] / prefill["p50"]
        lines.append(
            {
                "tokens": tokens,
                "kv_bytes": size,
                "prefill_ms": prefill,
                "hand_over_ms": transfer,
                "ratio": ratio,
            }
        )
        figures = (size / 2**20, prefill["p50"], transfer["p50"])
        made.add_row(str(tokens), *(f"{value:.1f}" for value in figures), f"{ratio:.2f}")
    console.print(made)
    body = {"options": vars(options), "lines": lines}
    console.print(f"report: {keep(f'handover_{options.engine.lower()}', body)}", highlight=False)


if __name__ == "__main__":
    main()
