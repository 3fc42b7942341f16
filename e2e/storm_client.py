"""Runs in a pod: first text alone, then a storm of videos with images, audio, text and documents, against the gateway at argv[1].

Argument 2 is the smallest number of questions; more follow until the file `ENOUGH` exists. Argument 3: streams of minutes that run
throughout.
Prints one JSON line before each request is sent and one when it has ended, however it ended, and a last line with the number of
questions: a log that was cut off cannot hide a loss. A request is sent again only if its connection broke;
the reader of the log decides whether that was excusable.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai

from mmd_api.contract.pools import Modality
from mmd_cli.client import media_part
from mmd_cli.samples import as_another_file, draw

DISTINCT = 24  # files of each kind; a video is another file each time, with the same frames
FIRST_SEED = 70_000
CALM_SECONDS = 15.0
TEXT_PAUSE_SECONDS = 0.3
TEXTS_AT_ONCE = 16
PAUSE_SECONDS = {"video": 1.5, "image": 0.5, "audio": 0.5, "document": 1.0}
"""Pause after an answer: if answers kept all cores busy, starting pods would have none."""
ASKERS = {"video": 12, "image": 2, "audio": 1, "document": 3}
"""How many ask each kind. Documents are what the prefill pool grows for: texts of which its pods keep too few to remember them all."""
MODALITIES: tuple[Modality, ...] = ("video", "image", "audio")
MAX_TOKENS = {"long": 3900, "text": 64, "document": 12, "image": 12, "video": 12, "audio": 12}
DOCUMENT_PARTS = 64  # about 1,900 tokens
TO_THE_END = ("text", "long")
"""Kinds that ignore the model's end token, so that their number of tokens is known."""
ENOUGH = Path("/tmp/enough")
MOST_TIMES = 5  # the smallest number: more are not asked, whatever does not exist
MOST_ATTEMPTS = 90  # with the pause between them: longer than kubelet backs off before it restarts a gateway
RETRY_SECONDS = 1.0
LONG_TOKENS_PER_SECOND = 20.0
"""The pace at which long answers are read, so that their streams last more than three minutes however fast the machine is; those that are
left when there is nothing more to ask are read as fast as they come.
"""
RECEIVE_BUFFER_BYTES = 4096
"""Of connections whose answers are read at a pace: with the default, a node keeps minutes of a stream whose gateway has died."""
TIMEOUT_SECONDS = 620.0
SILENCE_SECONDS = 60.0
"""After which an answer that is read at a pace is broken off: its gateway would have sent a comment every 10 s. Nothing else tells of a
pod whose network has gone before all that it sent was read."""


