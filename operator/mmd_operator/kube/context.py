"""Context of a reconcile pass: the cluster, Events, metrics, and the deployment's name. Independent of the parts of a pass."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from mmd_operator.kube.cluster import Cluster, RefusedError
from mmd_operator.kube.events import EventRecorder
from mmd_operator.kube.metrics import OperatorMetrics
from mmd_operator.kube.pauses import Pauses
from mmd_operator.observed.observed import Body, Child
from mmd_operator.observed.problems import Problem, refusal

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PassContext:
    """Context shared by all parts of a pass over one deployment."""

    cluster: Cluster
    events: EventRecorder
    metrics: OperatorMetrics
    namespace: str
    name: str
    pauses: Pauses

    def report_contest(self, body: Body, problem: Problem) -> None:
        """Log and report that another client keeps changing something."""
        logger.warning("%s/%s: %s", self.namespace, self.name, problem)
        self.events.report(body, problem.reason, str(problem), warning=True)

    def refused(self, child: Child | None, error: RefusedError) -> Problem:
        """Count an object that the API server refused, and return the problem. Other objects are still processed."""
        self.metrics.objects.labels("refused").inc()
        return refusal((child and child.component) or "pool", str(error), child.revision if child else None)
