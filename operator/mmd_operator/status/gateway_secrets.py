"""Finds problems of the gateways' Secrets: a missing Secret, missing entries, or content that gateways reject.

The operator may not read Secrets, so it checks that the entries exist, and asks gateways, which read them, what is wrong. Gateways also
report when they cannot fetch the token issuer's keys, and when their endpoint picker has ended.
"""

from __future__ import annotations

import asyncio
import logging

from mmd_api.contract import paths
from mmd_api.contract.load import GatewayStatus
from mmd_api.spec.deployment import MultimodalDeploymentSpec
from mmd_api.spec.gateway import TLS_CERTIFICATE, TLS_KEY
from mmd_api.tenants import KEYS_FILE
from mmd_operator.autoscaling import MAX_REPORT_BYTES, ReportError, gateway_report
from mmd_operator.kube.cluster import BusyError, RefusedError
from mmd_operator.kube.context import PassContext
from mmd_operator.kube.pod_client import NoAnswerError, ReportFetcher
from mmd_operator.observed.observed import Observed, PodView
from mmd_operator.observed.problems import (
    MountedSecret,
    Problem,
    certificate_rejected,
    default_tenant_missing,
    issuer_unreachable,
    keys_rejected,
    mounted_secret_incomplete,
    mounted_secret_missing,
    picker_failed,
    refusal,
)

logger = logging.getLogger(__name__)


class GatewaySecrets:
    """Finds the Secret problems of one deployment (one UID)."""

    def __init__(self, context: PassContext, report_fetcher: ReportFetcher) -> None:
        self._context, self._report_fetcher = context, report_fetcher
        self._settings: object = None
        self._due = 0.0
        self._problems: list[Problem] = []

    @property
    def last(self) -> bool:
        """Whether the last call of `problems` found any."""
        return bool(self._problems)

    async def problems(self, spec: MultimodalDeploymentSpec, observed: Observed, now: float) -> list[Problem]:
        """Problems as of the last check. It is repeated at intervals: changes of Secrets are not watched. `now`: monotonic seconds."""
        secrets, gateway = _mounted(spec), spec.gateway
        settings = gateway.auth, gateway.tls, gateway.inference_pool
        if settings != self._settings:  # problems of settings no longer in the spec end
            self._settings, self._due, self._problems = settings, now, []
        if not any(settings) or now < self._due:
            return self._problems
        try:
            self._problems = await self._of_secrets(secrets) or await self._of_gateways(spec, observed)
        except RefusedError as error:
            self._problems = [refusal("gateway", str(error))]
        except BusyError as error:  # only the explanation is missing
            logger.warning(
                "%s/%s: failed to look for Secret %s: %s",
                self._context.namespace,
                self._context.name,
                ", ".join(secret.name for secret in secrets),
                error,
            )
            return self._problems
        pauses = self._context.pauses
        self._due = now + (pauses.bad_secret_seconds if self._problems else pauses.gateway_secrets_seconds)
        return self._problems

    async def _of_secrets(self, secrets: list[MountedSecret]) -> list[Problem]:
        cluster, namespace = self._context.cluster, self._context.namespace
        problems = []
        for secret in secrets:
            if await cluster.secret_metadata(namespace, secret.name) is None:
                problems.append(mounted_secret_missing(secret))
            elif lacking := await cluster.secret_lacks(namespace, secret.name, secret.entries):
                problems.append(mounted_secret_incomplete(secret, lacking))
        return problems

    async def _of_gateways(self, spec: MultimodalDeploymentSpec, observed: Observed) -> list[Problem]:
        """The problems reported by gateways. A gateway created before the spec named a Secret follows another Secret."""
        reachable_pods = [pod for pod in observed.pods_of("gateway") if pod.address and not pod.deleting]
        reports = await asyncio.gather(*(self._report(pod) for pod in reachable_pods))
        problems, gateway = [], spec.gateway
        for pod, report in zip(reachable_pods, reports, strict=True):
            if report is None:
                continue
            if gateway.auth is not None:
                name = pod.keys_secret or gateway.auth.keys_secret
                if report.keys_fault:
                    problems.append(keys_rejected(name, pod.name, report.keys_fault))
                oidc = gateway.auth.oidc
                if oidc is not None and report.issuer_fault:
                    problems.append(issuer_unreachable(oidc.issuer, pod.name, report.issuer_fault))
                if oidc is not None and report.missing_tenant == oidc.default_tenant:
                    problems.append(default_tenant_missing(report.missing_tenant, name, pod.name))
            if report.tls_fault and gateway.tls is not None:
                name = pod.tls_secret or gateway.tls.secret_name
                problems.append(certificate_rejected(name, pod.name, report.tls_fault))
            if report.picker_fault and gateway.inference_pool is not None:
                problems.append(picker_failed(pod.name, report.picker_fault))
        return problems

    async def _report(self, pod: PodView) -> GatewayStatus | None:
        """A gateway's report on its Secrets, or None if it does not answer. Other conditions show the latter."""
        try:
            answer = await self._report_fetcher.get(
                pod.address or "", pod.report_port, paths.GATEWAY_DEMAND, MAX_REPORT_BYTES
            )
            return gateway_report(answer, pod.name, pod.revision or "")
        except (NoAnswerError, ReportError) as error:
            logger.debug("gateway %s did not report on its Secrets: %s", pod.name, error)
            return None


def _mounted(spec: MultimodalDeploymentSpec) -> list[MountedSecret]:
    """The Secrets mounted by a deployment's gateways, which do not start without them."""
    gateway, secrets = spec.gateway, []
    if gateway.auth is not None:
        hint = "`mmd create-key` prints one"
        secrets.append(MountedSecret(gateway.auth.keys_secret, "gateway.auth.keysSecret", (KEYS_FILE,), hint))
    if gateway.tls is not None:
        hint = "`kubectl create secret tls` makes both of PEM files"
        entries = (TLS_CERTIFICATE, TLS_KEY)
        secrets.append(MountedSecret(gateway.tls.secret_name, "gateway.tls.secretName", entries, hint))
    return secrets