class Storm:
    """Askers of each kind, one question after the other each; text at a steady pace while few of its answers are late."""

    def __init__(self, url: str, questions: int, long_streams: int) -> None:
        options: dict[str, Any] = {"base_url": f"{url}/v1", "api_key": "none", "max_retries": 0}
        self._client = openai.AsyncOpenAI(**options, timeout=TIMEOUT_SECONDS)
        small = [(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)]
        transport = httpx.AsyncHTTPTransport(socket_options=small)
        paced = httpx.AsyncClient(transport=transport)
        patience = httpx.Timeout(TIMEOUT_SECONDS, read=SILENCE_SECONDS)
        self._paced_client = openai.AsyncOpenAI(**options, timeout=patience, http_client=paced)
        self._fewest, self._asked = questions, 0
        self._long_streams, self._long_answers = long_streams, 0
        self._samples = {(kind, seed): draw(kind, seed) for kind in MODALITIES for seed in seeds()}

    async def run(self) -> None:
        model = (await self._client.models.list()).data[0].id
        self._model = model
        calm = time.monotonic() + CALM_SECONDS
        texts: set[asyncio.Task[None]] = set()
        askers = [asyncio.create_task(self._keep_asking("long", 0.0)) for _ in range(self._long_streams)]
        while self._goes_on():
            texts = {text for text in texts if not text.done()}
            storming = len(askers) > self._long_streams
            if len(texts) < TEXTS_AT_ONCE:
                texts.add(asyncio.create_task(self._ask("text", "storm" if storming else "calm")))
            await asyncio.sleep(TEXT_PAUSE_SECONDS)
            if not storming and time.monotonic() > calm:
                report(storm_begins=time.time())
                askers += [
                    asyncio.create_task(self._keep_asking(kind, PAUSE_SECONDS[kind]))
                    for kind, count in ASKERS.items()
                    for _ in range(count)
                ]
        await asyncio.gather(*texts, *askers)
        report(questions=self._asked)

    async def _keep_asking(self, kind: str, pause_seconds: float) -> None:
        while self._goes_on():
            await self._ask(kind, "storm")
            await asyncio.sleep(pause_seconds)

    def _goes_on(self) -> bool:
        return self._asked < self._fewest or (self._asked < MOST_TIMES * self._fewest and not ENOUGH.exists())

    async def _ask(self, kind: str, phase: str) -> None:
        number = self._asked
        self._asked += 1
        question = {
            "question": number,
            "kind": kind,
            "seed": FIRST_SEED if kind == "long" else FIRST_SEED + number % DISTINCT,
            "phase": phase,
        }
        for attempt in range(MOST_ATTEMPTS):
            report(**question, attempt=attempt, sent=time.time())
            if not await self._send(question, attempt):
                return
            await asyncio.sleep(RETRY_SECONDS)

    async def _send(self, question: dict[str, Any], attempt: int) -> bool:
        """One request; True if its connection broke."""
        kind, number = question["kind"], question["question"]
        began, first, text, tokens, ends = time.time(), 0.0, "", [], 0
        error, broken, silent, gateway = "", False, False, ""
        try:
            client = self._paced_client if kind == "long" else self._client
            stream = await client.chat.completions.create(
                model=self._model,
                messages=[{"role": "user", "content": self._content(kind, question["seed"], number)}],
                max_tokens=MAX_TOKENS[kind],
                temperature=0,
                stream=True,
                extra_body={"ignore_eos": kind in TO_THE_END, "return_token_ids": True},
            )
            gateway = stream.response.headers.get("x-mmd-gateway", "")
            async for chunk in stream:
                for choice in chunk.choices:
                    if choice.delta.content:
                        first = first or time.time()
                        text += choice.delta.content
                    tokens += getattr(choice, "token_ids", None) or []
                    ends += choice.finish_reason is not None
                if kind == "long" and (self._goes_on() or self._long_answers < self._long_streams):
                    await asyncio.sleep(began + len(tokens) / LONG_TOKENS_PER_SECOND - time.time())
        except Exception as trouble:  # noqa: BLE001 - whatever it is, it is counted
            error = _described(trouble)
            silent = kind == "long" and isinstance(trouble, openai.APITimeoutError)
            broken = silent or _connection_broke(trouble)
        ended = time.time()
        self._long_answers += kind == "long" and not error
        report(
            **question,
            attempt=attempt,
            began=began,
            ended=ended,
            ttft=first - began if first else None,
            text=text,
            tokens=tokens,
            ends=ends,
            error=error,
            broken=broken,
            silent=silent,
            gateway=gateway,
        )
        return broken

    def _content(self, kind: str, seed: int, number: int) -> Any:
        if kind not in MODALITIES:
            return text_question(kind, seed)
        sample = self._samples[kind, seed]
        data = as_another_file(sample.bytes, number) if kind == "video" else sample.bytes
        return [media_part(sample.kind, data, sample.mime), {"type": "text", "text": sample.question}]


def _described(trouble: BaseException) -> str:
    """The error with its cause, and the headers of the answer: where no gateway gave it, they are all that tells who did."""
    words = f"{type(trouble).__name__}: {trouble} {trouble.__cause__ or ''!r}"[:300]
    if isinstance(trouble, openai.APIStatusError):
        words += f", headers {dict(trouble.response.headers)}"[:300]
    return words


def _connection_broke(trouble: BaseException) -> bool:
    """The peer is gone; neither an answer with an error nor a timeout."""
    return isinstance(trouble, openai.APIConnectionError) and not isinstance(trouble, openai.APITimeoutError)


def seeds() -> Iterator[int]:
    return iter(range(FIRST_SEED, FIRST_SEED + DISTINCT))


def text_question(kind: str, seed: int) -> str:
    question = f"Question {seed}: what color is the shape, and where is it?"
    return " ".join([question] * DOCUMENT_PARTS) if kind == "document" else question


def report(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    asyncio.run(Storm(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])).run())
