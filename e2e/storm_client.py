"""Runs in a pod: first text alone, then a storm of videos with text, images and sounds beside it, against the gateway at argv[1].

Argument 2 is the smallest number of requests; more follow until the file `ENOUGH` is there. Prints one JSON line for each request
that ended, however it ended; never asks twice.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai

from mmd_workers.local.client import media_part
from mmd_workers.local.samples import Kind, as_another_file, draw

DISTINCT = 24  # files of each kind; a video is another file each time, with the same frames
FIRST_SEED = 70_000
CALM_SECONDS = 15.0
TEXT_PAUSE_SECONDS = 0.3
TEXTS_AT_ONCE = 16
PAUSE_SECONDS: dict[Kind, float] = {"video": 1.5, "image": 0.5, "audio": 0.5}
"""After an answer: cores that are all busy with answers leave none to pods that start."""
ASKERS: dict[Kind, int] = {"video": 12, "image": 2, "audio": 1}
TEXT_TOKENS, TOKENS = 64, 12
MODEL = "builtin/demo"
ENOUGH = Path("/tmp/enough")
MOST_TIMES = 5  # the smallest number: more are not asked, whatever is not there


class Storm:
    """Askers of each kind, one question after the other each; text at a steady pace while few of its answers are late."""

    def __init__(self, url: str, requests: int) -> None:
        self._client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=320, max_retries=0)
        self._fewest, self._asked = requests, 0
        self._samples = {(kind, seed): draw(kind, seed) for kind in ASKERS for seed in seeds()}

    async def run(self) -> None:
        calm = time.monotonic() + CALM_SECONDS
        texts: set[asyncio.Task[None]] = set()
        askers: list[asyncio.Task[None]] = []
        while self._goes_on():
            texts = {text for text in texts if not text.done()}
            if len(texts) < TEXTS_AT_ONCE:
                texts.add(asyncio.create_task(self._ask("text", "calm" if not askers else "storm")))
            await asyncio.sleep(TEXT_PAUSE_SECONDS)
            if not askers and time.monotonic() > calm:
                print(json.dumps({"storm_begins": time.time()}), flush=True)
                askers = [
                    asyncio.create_task(self._keep_asking(kind))
                    for kind, count in ASKERS.items()
                    for _ in range(count)
                ]
        await asyncio.gather(*texts, *askers)

    async def _keep_asking(self, kind: Kind) -> None:
        while self._goes_on():
            await self._ask(kind, "storm")
            await asyncio.sleep(PAUSE_SECONDS[kind])

    def _goes_on(self) -> bool:
        return self._asked < self._fewest or (self._asked < MOST_TIMES * self._fewest and not ENOUGH.exists())

    async def _ask(self, kind: str, phase: str) -> None:
        number = self._asked
        self._asked += 1
        seed = FIRST_SEED + number % DISTINCT
        began, first, text, ends, error = time.time(), 0.0, "", 0, ""
        try:
            stream = await self._client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": self._content(kind, seed, number)}],
                max_tokens=TEXT_TOKENS if kind == "text" else TOKENS,
                temperature=0,
                stream=True,
                extra_body={"ignore_eos": kind == "text"},
            )
            async for chunk in stream:
                for choice in chunk.choices:
                    if choice.delta.content:
                        first = first or time.time()
                        text += choice.delta.content
                    ends += choice.finish_reason is not None
        except Exception as trouble:  # noqa: BLE001 - whatever it is, the request is lost, and that is what is counted
            error = f"{type(trouble).__name__}: {trouble} {trouble.__cause__ or ''!r}"[:300]
        ended = time.time()
        facts = {"kind": kind, "seed": seed, "phase": phase, "began": began, "text": text, "ends": ends}
        seconds = {"ttft": first - began if first else None, "total": ended - began}
        print(json.dumps({**facts, **seconds, "error": error}), flush=True)

    def _content(self, kind: str, seed: int, number: int) -> Any:
        if kind == "text":
            return text_question(seed)
        sample = self._samples[kind, seed]  # type: ignore[index]
        data = as_another_file(sample.bytes, number) if kind == "video" else sample.bytes
        return [media_part(sample.kind, data, sample.mime), {"type": "text", "text": sample.question}]


def seeds() -> Iterator[int]:
    return iter(range(FIRST_SEED, FIRST_SEED + DISTINCT))


def text_question(seed: int) -> str:
    return f"Question {seed}: what color is the shape, and where is it?"


if __name__ == "__main__":
    asyncio.run(Storm(sys.argv[1], int(sys.argv[2])).run())
