"""Common to the leader and the followers of a group: they fetch weights before they join, and end soon after
another pod has ended."""

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
"""After another pod has failed, a pod has this long to fail by itself: the same fault may soon show here,
with its reason."""
END_AGAIN_SECONDS = 0.2
END_SECONDS = 10.0
SETTLE_SECONDS = OWN_FAILURE_SECONDS + 2.0
"""A failure that may be a consequence waits this long for another pod's reason. That pod may wait for its own
failure first."""
T = TypeVar("T")


class MemberEndedError(Exception):
    """Another pod of the group has ended. `own`: this pod's failure before it was ended, if there was one."""

    def __init__(self, own: MmdError | None) -> None:
        super().__init__("another pod of the group has ended")
        self.own = own


class StuckError(Exception):
    """Another pod of the group has ended, and a thread of this pod cannot be ended."""


def join_seconds(pod: Pod) -> float:
    """Return how long a pod waits for the others of its group.

    At least a minute: a deadline in the spec may be 0, for early reports.
    """
    return max(pod.kv_spec.start_deadline_seconds, LEAST_JOIN_SECONDS)


async def fetch_weights(pod: Pod) -> None:
    """Fetch the model and the adapters that the ranks load.

    A pod does this before it joins. The time differs from pod to pod, and ranks wait for one another no
    longer than a rendezvous of NCCL lasts.

    Raises:
        UnsupportedModelError: the model or an adapter is not available.
    """
    await asyncio.to_thread(source.resolve, pod.spec.model, weights=True)
    for adapter in pod.spec.engine.adapters:
        await asyncio.to_thread(source.resolve_adapter, adapter, weights=True)


async def until_ended(work: Awaitable[T], ended: asyncio.Event) -> T:
    """Return the result of `work`, which starts ranks in a thread. If another pod of the group ends first,
    these ranks are ended.

    Raises:
        MemberEndedError: another pod has ended.
        StuckError: another pod has ended, and 10 s later the thread has not.
    """
    work_future, end_future = asyncio.ensure_future(work), asyncio.ensure_future(ended.wait())
    try:
        await asyncio.wait({work_future, end_future}, return_when=asyncio.FIRST_COMPLETED)
        if work_future.done():
            return await work_future
        await asyncio.wait({work_future}, timeout=OWN_FAILURE_SECONDS)
        failed_by_itself = work_future.done()
        if not failed_by_itself:
            await _end_ranks(work_future)
        error = work_future.exception()
        # An error after its ranks were ended is a consequence, unless one of them had left a reason.
        explained = isinstance(error, MmdError) and (failed_by_itself or weight(error.message) > 1)
        raise MemberEndedError(error if explained and isinstance(error, MmdError) else None)
    finally:
        end_future.cancel()


async def _end_ranks(starting: asyncio.Future[T]) -> None:
    deadline = time.monotonic() + END_SECONDS
    while not starting.done():  # no thread can be cancelled, and this one may not have started its ranks yet
        if time.monotonic() > deadline:
            raise StuckError
        for rank in multiprocessing.active_children():
            rank.kill()  # it would wait for ranks of other pods for many minutes
        await asyncio.wait({starting}, timeout=END_AGAIN_SECONDS)
