"""What a gateway tells an autoscaler: who waits for whom, what lies in the queue, how long clients waited."""

from __future__ import annotations

import pytest

from mmd_workers.gateway.placement.demand import GatewayDemand
from mmd_workers.wire.jobs import QueueDepth


def test_jobs_that_encoders_have_taken_are_not_counted_as_waiting():
    demand = GatewayDemand()
    demand.queue_read({"video": QueueDepth(jobs=10, work=1000, running_jobs=4), "image": QueueDepth(0, 0, 0)})
    report = demand.report("gateway-0", "r", {"decode": 2}, 95)
    assert report.queue is not None
    assert report.queue.waiting_work == {"video": pytest.approx(600), "image": 0}
    assert 0 <= report.queue.age_seconds < 5
    assert report.held == {"decode": 2}


def test_a_queue_that_cannot_be_read_is_not_an_empty_one():
    demand = GatewayDemand()
    assert demand.report("gateway-0", "r", {}, 95).queue is None
    demand.queue_read({"video": QueueDepth(jobs=1, work=5, running_jobs=0)})
    demand.queue_unreadable()
    assert demand.report("gateway-0", "r", {}, 95).queue is None


def test_the_time_to_first_token_is_reported_at_the_slos_percentile():
    demand = GatewayDemand()
    assert demand.report("gateway-0", "r", {}, 90).ttft.requests == 0
    for hundredths in range(1, 101):
        demand.first_token(hundredths / 100)
    assert demand.report("gateway-0", "r", {}, 90).ttft.model_dump() == {
        "window_seconds": 30.0,
        "requests": 100,
        "seconds": pytest.approx(0.9),
    }


def test_a_clock_that_is_set_back_does_not_silence_the_gateway():
    demand = GatewayDemand()
    demand.first_token(-3.0)
    report = demand.report("gateway-0", "r", {}, 95)
    assert (report.ttft.requests, report.ttft.seconds) == (1, 0.0)
