"""Watches a process's connection to the message server: availability, round trip time, losses. Independent of messages."""

from __future__ import annotations

import asyncio
import logging
import time

from mmd_api.contract.errors import MmdError
from mmd_workers.basics.limited_log import RateLimitedLog
from mmd_workers.observe.metrics import Metrics
from mmd_workers.wire.bus import Bus

PERIOD_SECONDS = 1.0
ROUND_TRIP_SECONDS = 5.0  # the time recorded for a slower server

_log = logging.getLogger(__name__)


async def watch(bus: Bus, metrics: Metrics) -> None:
    """Feed the metrics of the connection until cancelled."""

    async def reconnected() -> None:
        metrics.nats_reconnects.inc()

    bus.on_reconnect(reconnected)
    limited = RateLimitedLog(_log)
    previous = dict.fromkeys(("malformed", "dropped", "handler"), 0)
    while True:
        metrics.nats_connected.set(bus.is_connected)
        if bus.is_connected:
            start = time.monotonic()
            try:
                await bus.flush(ROUND_TRIP_SECONDS)
                metrics.nats_round_trip.observe(time.monotonic() - start)
            except MmdError:
                metrics.nats_round_trip.observe(ROUND_TRIP_SECONDS)
            except Exception as error:  # noqa: BLE001 - a missing measurement must not end the process
                message = f"failed to measure the round trip to NATS: {type(error).__name__}: {error}"
                limited.warning("round trip", message, error)
        counts = {
            "malformed": bus.bad_messages,
            "dropped": bus.dropped_messages,
            "handler": bus.handler_errors,
        }
        for reason, count in counts.items():
            metrics.nats_lost.labels(reason).inc(count - previous[reason])
        previous = counts
        await asyncio.sleep(PERIOD_SECONDS)
