"""Keeps the daily tokens of limited tenants the same at all gateways, and across restarts. Independent of HTTP."""

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
    """Adds the tokens counted here to the records, and learns those of the other gateways. `tenants()`: the tenants in force."""

    def __init__(self, records: TokenRecords, tenants: Callable[[], Iterable[KnownTenant]]) -> None:
        self._records, self._tenants = records, tenants
        self._there = False

    async def run(self) -> None:
        """Exchange counts until cancelled. While the records cannot be reached, each gateway continues from its own knowledge."""
        limited = RateLimitedLog(_log)
        while True:
            try:
                await self.exchange()
            except MmdError as error:
                self._there = False
                limited.warning("tokens", error.message)
            except Exception as error:  # noqa: BLE001 - logged; it must not end the requests that the gateway serves
                limited.warning("tokens", f"recording tokens failed: {type(error).__name__}: {error}", error)
            await asyncio.sleep(PERIOD_SECONDS)

    async def exchange(self) -> None:
        """Exchange counts once for each tenant with a limit, even without requests here: it may have used its tokens elsewhere.

        Raises:
            PeerLostError: the records cannot be reached.
        """
        tenants = [account for account in self._tenants() if account.tenant.limits.tokens_per_day is not None]
        if not tenants:
            return
        if not self._there:
            await self._records.ensure()
            self._there = True
        for account in tenants:
            await self._exchange(account)

    async def _exchange(self, known: KnownTenant) -> None:
        """Exchange the counts of a tenant. A server that has lost its records gets back the counts known here."""
        tokens = known.usage.tokens
        day, record = tokens.day(), await self._records.read(tokens.day(), known.name)
        added, base = tokens.unrecorded(), max(record.total, tokens.recorded())
        if base + added == record.total:
            tokens.record(day, record.total, 0)
        elif await self._records.write(day, known.name, base + added, record):
            tokens.record(day, base + added, added)
