"""What keeps the API keys of a deployment from being in force: a Secret that is missing or lacks its file, or a file that gateways reject.

The operator may not read Secrets, so it looks whether the entry is there, and asks gateways, which read it, what is wrong with its content.
"""

from __future__ import annotations

import asyncio
import logging

from mmd_api.contract import paths
from mmd_api.spec.deployment import MultimodalDeploymentSpec
from mmd_api.tenants import KEYS_FILE
from mmd_operator.autoscaling import MAX_REPORT_BYTES, ReportError, gateway_report
from mmd_operator.cluster import BusyError, RefusedError
from mmd_operator.context import PassContext
from mmd_operator.observed import Observed, PodView
from mmd_operator.pod_client import NoAnswerError, ReportFetcher
from mmd_operator.problems import Problem, keys_rejected, keys_secret_incomplete, keys_secret_missing, refusal

logger = logging.getLogger(__name__)

CHECK_SECONDS = 30.0
CHECK_BAD_SECONDS = 4.0


class ApiKeys:
    """Finds the problems of one deployment (one UID)."""

    def __init__(self, context: PassContext, report_fetcher: ReportFetcher) -> None:
        self._context, self._report_fetcher = context, report_fetcher
        self._secret, self._due = "", 0.0
        self._problems: list[Problem] = []

    @property
    def last(self) -> bool:
        """Whether there were problems when `problems` was last called."""
        return bool(self._problems)

    async def problems(self, spec: MultimodalDeploymentSpec, observed: Observed, now: float) -> list[Problem]:
        """As of the last look, which is repeated at intervals: changes of a Secret are not watched. `now`: monotonic seconds."""
        if spec.gateway.auth is None:
            self._secret, self._problems = "", []
            return []
        secret = spec.gateway.auth.keys_secret
        if secret != self._secret:
            self._secret, self._due, self._problems = secret, now, []  # those of another Secret end with it
        if now < self._due:
            return self._problems
        try:
            self._problems = await self._of_secret(secret) or await self._of_gateways(secret, observed)
        except RefusedError as error:
            self._problems = [refusal("gateway", str(error))]
        except BusyError as error:  # the explanation is missing, the work goes on
            logger.warning(
                "%s/%s: failed to look for Secret %s: %s",
                self._context.namespace,
                self._context.name,
                secret,
                error,
            )
            return self._problems
        self._due = now + (CHECK_BAD_SECONDS if self._problems else CHECK_SECONDS)
        return self._problems

    async def _of_secret(self, name: str) -> list[Problem]:
        cluster, namespace = self._context.cluster, self._context.namespace
        if await cluster.secret_metadata(namespace, name) is None:
            return [keys_secret_missing(name)]
        lacking = await cluster.secret_lacks(namespace, name, [KEYS_FILE])
        return [keys_secret_incomplete(name)] if lacking else []

    async def _of_gateways(self, secret: str, observed: Observed) -> list[Problem]:
        """A gateway that was made before `secret` was named follows another one."""
        asked = [pod for pod in observed.pods_of("gateway") if pod.address and not pod.deleting]
        faults = await asyncio.gather(*(self._fault(pod) for pod in asked))
        return [
            keys_rejected(pod.keys_secret or secret, pod.name, fault)
            for pod, fault in zip(asked, faults, strict=True)
            if fault
        ]

    async def _fault(self, pod: PodView) -> str:
        """Why a gateway does not use the file; empty if it does, or does not answer, which other conditions show."""
        try:
            answer = await self._report_fetcher.get(
                pod.address or "", pod.report_port, paths.GATEWAY_DEMAND, MAX_REPORT_BYTES
            )
            return gateway_report(answer, pod.name, pod.revision or "").keys_fault
        except (NoAnswerError, ReportError) as error:
            logger.debug("gateway %s did not report on its API keys: %s", pod.name, error)
            return ""
