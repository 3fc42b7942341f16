"""Which promises of an SLO an ended request counts for."""

from __future__ import annotations

import pytest

from mmd_api.contract.errors import DeadlineError, OverloadedError
from mmd_api.spec.observability import SloSpec
from mmd_workers.gateway.api.request_records import kept_promises
from mmd_workers.gateway.placement.timeline import Timeline


@pytest.mark.parametrize(
    ("code", "own_deadline", "finished", "counted"),
    [
        (DeadlineError.code, 0.0, 5.0, True),
        (DeadlineError.code, 2.0, 2.1, False),
        (DeadlineError.code, 2.0, 1.99, False),
        (OverloadedError.code, 2.0, 2.1, False),
        (OverloadedError.code, 9.0, 5.0, True),
    ],
)
def test_a_failure_at_a_clients_own_deadline_misses_no_promise(
    code: str, own_deadline: float, finished: float, counted: bool
) -> None:
    timeline = Timeline(
        "one", arrived=1.0, own_deadline=own_deadline, finished=finished, status=503, code=code
    )
    assert kept_promises(timeline, SloSpec(ttft_milliseconds=100)) == ({"ttft": False} if counted else {})
