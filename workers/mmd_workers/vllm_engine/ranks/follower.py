"""Process of a pod that follows its group's leader. It runs vLLM's ranks of this pod until the leader ends.

The ranks start when all pods of the group have joined. The process takes no requests, reports no load and
does not use NATS. Its only probe is liveness.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from mmd_api.contract.errors import EngineDeadError, EngineSettingsError, MmdError
from mmd_api.contract.logs import RELAYED
from mmd_api.contract.pools import PoolName, Role
from mmd_workers.basics.device import chosen_device
from mmd_workers.observe.metrics import Metrics
from mmd_workers.observe.server import HttpServer, Progress, listen_address, routes
from mmd_workers.process.closing import close_each, end_now
from mmd_workers.process.group import Follower
from mmd_workers.process.pod import LIVENESS_SECONDS, Pod
from mmd_workers.process.settings import WorkerSettings
from mmd_workers.vllm_engine.ranks.together import (
    SETTLE_SECONDS,
    MemberEndedError,
    StuckError,
    fetch_weights,
    join_seconds,
    until_ended,
)
from mmd_workers.vllm_engine.reasons import reason, weight
from mmd_workers.vllm_engine.setup.environment import prepare_environment

if TYPE_CHECKING:
    from vllm.v1.executor import Executor

log = logging.getLogger(__name__)

ROLE = "follower"
"""Name of this role in metrics."""
DELETION_SECONDS = 120.0
"""How long a pod waits to be deleted after its leader has ended without failure. If its container ended
earlier, that would count as a restart, for which LeaderWorkerSet recreates the group."""


class FollowerProcess:
    """Process of one follower."""

    def __init__(self, settings: WorkerSettings, pool: PoolName, roles: tuple[Role, ...]) -> None:
        self._settings = settings
        self._pod = Pod.of(settings, pool, roles, Metrics([ROLE]))
        self._link = Follower(settings)
        self._executor: Executor | None = None
        self._failed: asyncio.Future[str] | None = None  # reason why this pod's ranks have ended
        self._ended = asyncio.Event()  # the leader has ended
        self._stopped = asyncio.Event()  # this pod has been asked to stop

    async def serve(self) -> None:
        """Follow the leader until it ends; if it ends without failure, wait until this pod is asked to stop.

        Raises:
            MmdError: the group has failed, here or elsewhere; the message has the reason.
        """
        loop = asyncio.get_running_loop()
        self._failed = loop.create_future()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stopped.set)
        status = await self._start_status_server()
        why = ""
        try:
            await fetch_weights(self._pod)
            if await self._joined() and (why := await self._follow()):
                raise EngineDeadError(why)
            await self._until_deleted()
        except MmdError as error:
            why = error.message
            log.critical("this pod ends: %s", why)  # before its ranks, which may take long to end
            raise
        finally:
            await close_each(lambda: self._link.close(why), self._end_ranks, status.stop)

    async def _start_status_server(self) -> HttpServer:
        metrics, revision = self._pod.metrics, self._settings.pipeline.revision
        metrics.build.info({"version": version("multimodal-operator"), "revision": revision, "roles": ROLE})
        app = routes(metrics, self._progress, lambda: "a follower takes no requests", self._described)
        status = HttpServer.of_routes(app, listen_address(self._settings.pod_ip), self._settings.http_port)
        await status.start()
        return status

    def _progress(self) -> dict[str, Progress]:
        if self._ended.is_set():
            return {}
        return {"leader": Progress(lambda: self._link.silent_seconds, LIVENESS_SECONDS)}

    def _described(self) -> dict[str, Any]:
        group = self._settings.group
        assert group is not None
        return {
            "pod": self._settings.pod,
            "leader": group.leader,
            "rank": group.rank,
            "group_size": group.size,
        }

    async def _joined(self) -> bool:
        """Join the group. False: this pod or the leader has been asked to stop before all pods joined."""
        joining = asyncio.create_task(self._link.join(join_seconds(self._pod)), name="join")
        stopping = asyncio.create_task(self._stopped.wait(), name="stopping")
        await asyncio.wait({joining, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not joining.done():
            joining.cancel()
            await self._link.drain()
            return False
        if await joining:
            return True
        self._ended.set()
        return False

    async def _drain_when_stopped(self) -> None:
        """Ask the leader to drain when this pod is asked to stop.

        This pod computes for the leader, which drains first and then ends this pod.
        """
        await self._stopped.wait()
        log.info("asked to stop: the leader drains first")
        await self._link.drain()

    async def _until_deleted(self) -> None:
        await close_each(self._end_ranks)
        if self._stopped.is_set():
            return
        log.info("the leader of the group has ended; waiting to be deleted with it")
        with suppress(TimeoutError):
            async with asyncio.timeout(DELETION_SECONDS):
                await self._stopped.wait()

    async def _follow(self) -> str:
        """Compute until the leader or a rank of this pod ends. Returns the reason; empty if there is no failure.

        Raises:
            MmdError: this pod cannot start its ranks.
        """
        assert self._failed is not None
        leader = asyncio.create_task(self._link.ended(), name="leader")
        leader.add_done_callback(lambda _: self._ended.set())
        drain = asyncio.create_task(self._drain_when_stopped(), name="drain")
        leader.add_done_callback(lambda _: drain.cancel())
        making = asyncio.to_thread(self._make_ranks, self._rank_lost(asyncio.get_running_loop()))
        try:
            self._executor = await until_ended(making, self._ended)
        except MemberEndedError as error:
            why = _relayed(leader.result())
            if why and error.own is not None and weight(error.own.message) > weight(why):
                raise error.own from None
            return why
        except StuckError:
            why = _relayed(leader.result()) or "the leader ended, and a thread that starts vLLM did not"
            await close_each(lambda: self._link.close(why))
            end_now(why)
        except MmdError as error:
            if (why := await self._settled(error.message, leader)) == error.message:
                raise
            return why
        log.info("following %s", self._settings.group and self._settings.group.leader)
        await asyncio.wait({leader, self._failed}, return_when=asyncio.FIRST_COMPLETED)
        if self._failed.done():
            return await self._settled(self._failed.result(), leader)
        return _relayed(leader.result())

    async def _settled(self, own_reason: str, leader: asyncio.Task[str]) -> str:
        """Return why this pod has failed. The leader gets this pod's reason immediately.

        The failure may be a consequence of another one, which the leader is about to report.
        """
        await self._link.report(own_reason)
        if weight(own_reason) < 2:
            await asyncio.wait({leader}, timeout=SETTLE_SECONDS)
        if not leader.done():
            leader.cancel()
            return own_reason
        why = _relayed(leader.result())
        return why if weight(why) > weight(own_reason) else own_reason

    def _rank_lost(self, loop: asyncio.AbstractEventLoop) -> Callable[[str], object]:
        def fail(words: str) -> None:
            if self._failed is not None and not self._failed.done():
                self._failed.set_result(words)

        return lambda words: loop.call_soon_threadsafe(fail, words)

    def _make_ranks(self, lost: Callable[[str], object]) -> Executor:
        prepare_environment()
        pod = self._pod
        try:
            from mmd_workers.vllm_engine.setup.make import make_ranks

            return make_ranks(pod, chosen_device(self._settings.gpus, pod.pool), lost)
        except MmdError:
            raise
        except Exception as error:
            remedy = f"change spec.model or spec.engine.{pod.pool}"
            raise EngineSettingsError(f"vLLM cannot start: {reason(error)}; {remedy}") from error

    async def _end_ranks(self) -> None:
        if self._executor is not None:
            executor, self._executor = self._executor, None
            await asyncio.to_thread(executor.shutdown)


def _relayed(ended: str) -> str:
    """Return why the leader has ended, as this pod reports it; empty if there is no failure."""
    return f"the leader {RELAYED}{ended}" if ended else ""
