"""The process of a pod that follows the leader of its group: vLLM's ranks of this pod, from when all pods are there to the leader's end.

It takes no requests, reports no load and knows no NATS. Its probe is liveness.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

from mmd_api.contract.errors import EngineDeadError, EngineSettingsError, MmdError
from mmd_api.contract.pools import PoolName, Role
from mmd_workers.closing import close_each
from mmd_workers.device import chosen_device
from mmd_workers.group import Follower
from mmd_workers.observe.server import HttpServer, Progress, listen_address, routes
from mmd_workers.pod import LIVENESS_SECONDS, Pod
from mmd_workers.settings import WorkerSettings
from mmd_workers.vllm_engine.environment import prepare_environment
from mmd_workers.vllm_engine.reasons import reason

if TYPE_CHECKING:
    from vllm.v1.executor import Executor

log = logging.getLogger(__name__)

END_AGAIN_SECONDS = 0.2
T = TypeVar("T")


async def until_ended(work: Awaitable[T], ended: asyncio.Event) -> T:
    """What `work` returns, unless another pod of the group ends first. Ranks that are being started are ended then.

    Raises:
        EngineDeadError: another pod has ended.
    """
    doing, waiting = asyncio.ensure_future(work), asyncio.ensure_future(ended.wait())
    try:
        await asyncio.wait({doing, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if not ended.is_set():
            return await doing
        from mmd_workers.vllm_engine.ranks import end_all

        while not doing.done():  # no thread can be cancelled, and this one may not have started its ranks yet
            end_all()
            await asyncio.wait({doing}, timeout=END_AGAIN_SECONDS)
        doing.exception()  # that its ranks have ended is a consequence
        raise EngineDeadError("another pod of the group has ended")
    finally:
        waiting.cancel()


class FollowerProcess:
    """One follower's process."""

    def __init__(self, settings: WorkerSettings, pool: PoolName, roles: tuple[Role, ...]) -> None:
        self._settings = settings
        self._pod = Pod.of(settings, pool, roles)
        self._link = Follower(settings)
        self._executor: Executor | None = None
        self._failed: asyncio.Future[str] | None = None  # why this pod's ranks have ended
        self._ended = asyncio.Event()

    async def serve(self) -> None:
        """Follow until the leader ends.

        Raises:
            MmdError: the group has failed, here or elsewhere; the message has the reason.
        """
        loop = asyncio.get_running_loop()
        self._failed = loop.create_future()
        stopped = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stopped.set)
        status = await self._start_status_server()
        why = ""
        try:
            if not await self._joined(stopped):
                why = "it was asked to stop before all pods of the group were there"
                return
            drain = asyncio.create_task(self._drain_when(stopped), name="drain")
            why = await self._follow()
            drain.cancel()
        except MmdError as error:
            why = error.message
            raise
        finally:
            await close_each(lambda: self._link.close(why), self._end_ranks, status.stop)
        if why:
            raise EngineDeadError(why)
        log.info("the leader of the group has ended, and so does this pod")

    async def _start_status_server(self) -> HttpServer:
        app = routes(
            self._pod.metrics, self._progress, lambda: "a follower takes no requests", self._described
        )
        status = HttpServer.of_routes(app, listen_address(self._settings.pod_ip), self._settings.http_port)
        await status.start()
        return status

    def _progress(self) -> dict[str, Progress]:
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

    async def _joined(self, stopped: asyncio.Event) -> bool:
        joining = asyncio.create_task(self._link.join(), name="join")
        stopping = asyncio.create_task(stopped.wait(), name="stopping")
        await asyncio.wait({joining, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not joining.done():
            joining.cancel()
            return False
        await joining
        return True

    async def _drain_when(self, stopped: asyncio.Event) -> None:
        """This pod computes for the leader, which therefore drains first, and ends this pod when nothing is left."""
        await stopped.wait()
        log.info("asked to stop: the leader drains first")
        await self._link.drain()

    async def _follow(self) -> str:
        """Compute until the leader or a rank of this pod ends. Returns why; empty where all is well."""
        assert self._failed is not None
        leader = asyncio.create_task(self._link.ended(), name="leader")
        leader.add_done_callback(lambda _: self._ended.set())
        making = asyncio.to_thread(self._make_ranks, self._rank_lost(asyncio.get_running_loop()))
        try:
            self._executor = await until_ended(making, self._ended)
        except EngineDeadError:
            return self._words(await leader)
        log.info("following %s", self._settings.group and self._settings.group.leader)
        await asyncio.wait({leader, self._failed}, return_when=asyncio.FIRST_COMPLETED)
        return self._words(leader.result()) if leader.done() else self._failed.result()

    @staticmethod
    def _words(ended: str) -> str:
        return f"the leader of the group ended: {ended}" if ended else ""

    def _rank_lost(self, loop: asyncio.AbstractEventLoop) -> Callable[[str], object]:
        def fail(words: str) -> None:
            if self._failed is not None and not self._failed.done():
                self._failed.set_result(words)

        return lambda words: loop.call_soon_threadsafe(fail, words)

    def _make_ranks(self, lost: Callable[[str], object]) -> Executor:
        prepare_environment()
        pod = self._pod
        try:
            from mmd_workers.vllm_engine.make import make_ranks

            return make_ranks(pod, chosen_device(self._settings.gpus, pod.pool), lost)
        except MmdError:
            raise
        except Exception as error:
            remedy = f"change spec.model or spec.engine.{pod.pool}"
            raise EngineSettingsError(f"vLLM cannot start: {reason(error)}; {remedy}") from error

    async def _end_ranks(self) -> None:
        if self._executor is not None:
            await asyncio.to_thread(self._executor.shutdown)
