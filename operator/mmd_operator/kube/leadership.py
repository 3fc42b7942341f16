"""Leader election: one operator acts at a time, under a Lease that it holds, renews and gives back. Independent of deployments.

The rules are those of client-go's leaderelection: another process's lease counts as held until this process has seen it unchanged
for its whole duration, on its own clock. The clocks of machines need not agree. The client library's own election is not used: its lock
cannot be created (it passes a boolean as `pretty`, which its generated API rejects), and one lost connection ends the election.

Each release of the chart has its own Lease. Operators of earlier releases all used `DEFAULT_LEASE_NAME`, whatever their release was called,
so an operator with another Lease does not lead while one of them may: see `EarlierOperator`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from kubernetes.aio.client import ApiClient
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.dynamic import DynamicClient

from mmd_operator.kube.cluster import UNREACHABLE, counted
from mmd_operator.kube.metrics import OperatorMetrics
from mmd_operator.kube.pauses import Pauses

logger = logging.getLogger(__name__)

DEFAULT_LEASE_NAME = "multimodal-operator"
IDENTITY_PARTS = 4
"""Host, process, a random number, and the name of the Lease, joined with `_`."""
LEASE_SECONDS = 15
SAFE_SECONDS = 10.0
"""This process stops acting after this long without a renewal, well before another may begin."""
CALL_SECONDS = 4.0
_FAILED_CALL = (ApiException, *UNREACHABLE)


class NotLeaderError(RuntimeError):
    """This process may not write: it does not hold the lease, or another process may have acquired it."""


class Leadership:
    """The Lease `name` of this operator in a namespace."""

    def __init__(
        self, api: ApiClient, namespace: str, name: str, metrics: OperatorMetrics, pauses: Pauses
    ) -> None:
        self.identity = f"{socket.gethostname()}_{os.getpid()}_{uuid4().hex[:8]}_{name}"
        self._name, self._earlier, self._waits = name, EarlierOperator(), False
        self._dynamic = DynamicClient(api)
        self._metrics, self._pauses = metrics, pauses
        self._collection = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._renewed: float | None = None
        self._last_attempt = time.monotonic()
        # version of another process's lease, and when it was first seen
        self._foreign_lease: tuple[str, float] = ("", 0.0)

    @property
    def held(self) -> bool:
        """Whether the lease was renewed so recently that no other replica can have acquired it."""
        return self._renewed is not None and time.monotonic() - self._renewed < SAFE_SECONDS

    def fence(self) -> None:
        """Check that the lease is held; called before every write.

        Raises:
            NotLeaderError: the lease is not held; a process that slept too long finds out here.
        """
        if not self.held:
            raise NotLeaderError(f"{self.identity} does not hold the lease {self._name}; stopping")

    @property
    def quiet_seconds(self) -> float:
        """Time since the last attempt to take or renew the lease; it grows in a hung process."""
        return time.monotonic() - self._last_attempt

    async def lead(self, work: Callable[[], Awaitable[None]]) -> None:
        """Wait for the lease, then run `work` until it ends; it is cancelled if the lease is lost.

        Raises:
            NotLeaderError: the lease was lost.
        """
        while not await self._try():
            await asyncio.sleep(self._pauses.lease_seconds)
        logger.info("%s is the leader", self.identity)
        task = asyncio.ensure_future(work())
        try:
            while self.held:
                done, _ = await asyncio.wait({task}, timeout=self._pauses.lease_seconds)
                if done:
                    return await task
                await self._try()
            raise NotLeaderError(
                f"the lease {self._name} was lost; exiting so that another replica can take over"
            )
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            if self.held:
                await self._give_back()

    async def _try(self) -> bool:
        """Take or renew the lease, if that is allowed now."""
        self._last_attempt = started = time.monotonic()
        try:
            async with asyncio.timeout(CALL_SECONDS):
                taken = await self._take(started)
        except _FAILED_CALL as error:
            if not (isinstance(error, ApiException) and error.status == 409):  # another process was faster
                logger.warning("failed to write the lease: %s", str(error) or repr(error))
            return False
        if taken:
            self._renewed = started
        return taken

    async def _take(self, now: float) -> bool:
        if self._name != DEFAULT_LEASE_NAME:
            shared = await self._read(DEFAULT_LEASE_NAME)
            if self._earlier.may_act(shared, now, leading=self._renewed is not None):
                if not self._waits:
                    logger.warning(
                        "waiting while an operator of an earlier release may hold the lease %s",
                        DEFAULT_LEASE_NAME,
                    )
                self._waits, self._renewed = True, None
                return False
            self._waits = False
        lease = await self._read(self._name)
        if lease is None:
            await self._write("post", self._collection, {"metadata": {"name": self._name}}, transitions=0)
            return True
        spec, version = lease.get("spec", {}), lease["metadata"]["resourceVersion"]
        holder, transitions = spec.get("holderIdentity"), spec.get("leaseTransitions", 0)
        if holder not in (self.identity, None, ""):
            self._renewed = None
            if self._foreign_lease[0] != version:
                self._foreign_lease = (version, now)
            if now - self._foreign_lease[1] < spec.get("leaseDurationSeconds", LEASE_SECONDS):
                return False
        path = f"{self._collection}/{self._name}"
        transitions += holder != self.identity
        await self._write(
            "put", path, {"metadata": lease["metadata"]}, transitions, spec if holder == self.identity else {}
        )
        return True

    async def _read(self, name: str) -> dict[str, Any] | None:
        try:
            return await self._call("get", f"{self._collection}/{name}")
        except ApiException as error:
            if error.status == 404:
                return None
            raise

    async def _call(self, verb: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        with counted(self._metrics, verb):
            response = await self._dynamic.request(verb, path, body=body, serialize=False)
            answer: dict[str, Any] = await response.json()
        return answer

    async def _write(
        self,
        method: str,
        path: str,
        body: dict[str, Any],
        transitions: int,
        previous_spec: dict[str, Any] | None = None,
    ) -> None:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = {
            "holderIdentity": self.identity,
            "leaseDurationSeconds": LEASE_SECONDS,
            "acquireTime": (previous_spec or {}).get("acquireTime", now),
            "renewTime": now,
            "leaseTransitions": transitions,
        }
        lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", **body, "spec": spec}
        await self._call(method, path, lease)

    async def _give_back(self) -> None:
        """Release the lease, so that the next leader need not wait for it to expire."""
        self._renewed = None
        try:
            async with asyncio.timeout(CALL_SECONDS):
                lease = await self._read(self._name)
                if lease is not None and lease.get("spec", {}).get("holderIdentity") == self.identity:
                    lease["spec"]["holderIdentity"] = None
                    path = f"{self._collection}/{self._name}"
                    await self._call("put", path, lease)
        except _FAILED_CALL as error:
            logger.warning("failed to release the lease; it expires in %d s: %s", LEASE_SECONDS, error)


class EarlierOperator:
    """Whether an operator of an earlier release of the chart may act: it shared one Lease with all installations in its namespace.

    It leads while it holds that Lease, and its standby takes the Lease within seconds once it is free or has expired. Its identity
    has three parts; that of a later operator ends with the name of its Lease.
    """

    def __init__(self) -> None:
        self._seen: tuple[str, float] = ("", 0.0)  # version of the Lease, and when it was first seen

    def may_act(self, lease: dict[str, Any] | None, now: float, *, leading: bool) -> bool:
        """Whether to leave the work to it. `lease`: the shared Lease, read `now`. `leading`: whether this process leads already.

        A leader gives way to an earlier operator that takes the free Lease: the chart has been rolled back.
        """
        holder = (lease or {}).get("spec", {}).get("holderIdentity") or ""
        if lease is None or holder.count("_") >= IDENTITY_PARTS - 1:
            return False
        version = lease["metadata"]["resourceVersion"]
        if self._seen[0] != version:
            self._seen = (version, now)
        unchanged = now - self._seen[1]
        return unchanged < 2 * LEASE_SECONDS if holder else not leading and unchanged < LEASE_SECONDS
