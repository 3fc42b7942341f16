"""Collects the reports of a deployment's pods for the autoscaler, and the faults of missing ones."""

from __future__ import annotations

import asyncio

from mmd_api.contract import paths
from mmd_operator.autoscaling import MAX_REPORT_BYTES, ReportError, Scaler, gateway_report, worker_report
from mmd_operator.kube.metrics import OperatorMetrics
from mmd_operator.kube.pod_client import NoAnswerError, ReportFetcher
from mmd_operator.observed.observed import Observed, PodView
from mmd_operator.scaling.scaling_facts import ready_gateways


class LoadReports:
    """Collects the reports of one deployment."""

    def __init__(self, report_fetcher: ReportFetcher, metrics: OperatorMetrics) -> None:
        self._report_fetcher, self._metrics = report_fetcher, metrics

    async def collect(self, scaler: Scaler, observed: Observed, revision: str, now: float) -> dict[str, str]:
        """Collect the report of every pod that can answer. Returns the faults of reports, by pod."""
        faults: dict[str, str] = {}

        async def worker(pod: PodView) -> None:
            body = await self._report_fetcher.get(
                pod.address or "", pod.report_port, paths.WORKER_STATE, MAX_REPORT_BYTES
            )
            scaler.record_report(pod.name, now, worker_report(body, pod.name, revision))

        async def gateway(pod: PodView) -> None:
            body = await self._report_fetcher.get(
                pod.address or "", pod.report_port, paths.GATEWAY_DEMAND, MAX_REPORT_BYTES
            )
            scaler.record_gateway_report(pod.name, now, gateway_report(body, pod.name, revision))

        async def collect_one(pod: PodView) -> None:
            try:
                await (gateway(pod) if pod.component == "gateway" else worker(pod))
                self._metrics.load_reports.labels("answered").inc()
            except NoAnswerError as error:
                if pod.ready:
                    faults[pod.name] = f"pod {pod.name} {error}"
                    self._metrics.load_reports.labels("silent").inc()
            except ReportError as error:
                faults[pod.name] = str(error)
                self._metrics.load_reports.labels("invalid").inc()

        pods = [p for name in scaler.policy.pools for p in observed.pods_of(name) if p.revision == revision]
        pods += ready_gateways(observed, revision)
        await asyncio.gather(*(collect_one(pod) for pod in pods if pod.address))
        return faults
