"""Removes a deployment: drains its gateway, deletes its objects, then removes its finalizer.

If its namespace is being deleted, the finalizer is removed at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

from mmd_api.spec.gateway import gateway_grace_seconds
from mmd_operator.kube.cluster import BusyError, RefusedError
from mmd_operator.kube.context import PassContext
from mmd_operator.observed.observed import Body, Child, Observed, PodView
from mmd_operator.passes.finalizer import Finalizer
from mmd_operator.status.status_writer import StatusWriter

logger = logging.getLogger(__name__)

DRAIN_MARGIN_SECONDS = 5.0
"""A deletion waits this long beyond the gateway's grace period for the gateway to drain."""


class Removal:
    """Removes one deployment (one UID). `ending`: its namespace is being deleted."""

    def __init__(
        self,
        context: PassContext,
        finalizer: Finalizer,
        status: StatusWriter,
        observe: Callable[[], Observed],
        delete: Callable[[Child], Awaitable[None]],
    ) -> None:
        self._context = context
        self._finalizer = finalizer
        self._status = status
        self._observe = observe
        self._delete = delete
        self.ending = False
        self._drain_overdue = False
        self._cut_short: set[str] = set()  # UIDs of pods with a shortened grace period

    async def namespace_ends(self, *, failing: bool) -> bool:
        """Whether the deployment's namespace is being deleted. Checked only on a hint: terminating pods or failed passes."""
        if not self.ending and (failing or any(pod.deleting for pod in self._observe().pods)):
            try:
                self.ending = await self._context.cluster.is_terminating(self._context.namespace)
            except RefusedError as error:  # an older Role: deletion still works while that Role exists
                logger.warning(
                    "%s/%s: failed to read the namespace: %s",
                    self._context.namespace,
                    self._context.name,
                    error,
                )
        return self.ending

    async def let_go(self, body: Body) -> float:
        """Drop the finalizer at once: the namespace's deletion ends every pod anyway, and may soon delete this operator's Role.

        The namespace controller ends the pods five seconds after the deletion and checks again five seconds later. If a pod still exists
        then, the next check comes after half of the longest grace period, which is minutes for a gateway. NATS ends with the other pods,
        so there is no request to wait for.
        """
        pods = [pod for pod in self._observe().pods if pod.uid not in self._cut_short]
        pods.sort(key=lambda pod: pod.component != "gateway")  # gateways have the longest grace period
        if pods and not self._cut_short:
            logger.info(
                "%s/%s: the namespace is being deleted; removing the finalizer, %d pods terminate within a second",
                *(self._context.namespace, self._context.name, len(pods)),
            )
        finalizer_result, *_ = await asyncio.gather(
            self._finalizer.remove(body), *(self._cut_grace(pod) for pod in pods), return_exceptions=True
        )
        if isinstance(finalizer_result, BaseException):
            raise finalizer_result
        return self._context.pauses.resync_seconds

    async def remove(self, body: Body) -> float:
        """Let the gateway finish its requests, delete all other objects, then release the deployment."""
        metadata = body["metadata"]
        observed = self._observe()
        owned = [c for c in observed.children.values() if c.owner_uid == metadata["uid"]]
        gateways = [c for c in owned if c.kind == "Deployment"]
        for child in gateways:
            if not child.deleting:
                await self._delete(child)
        held = [pod.name for pod in observed.pods_of("gateway")]
        remaining_seconds = self._drain_seconds(body)
        if (gateways or held) and remaining_seconds > 0:
            message = f"waiting up to {remaining_seconds:.0f} s for gateway pods to finish their requests ({len(held)} left)"
            await self._status.publish_removing(body, "Draining", message if held else "stopping the gateway")
            return min(self._context.pauses.moving_seconds, remaining_seconds)
        if held and not self._drain_overdue:
            self._drain_overdue = True
            names = ", ".join(held[:5])
            message = (
                f"{len(held)} of the gateway pods did not terminate in time ({names}); the deletion continues"
            )
            self._context.events.report(body, "DrainDeadlineExceeded", message, warning=True)
        remaining = [c for c in owned if c not in gateways]
        for child in remaining:
            if not child.deleting:
                await self._delete(child)
        if remaining:
            await self._status.publish_removing(body, "Removing", f"removing objects ({len(remaining)} left)")
            return self._context.pauses.moving_seconds
        await self._finalizer.remove(body)
        self._context.events.report(body, "Removed", "all objects of the deployment have been removed")
        return self._context.pauses.resync_seconds

    async def _cut_grace(self, pod: PodView) -> None:
        try:
            await self._context.cluster.delete_pod(
                self._context.namespace, pod.name, pod.uid, grace_seconds=1
            )
            self._cut_short.add(pod.uid)
        except (BusyError, RefusedError) as error:  # the pod ends on its own, later
            logger.warning(
                "%s/%s: failed to shorten the grace period of pod %s: %s",
                self._context.namespace,
                self._context.name,
                pod.name,
                error,
            )

    @staticmethod
    def _drain_seconds(body: Body) -> float:
        """Seconds left for the gateway's pods to finish."""
        gateway = body.get("spec", {}).get("gateway", {})
        configured = gateway.get("template", {}).get("terminationGracePeriodSeconds", 120)
        grace = gateway_grace_seconds(configured, gateway.get("requestTimeoutSeconds", 600))
        since = datetime.fromisoformat(body["metadata"]["deletionTimestamp"])
        return grace + DRAIN_MARGIN_SECONDS - (datetime.now(UTC) - since).total_seconds()
