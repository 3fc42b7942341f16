"""Client that fetches reports from pods over HTTP, each within a deadline and a size limit. Independent of their meaning."""

from __future__ import annotations

import ipaddress

import aiohttp

TIMEOUT_SECONDS = 2.0
MAX_CONNECTIONS = 128


class NoAnswerError(Exception):
    """The pod did not answer in time, or answered with a status other than 200."""


class ReportFetcher:
    """Connections to pods, shared by all deployments."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def get(self, address: str, port: int, path: str, max_bytes: int) -> bytes:
        """Fetch the body of an answer, at most one byte more than `max_bytes`.

        Raises:
            NoAnswerError: see the class.
        """
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=MAX_CONNECTIONS),
                timeout=aiohttp.ClientTimeout(total=TIMEOUT_SECONDS),
            )
        host = f"[{address}]" if ipaddress.ip_address(address).version == 6 else address
        try:
            async with self._session.get(f"http://{host}:{port}{path}", allow_redirects=False) as answer:
                if answer.status != 200:
                    raise NoAnswerError(f"answers {answer.status}")
                return await _at_most(answer.content, max_bytes + 1)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise NoAnswerError(type(error).__name__) from error

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()


async def _at_most(content: aiohttp.StreamReader, size: int) -> bytes:
    body = b""
    while len(body) < size and (piece := await content.read(size - len(body))):
        body += piece
    return body
