"""Renders and encodes texts in threads, long ones one at a time, and counts their memory. Independent of what a text says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from mmd_workers.gateway.basics.media_hold import RequestReservation

LONG_TEXT_CHARACTERS = 16_384
ENCODING_BYTES = 600  # maximum memory per character until the tokenizer has the ids
RENDERING_BYTES = 16  # maximum memory per character while a template renders

_Made = TypeVar("_Made")


class TextThreads:
    """Threads for the texts of all requests of a gateway."""

    def __init__(self) -> None:
        self._long_turn = asyncio.Lock()
        self._long_texts = ThreadPoolExecutor(1, "long-text")  # may still encode for a request that has ended

    async def encoded(
        self,
        encode: Callable[[], _Made],
        characters: int,
        reservation: RequestReservation,
        character_bytes: int = ENCODING_BYTES,
    ) -> _Made:
        """Call `encode`, for a text of so many characters, in a thread.

        Long texts are encoded one at a time, so that short ones never wait for them. Their memory is counted, up to half of what the request may
        still hold. While they wait for their turn, they hold only their present memory.
        """
        if characters <= LONG_TEXT_CHARACTERS:
            return await asyncio.to_thread(encode)
        async with self._long_turn:
            initial_bytes = reservation.num_bytes
            await reservation.grow(min(characters * character_bytes, reservation.room_bytes // 2))
            try:
                return await asyncio.get_running_loop().run_in_executor(self._long_texts, encode)
            finally:
                reservation.shrink(initial_bytes)
