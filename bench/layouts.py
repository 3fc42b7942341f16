"""Tokens a second, TTFT and ITL of the four role layouts, compared with transformers on the same cores, in one run.

    python -m bench.layouts [--requests 32] [--concurrency 8] [--tokens 64] [--rounds 2]

Every system gets the same requests (half text, half a fresh image with text) and must give the same greedy answers;
the column "equal" counts them. Systems run one after another, each in several rounds whose spread shows the noise.
transformers runs `generate` request after request with all cores, and its own continuous batching on the text requests.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import logging
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import openai
import torch
import transformers
import yaml
from PIL import Image
from rich.console import Console
from rich.table import Table

from bench.report import keep, percentiles
from mmd_cli.local import up
from support.oracles import random_model

MODEL = Path(".cache/models/bench-qwen2_5_vl").resolve()
SIZE = random_model.Size(hidden=512, layers=8, vision_hidden=256, vision_layers=6)
console = Console()


@dataclass(frozen=True)
class Request:
    """One question; `image` is PNG bytes or None."""

    text: str
    image: bytes | None


@dataclass
class Run:
    """What one system did in one round."""

    seconds: float
    answers: dict[int, str]
    ttft: list[float] = field(default_factory=list)
    itl: list[float] = field(default_factory=list)
    tokens: int = 0


def picture(rng: np.random.Generator) -> bytes:
    """A PNG of noise, 224 pixels wide and high."""
    buffer = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (224, 224, 3), dtype=np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def requests(count: int, seed: int) -> list[Request]:
    """Fresh images and texts, so that no system profits from an earlier round's cache."""
    rng = np.random.default_rng(seed)
    made = []
    for number in range(count):
        image = picture(rng) if number % 2 else None
        words = " ".join(
            rng.choice(["red", "green", "blue", "circle", "square", "left", "right", "tone", "video"], 40)
        )
        made.append(Request(f"Request {seed} {number}: {words}. Describe it.", image))
    return made


def content(request: Request) -> list[dict[str, Any]]:
    """OpenAI content parts."""
    parts: list[dict[str, Any]] = []
    if request.image is not None:
        url = "data:image/png;base64," + base64.b64encode(request.image).decode()
        parts.append({"type": "image_url", "image_url": {"url": url}})
    return [*parts, {"type": "text", "text": request.text}]


LAYOUTS: dict[str, dict[str, int]] = {
    "monolithic": {"decode": 1},
    "E-PD": {"encoder": 1, "decode": 1},
    "EP-D": {"prefill": 1, "decode": 1},
    "E-P-D": {"encoder": 1, "prefill": 1, "decode": 1},
}


def resource(pools: dict[str, int], model: Path, concurrency: int) -> dict[str, Any]:
    """A deployment of one layout on CPU workers."""
    kv = {"kvCacheMebibytes": 256}
    own = {"encoder": {}, "prefill": kv, "decode": {**kv, "maxSequences": max(16, concurrency)}}
    return {
        "apiVersion": "serving.multimodal.dev/v1alpha1",
        "kind": "MultimodalDeployment",
        "metadata": {"name": "bench"},
        "spec": {
            "model": {"id": str(model), "dtype": "Float32"},
            **{pool: {"replicas": count, "gpus": 0, **own[pool]} for pool, count in pools.items()},
            "transfer": {"kv": {"backend": "Gloo"}},
        },
    }


async def ask(
    client: openai.AsyncOpenAI, model: str, request: Request, tokens: int
) -> tuple[str, list[float], float]:
    """Stream one answer; the times of its pieces, and when it was asked."""
    begin = time.perf_counter()
    times: list[float] = []
    text = ""
    stream = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": content(request)}],  # type: ignore[list-item, misc]
        max_tokens=tokens,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    async for chunk in stream:
        for choice in chunk.choices:
            if choice.delta.content:
                times.append(time.perf_counter())
                text += choice.delta.content
    return text, times, begin


async def drive(url: str, model: str, wanted: list[Request], concurrency: int, tokens: int) -> Run:
    """Closed loop: `concurrency` requests are always in flight."""
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600)
    run, queue = Run(0.0, {}), list(enumerate(wanted))[::-1]

    async def worker() -> None:
        while queue:
            number, request = queue.pop()
            text, times, begin = await ask(client, model, request, tokens)
            run.answers[number] = text
            run.tokens += tokens
            run.ttft.append(times[0] - begin)
            run.itl += list(np.diff(times))

    begin = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(concurrency)))
    run.seconds = time.perf_counter() - begin
    await client.close()
    return run


async def serve(
    layout: str, rounds: list[list[Request]], concurrency: int, tokens: int, model: Path
) -> list[Run]:
    """All rounds on one layout (one start, one warm-up)."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "bench.yaml"
        file.write_text(yaml.safe_dump(resource(LAYOUTS[layout], model, concurrency)))
        async with up.running(up.load(file), log_line=lambda *_: None) as local:
            await drive(local.gateway_url, model.name, requests(concurrency, 10_000), concurrency, 8)
            return [
                await drive(local.gateway_url, model.name, wanted, concurrency, tokens) for wanted in rounds
            ]


class Stopwatch(transformers.generation.streamers.BaseStreamer):
    """Notes when `generate` hands out each token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        """Called with the prompt first, then with every token."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing to do."""


