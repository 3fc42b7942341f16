"""Open-loop load: requests that do not wait for earlier answers, with real files, streamed answers, times to the first token.

Times count from the moment at which a request was due, so that a client that falls behind cannot hide a slow server. `keep_busy` is the one
closed loop: a load beside which another is measured.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import httpx
import numpy as np

from mmd_api.contract.pools import Modality
from mmd_cli import samples
from mmd_cli.client import media_part

Kind = Modality | Literal["text", "companion"]
"""A companion is a text that is there for its load and not for its times."""
WORDS = ("red", "green", "blue", "circle", "square", "triangle", "left", "right", "up", "down", "high", "low", "tone", "video")  # fmt: skip
LATE_SECONDS = 60.0
REFUSED_SECONDS = 0.5


@dataclass(frozen=True)
class Ask:
    """One request: due `at` seconds after the start; `body` is the JSON to post."""

    at: float
    kind: Kind
    body: bytes


@dataclass(frozen=True)
class Answered:
    """What came back. `ttft_seconds` is None where nothing did; `error` says why."""

    at: float
    kind: Kind
    request_id: str
    ttft_seconds: float | None
    error: str = ""


def ask(
    kind: Kind,
    at: float,
    seed: int,
    words: int,
    tokens: int,
    *,
    media: int = 1,
    model: str = "builtin/demo",
    text_first: bool = False,
) -> Ask:
    """Fresh files (no cache knows them), and a text with its own beginning, behind them or before."""
    rng = np.random.default_rng([seed, 7])
    text = f"{seed} " + " ".join(rng.choice(WORDS, words)) + " What is it?"
    parts: list[dict[str, Any]] = []
    if kind not in ("text", "companion"):
        for number in range(media):
            sample = samples.draw(kind, media * seed + number)
            parts.append(media_part(kind, sample.bytes, sample.mime))
    words_part = {"type": "text", "text": text}
    return asked(kind, at, [words_part, *parts] if text_first else [*parts, words_part], tokens, model)


def asked(
    kind: Kind, at: float, content: list[dict[str, Any]], tokens: int, model: str = "builtin/demo"
) -> Ask:
    """One message, answered by exactly so many tokens."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
    }
    return Ask(at, kind, json.dumps(body).encode())


def mixed(rate: float, seconds: float, seed: int, shares: dict[Kind, float]) -> list[Ask]:
    """Poisson arrivals of `rate` requests a second; kinds by their shares, lengths log-normal."""
    rng = np.random.default_rng(seed)
    times = arrivals(rate, seconds, rng)
    kinds: list[Kind] = list(shares)
    chosen = rng.choice(len(kinds), len(times), p=list(shares.values()))
    words = np.clip(rng.lognormal(3.4, 0.7, len(times)), 4, 150).astype(int)
    tokens = np.clip(rng.lognormal(2.8, 0.5, len(times)), 2, 64).astype(int)
    return [
        ask(kinds[kind], at, 1_000_000 * seed + number, int(words[number]), int(tokens[number]))
        for number, (at, kind) in enumerate(zip(times, chosen, strict=True))
    ]


def arrivals(rate: float, seconds: float, rng: np.random.Generator) -> list[float]:
    """Poisson arrivals of `rate` a second, in order."""
    return [float(at) for at in np.sort(rng.random(rng.poisson(rate * seconds)) * seconds)]


async def drive(
    url: str,
    asks: list[Ask],
    key: str = "",
    on_answer: Callable[[Answered], None] = lambda _: None,
    on_ask: Callable[[], None] = lambda: None,
) -> list[Answered]:
    """Post each request when it is due; returns when all are answered, in the order they were given. `key`: the API key, where one is needed.
    `on_ask`: is called as one is posted.
    """
    limits = httpx.Limits(max_connections=1000, max_keepalive_connections=1000)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(
        base_url=url, timeout=LATE_SECONDS, limits=limits, headers=headers
    ) as client:
        begin = time.perf_counter() + 0.2

        async def one(asked: Ask) -> Answered:
            answered = await _one(client, asked, begin, on_ask)
            on_answer(answered)
            return answered

        return list(await asyncio.gather(*map(one, asks)))


async def keep_busy(
    url: str,
    asks: Iterable[Ask],
    clients: int,
    key: str,
    on_answer: Callable[[Answered], None],
    on_ask: Callable[[], None],
) -> None:
    """So many clients, each of which posts the next request as soon as it has an answer, or a moment after it was refused. They are busy as long
    as there are `asks`.
    """
    limits = httpx.Limits(max_connections=clients, max_keepalive_connections=clients)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    left = iter(asks)
    async with httpx.AsyncClient(
        base_url=url, timeout=LATE_SECONDS, limits=limits, headers=headers
    ) as client:

        async def one_after_the_other() -> None:
            for asked in left:
                answered = await _one(client, replace(asked, at=0.0), time.perf_counter(), on_ask)
                on_answer(answered)
                if answered.error:
                    await asyncio.sleep(REFUSED_SECONDS)

        await asyncio.gather(*(one_after_the_other() for _ in range(clients)))


async def _one(client: httpx.AsyncClient, asked: Ask, begin: float, on_ask: Callable[[], None]) -> Answered:
    due = begin + asked.at
    await asyncio.sleep(max(0.0, due - time.perf_counter()))
    on_ask()
    first, name = None, ""
    headers = {"content-type": "application/json"}
    try:
        async with client.stream("POST", "/v1/chat/completions", content=asked.body, headers=headers) as got:
            name = got.headers.get("x-request-id", "")
            async for data in got.aiter_bytes():
                if first is None and b'"content"' in data:
                    first = time.perf_counter() - due
                if b'"error"' in data or got.status_code != 200:
                    return Answered(asked.at, asked.kind, name, None, data[:300].decode(errors="replace"))
    except httpx.HTTPError as error:
        return Answered(asked.at, asked.kind, name, None, repr(error))
    return Answered(asked.at, asked.kind, name, first, "" if first is not None else "no token came")
