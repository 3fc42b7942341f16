"""Watches a process's connection to the message server: is it there, how long is the way, what got lost. Knows no message."""

from __future__ import annotations

import asyncio
import time

from mmd_workers.errors import MmdError
from mmd_workers.observe.metrics import Metrics
from mmd_workers.wire.bus import Bus

PERIOD_SECONDS = 1.0
ROUND_TRIP_SECONDS = 5.0  # a server that is slower than that counts with this time


async def watch(bus: Bus, metrics: Metrics) -> None:
    """Feed the metrics of the connection until cancelled."""

    async def reconnected() -> None:
        metrics.nats_reconnects.inc()

    bus.on_reconnect(reconnected)
    known = dict.fromkeys(("malformed", "dropped", "handler"), 0)
    while True:
        metrics.nats_connected.set(bus.is_connected)
        if bus.is_connected:
            begun = time.monotonic()
            try:
                await bus.flush(ROUND_TRIP_SECONDS)
                metrics.nats_round_trip.observe(time.monotonic() - begun)
            except MmdError:
                metrics.nats_round_trip.observe(ROUND_TRIP_SECONDS)
        now = {"malformed": bus.bad_messages, "dropped": bus.dropped_messages, "handler": bus.handler_errors}
        for reason, count in now.items():
            metrics.nats_lost.labels(reason).inc(count - known[reason])
        known = now
        await asyncio.sleep(PERIOD_SECONDS)
