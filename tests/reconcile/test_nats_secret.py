"""When the operator looks at the Secret with the passwords of NATS, which it may neither read nor watch."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from mmd_operator.kube.pauses import PRODUCTION
from mmd_operator.resources.plan import plan_objects
from mmd_operator.rollout.applier import Applier
from mmd_operator.sizes.pending_growth import PendingGrowth
from support.cluster.deployments import SPEC, deployment

(SECRET,) = (m for m in plan_objects(deployment(SPEC), "default") if m["kind"] == "Secret")


class Cluster:
    """A Secret of the user's own. `looks`: when it was looked at."""

    def __init__(self, *lacking: str) -> None:
        self.lacking, self.now = list(lacking), 0.0
        self.looks: list[float] = []

    async def secret_metadata(self, _namespace: str, _name: str) -> dict[str, Any]:
        self.looks.append(self.now)
        return {}

    async def secret_lacks(self, _namespace: str, _name: str, _keys: list[str]) -> list[str]:
        return self.lacking


class Passes:
    """Passes over a deployment, one a second."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._applier = Applier(cast(Any, cluster), "default", "demo", "uid", PendingGrowth(), PRODUCTION)

    def until(self, end: float) -> list[str]:
        """The outcome of each pass."""
        found = []
        while self._cluster.now < end:
            outcome, _ = asyncio.run(self._applier.keep_secret(SECRET, self._cluster.now))
            found.append(outcome)
            self._cluster.now += 1.0
        return found


def test_a_secret_without_a_problem_is_looked_at_ever_more_rarely():
    cluster = Cluster()
    assert set(Passes(cluster).until(3000.0)) == {"Unchanged"}
    pauses = [after - before for before, after in zip(cluster.looks, cluster.looks[1:], strict=False)]
    assert pauses == [PRODUCTION.first_secret_seconds * 2**n for n in range(7)] + [600.0] * 3


def test_a_secret_that_lacks_keys_is_checked_at_short_intervals():
    cluster = Cluster("encoder")
    passes = Passes(cluster)
    assert set(passes.until(600.0)) == {"Refused"}
    assert len(cluster.looks) == 600 / PRODUCTION.bad_secret_seconds
    cluster.lacking = []
    assert set(passes.until(600.0 + PRODUCTION.bad_secret_seconds)) == {"Unchanged"}