class Transformers:
    """The peer: the same checkpoint in one process with all cores."""

    def __init__(self, model: Path) -> None:
        self.processor = transformers.AutoProcessor.from_pretrained(model)
        self.model = transformers.AutoModelForImageTextToText.from_pretrained(
            model, dtype=torch.float32
        ).eval()
        self.banned = [self.model.config.image_token_id, self.model.config.video_token_id]

    def inputs(self, request: Request) -> Any:
        """The processor's tensors."""
        parts = [{"type": "image"}] if request.image is not None else []
        messages = [{"role": "user", "content": [*parts, {"type": "text", "text": request.text}]}]
        text = self.processor.apply_chat_template(messages, add_generation_prompt=True)
        images = [Image.open(io.BytesIO(request.image))] if request.image is not None else None
        return self.processor(text=[text], images=images, return_tensors="pt")

    def one_by_one(self, wanted: list[Request], tokens: int) -> Run:
        """`generate`, request after request. TTFT here has no queue in it: the request before is done."""
        run = Run(0.0, {})
        begin = time.perf_counter()
        for number, request in enumerate(wanted):
            watch, asked = Stopwatch(), time.perf_counter()
            with torch.inference_mode():
                inputs = self.inputs(request)
                self.model.base_model.rope_deltas = None
                out = self.model.generate(
                    **inputs,
                    max_new_tokens=tokens,
                    do_sample=False,
                    eos_token_id=None,
                    pad_token_id=0,
                    suppress_tokens=self.banned,
                    streamer=watch,
                )
            run.answers[number] = self.processor.tokenizer.decode(
                out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True
            )
            run.tokens += tokens
            run.ttft.append(watch.times[1] - asked)
            run.itl += list(np.diff(watch.times[1:]))
        run.seconds = time.perf_counter() - begin
        return run

    def continuous(self, wanted: list[Request], tokens: int) -> Run:
        """Its continuous batching, for the text requests only: it takes no media."""
        texts = [(n, r) for n, r in enumerate(wanted) if r.image is None]
        ids = [self.inputs(request)["input_ids"][0].tolist() for _, request in texts]
        text_model = self._text_model()
        config = transformers.GenerationConfig(
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=-1,
            pad_token_id=0,
            suppress_tokens=self.banned,
        )
        begin = time.perf_counter()
        out = text_model.generate_batch(inputs=ids, generation_config=config, progress_bar=False)
        run = Run(time.perf_counter() - begin, {})
        for (number, _), result in zip(
            texts, sorted(out.values(), key=lambda r: int(r.request_id.split("_")[-1])), strict=True
        ):
            run.answers[number] = self.processor.tokenizer.decode(
                result.generated_tokens, skip_special_tokens=True
            )
            run.tokens += len(result.generated_tokens)
        return run

    def _text_model(self) -> Any:
        text = self.model.config.get_text_config()
        config = transformers.Qwen2Config(
            **{
                k: getattr(text, k)
                for k in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
            },
            num_attention_heads=text.num_attention_heads,
            num_key_value_heads=text.num_key_value_heads,
            max_position_embeddings=text.max_position_embeddings,
            rms_norm_eps=text.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": text.rope_parameters["rope_theta"]},
            tie_word_embeddings=False,
        )
        model = transformers.Qwen2ForCausalLM(config).eval()
        weights = {
            **{f"model.{k}": v for k, v in self.model.get_decoder().state_dict().items()},
            "lm_head.weight": self.model.get_output_embeddings().weight,
        }
        model.load_state_dict(weights)
        return model


def row(name: str, runs: list[Run], oracle: list[dict[int, str]]) -> dict[str, Any]:
    """One system's figures over all rounds."""
    same = sum(
        text == right[n] for run, right in zip(runs, oracle, strict=True) for n, text in run.answers.items()
    )
    asked = sum(len(run.answers) for run in runs)
    return {
        "system": name,
        "tokens_per_second": [run.tokens / run.seconds for run in runs],
        "ttft_seconds": percentiles([value for run in runs for value in run.ttft]),
        "itl_seconds": percentiles([value for run in runs for value in run.itl]),
        "equal_answers": f"{same}/{asked}",
    }


def table(rows: list[dict[str, Any]]) -> Table:
    """The report for a reader."""
    made = Table(title="role layouts beside transformers, same cores, same requests", title_justify="left")
    for heading in ("system", "tok/s (rounds)", "TTFT ms p50/p90/p99", "ITL ms p50/p90/p99", "equal"):
        made.add_column(heading)

    def milliseconds(values: dict[str, float]) -> str:
        return " / ".join(f"{1000 * value:.0f}" for value in values.values()) or "–"

    for item in rows:
        made.add_row(
            item["system"],
            "  ".join(f"{value:.0f}" for value in item["tokens_per_second"]),
            milliseconds(item["ttft_seconds"]),
            milliseconds(item["itl_seconds"]),
            item["equal_answers"],
        )
    return made


def main() -> None:
    """Run all systems and print one table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--name", default="layouts")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    if not (MODEL / "config.json").exists():
        random_model.build("qwen2_5_vl", MODEL, size=SIZE)
    rounds = [requests(options.requests, seed) for seed in range(options.rounds)]
    peer = Transformers(MODEL)
    reference = [peer.one_by_one(wanted, options.tokens) for wanted in rounds]
    oracle = [run.answers for run in reference]
    rows = [row("transformers generate", reference, oracle)]
    with console.status("transformers continuous batching"):
        rows.append(
            row("transformers batching (text)", [peer.continuous(w, options.tokens) for w in rounds], oracle)
        )
    for layout in LAYOUTS:
        with console.status(layout):
            runs = asyncio.run(serve(layout, rounds, options.concurrency, options.tokens, MODEL))
        rows.append(row(layout, runs, oracle))
    console.print(table(rows))
    path = keep(
        options.name,
        {"options": vars(options), "model": {"architecture": "qwen2_5_vl", **vars(SIZE)}, "systems": rows},
    )
    console.print(f"report: {path}", highlight=False)


if __name__ == "__main__":
    main()
