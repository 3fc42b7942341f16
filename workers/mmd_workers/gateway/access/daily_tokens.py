"""Keeps the day's tokens of tenants with a limit on them the same at all gateways, and over restarts. Independent of HTTP."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from mmd_api.contract.errors import MmdError
from mmd_workers.basics.limited_log import RateLimitedLog
from mmd_workers.gateway.access.keys import KnownTenant
from mmd_workers.wire.tenant_tokens import TokenRecords

PERIOD_SECONDS = 1.0

_log = logging.getLogger(__name__)


class DailyTokens:
    """Adds what this gateway has counted to the records, and learns what the others have. `tenants()`: those in force."""

    def __init__(self, records: TokenRecords, tenants: Callable[[], Iterable[KnownTenant]]) -> None:
        self._records, self._tenants = records, tenants
        self._there = False

    async def run(self) -> None:
        """Until cancelled. While the records cannot be reached, each gateway goes on from what it knows."""
        limited = RateLimitedLog(_log)
        while True:
            try:
                await self.exchange()
            except MmdError as error:
                self._there = False
                limited.warning("tokens", error.message)
            except Exception as error:  # noqa: BLE001 - logged; no reason to end the requests that the gateway serves
                limited.warning("tokens", f"recording tokens failed: {type(error).__name__}: {error}", error)
            await asyncio.sleep(PERIOD_SECONDS)

    async def exchange(self) -> None:
        """Once for each tenant with a limit, whether or not it has sent requests here: it may have spent its day elsewhere.

        Raises:
            PeerLostError: the records cannot be reached.
        """
        limited = [known for known in self._tenants() if known.tenant.limits.tokens_per_day is not None]
        if not limited:
            return
        if not self._there:
            await self._records.ensure()
            self._there = True
        for known in limited:
            await self._exchange(known)

    async def _exchange(self, known: KnownTenant) -> None:
        """A server that has lost its records gets back what this gateway knows of them."""
        tokens = known.usage.tokens
        day, read = tokens.day(), await self._records.read(tokens.day(), known.name)
        added, base = tokens.unrecorded(), max(read.total, tokens.recorded())
        if base + added == read.total:
            tokens.record(day, read.total, 0)
        elif await self._records.write(day, known.name, base + added, read):
            tokens.record(day, base + added, added)
