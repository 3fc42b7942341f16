"""What the leader and the followers of a group do alike: fetch weights before they join, and end soon after another pod has ended."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Awaitable
from typing import TypeVar

from mmd_api.contract.errors import MmdError
from mmd_workers.model import source
from mmd_workers.process.pod import Pod
from mmd_workers.vllm_engine.reasons import weight

LEAST_JOIN_SECONDS = 60.0
OWN_FAILURE_SECONDS = 5.0
"""How long a pod may take to fail by itself when another one has: the same fault may be about to show here, with its reason."""
END_AGAIN_SECONDS = 0.2
END_SECONDS = 10.0
SETTLE_SECONDS = OWN_FAILURE_SECONDS + 2.0
"""How long a failure that may be a consequence waits for the reason of another pod, which may wait for its own failure first."""
T = TypeVar("T")


class MemberEndedError(Exception):
    """Another pod of the group has ended. `own`: how this one failed before it was ended, if it did."""

    def __init__(self, own: MmdError | None) -> None:
        super().__init__("another pod of the group has ended")
        self.own = own


class StuckError(Exception):
    """Another pod of the group has ended, and a thread of this one cannot be."""


def join_seconds(pod: Pod) -> float:
    """How long a pod waits for the others of its group. At least a minute: a deadline of the spec may be 0, to be told early."""
    return max(pod.kv_spec.start_deadline_seconds, LEAST_JOIN_SECONDS)


async def fetch_weights(pod: Pod) -> None:
    """Bring what the ranks load to this pod. Before it joins: how long it takes differs from pod to pod, and ranks wait for one another
    no longer than a rendezvous of NCCL lasts.

    Raises:
        UnsupportedModelError: the model or an adapter is not there.
    """
    await asyncio.to_thread(source.resolve, pod.spec.model, weights=True)
    for adapter in pod.spec.engine.adapters:
        await asyncio.to_thread(source.resolve_adapter, adapter, weights=True)


async def until_ended(work: Awaitable[T], ended: asyncio.Event) -> T:
    """What `work`, which starts ranks in a thread, returns, unless another pod of the group ends first: these ranks are ended then.

    Raises:
        MemberEndedError: another pod has ended.
        StuckError: another pod has ended, and the thread has not 10 s later.
    """
    doing, waiting = asyncio.ensure_future(work), asyncio.ensure_future(ended.wait())
    try:
        await asyncio.wait({doing, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            return await doing
        await asyncio.wait({doing}, timeout=OWN_FAILURE_SECONDS)
        alone = doing.done()
        if not alone:
            await _end_ranks(doing)
        error = doing.exception()
        # What it raises after its ranks were ended is a consequence, unless one of them had left a reason.
        known = isinstance(error, MmdError) and (alone or weight(error.message) > 1)
        raise MemberEndedError(error if known and isinstance(error, MmdError) else None)
    finally:
        waiting.cancel()


async def _end_ranks(starting: asyncio.Future[T]) -> None:
    deadline = time.monotonic() + END_SECONDS
    while not starting.done():  # no thread can be cancelled, and this one may not have started its ranks yet
        if time.monotonic() > deadline:
            raise StuckError
        for (
            rank
        ) in multiprocessing.active_children():  # which would wait for those of other pods for many minutes
            rank.kill()
        await asyncio.wait({starting}, timeout=END_AGAIN_SECONDS)
