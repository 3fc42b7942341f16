"""No request that can be made from the OpenAPI document brings one of two gateways to a defect, a hang or a leak; `bench.fuzz` sends many more."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import pytest

from support.serving import fuzzing
from support.serving.asking import HANG_SECONDS
from support.serving.fuzzing import fuzz, fuzzed_deployment
from support.serving.held import assert_nothing_held
from support.serving.local_deployment import Deployment
from support.serving.repeating import HOWS

REQUESTS = 20_000

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("fuzz"), pytest.mark.timeout(600)]


def compared(repeated: Iterable[str]) -> set[str]:
    """The ways in which a request that was answered with 200 has been sent again, as `how: [200, …]` says."""
    found = (re.fullmatch(r"(.*): \[200, \d+.*\]", one) for one in repeated)
    return {one[1] for one in found if one}


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with fuzzed_deployment(tmp_path_factory.mktemp("fuzz")) as running:
        yield running


def test_random_requests_get_answers_and_leave_nothing_behind(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        fuzzing, "REPEATED_SHARE", 0.3
    )  # so that each way has its answers on a slow machine too
    before = {pod.name: deployment.pid(pod) for pod in deployment.local.pods}
    with deployment.http(HANG_SECONDS) as client:
        report = fuzz(client, REQUESTS, 7)
    assert report.failures == []
    assert report.requests >= REQUESTS
    assert {"200", "400", "401", "429"} <= {status.rpartition(" ")[2] for status in report.statuses}
    assert compared(report.repeated) == set(HOWS), report.repeated
    assert {pod.name: deployment.pid(pod) for pod in deployment.local.pods} == before
    assert_nothing_held(deployment)
