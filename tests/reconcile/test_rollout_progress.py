"""When a rollout has failed, as timelines: pods in, the deadline out; and what may be returned to."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from mmd_api.status import RolloutProgress
from mmd_operator.observed.observed import Observed, child_of
from mmd_operator.rollout.next_step import Step
from mmd_operator.rollout.rollout_deadline import (
    advanced,
    clock_of,
    fallback_revision,
    new_pods,
    progress_deadline_seconds,
    seconds_left,
)
from mmd_operator.rollout.spec_history import RecordedSpec, last_good, unneeded
from mmd_operator.sizes.replacement import Replacement
from support.cluster.deployments import SPEC, deployment
from support.cluster.manifests import merge

from .bodies import NEW, OLD, pod, workload

BEGIN = datetime(2027, 1, 1, tzinfo=UTC)
DIGEST, ANOTHER = "1111111111", "2222222222"
Moment = tuple[int, str, tuple[int, int]]
"""Second, clock, and pods that are scheduled and Ready."""


def after(
    *moments: Moment, spec: str = DIGEST, revision: str = NEW, before: RolloutProgress | None = None
) -> RolloutProgress:
    record = before
    for second, clock, pods in moments:
        record = advanced(record, spec, revision, clock, pods, BEGIN + timedelta(seconds=second))  # type: ignore[arg-type]
    assert record is not None
    return record


def overdue_from(record: RolloutProgress, deadline: float = 100) -> int | None:
    """The first second at which it has failed."""
    left = {s: seconds_left(record, deadline, BEGIN + timedelta(seconds=s)) for s in range(0, 2000, 5)}
    return next((second for second, found in left.items() if found is not None and found < 0), None)


@pytest.mark.parametrize(
    ("moments", "fails_at"),
    [
        ([(0, "Runs", (0, 0))], 105),
        ([(0, "Runs", (0, 0)), (60, "Runs", (0, 0))], 105),
        ([(0, "Runs", (0, 0)), (60, "Runs", (1, 0))], 165),
        ([(0, "Runs", (0, 0)), (60, "Runs", (1, 0)), (90, "Runs", (1, 1))], 195),
        ([(0, "Runs", (1, 1)), (60, "Runs", (1, 0)), (90, "Runs", (1, 1))], 105),
        ([(0, "Runs", (0, 0)), (60, "Stands", (0, 0))], None),
        ([(0, "Runs", (0, 0)), (60, "Stands", (0, 0)), (500, "Runs", (0, 0))], 605),
        ([(0, "Runs", (3, 2)), (60, "Complete", (3, 3)), (500, "Runs", (3, 1))], None),
    ],
    ids=[
        "nothing",
        "still-nothing",
        "one-has-a-node",
        "one-is-Ready",
        "one-fails-and-is-Ready-again",
        "it-waits",
        "it-waited",
        "it-was-complete",
    ],
)
def test_a_rollout_fails_when_it_makes_no_progress_within_the_deadline(moments, fails_at):
    assert overdue_from(after(*moments)) == fails_at


@pytest.mark.parametrize("changed", [{"spec": ANOTHER}, {"revision": OLD}], ids=["spec", "wire-version"])
def test_another_spec_or_revision_begins_anew(changed):
    record = after((0, "Runs", (2, 2)))
    assert overdue_from(after((80, "Runs", (0, 0)), before=record, **changed)) == 185
    done = after((0, "Complete", (2, 2)))
    assert not after((80, "Runs", (0, 0)), before=done, **changed).complete


def test_a_complete_rollout_leaves_no_time_or_size_in_the_status():
    assert after((0, "Runs", (3, 2)), (9, "Complete", (3, 3))) == RolloutProgress(
        spec=DIGEST, revision=NEW, complete=True
    )


def step(stage="BringingUp", **more) -> Step:
    return Step(stage, **{"revision": NEW, "serving": OLD, "apply": (), "sizes": {}, "remove": (), **more})


GATEWAYS = Observed(
    {}, (pod("gateway", OLD, name="g-0", ready=True), pod("gateway", NEW, name="g-1", ready=True))
)


def pools(ready: int) -> Observed:
    child = child_of("StatefulSet", workload("StatefulSet", "decode", NEW, replicas=2, ready=ready))
    gateway = child_of("Deployment", workload("Deployment", "gateway", None, template=NEW))
    return Observed({child.key: child, gateway.key: gateway})


LATE, READY = pools(1), pools(2)


@pytest.mark.parametrize(
    ("found", "observed", "paused", "clock"),
    [
        (step(), Observed(), False, "Runs"),
        (step(waits_for="starting with 1 of 3 decode pods"), Observed(), False, "Runs"),
        (step(blocked=True, waits_for="GPUs"), Observed(), False, "Stands"),
        (step(), Observed(), True, "Stands"),
        (step("SwitchingGateway"), Observed(), False, "Stands"),
        (step("Draining", serving=NEW), GATEWAYS, False, "Stands"),
        (step("Draining", serving=NEW), replace(LATE, pods=GATEWAYS.pods[:1]), False, "Runs"),
        (step("Updating", serving=NEW), LATE, False, "Runs"),
        (step("Updating", serving=NEW), READY, False, "Stands"),
        (step("Updating", serving=NEW, replace={"demo-decode": Replacement(("a",))}), READY, False, "Runs"),
        (step("Updating", serving=NEW, waits_for="decode stays at 1 of 2"), LATE, False, "Stands"),
        (step("Complete", serving=NEW), Observed(), False, "Complete"),
        (step("Complete", serving=NEW), Observed(), True, "Complete"),
    ],
)  # fmt: skip
def test_the_deadline_counts_while_pods_could_become_ready(found, observed, paused, clock):
    assert clock_of(found, observed, paused=paused) == clock


@pytest.mark.parametrize(
    ("found", "clock"), [(step(), "Stands"), (step("Complete", serving=NEW), "Complete")]
)
def test_the_deadline_does_not_count_while_weights_are_downloaded(found, clock):
    assert clock_of(found, Observed(), paused=False, downloading=True) == clock


def test_gateways_of_the_template_before_are_no_progress():
    gateway = child_of("Deployment", workload("Deployment", "gateway", NEW, replicas=2, inputs="now"))
    pods = tuple(pod("gateway", NEW, name=f"g-{made}", ready=True, inputs=made) for made in ("now", "before"))
    assert new_pods(NEW, Observed({gateway.key: gateway}, pods)) == (0, 1)


def test_only_pods_of_the_revision_and_of_its_present_settings_are_progress():
    child = child_of("StatefulSet", workload("StatefulSet", "decode", NEW, replicas=3, inputs="now"))
    name = child.name
    pods = [
        pod("decode", NEW, name=f"{name}-0", ready=True, inputs="now"),
        pod("decode", NEW, name=f"{name}-1", ready=True, inputs="before"),
        pod("decode", NEW, name=f"{name}-2", ready=True, inputs="now", deleting=True),
        pod("gateway", NEW, name="g-1", ready=True),
        pod("gateway", OLD, name="g-0", ready=True),
    ]
    placed = tuple(replace(one, scheduled=True) for one in pods)
    assert new_pods(NEW, Observed({child.key: child}, placed)) == (2, 2)
    assert new_pods(NEW, Observed({child.key: child}, tuple(pods))) == (0, 2)


@pytest.mark.parametrize(
    ("spec", "seconds"),
    [
        ({}, 1620),
        ({"decode": {"startDeadlineSeconds": 3600}}, 4620),
        ({"decode": {"startDeadlineSeconds": 3600}, "rollout": {"progressDeadlineSeconds": 60}}, 60),
    ],
)
def test_the_deadline_is_by_default_what_pods_may_take(spec, seconds):
    assert progress_deadline_seconds(deployment(merge(SPEC, spec)).spec) == seconds


@pytest.mark.parametrize(
    ("found", "pods", "revision"),
    [
        (step(), (), OLD),
        (step("Creating", serving=None), (), None),
        (step("Updating", serving=NEW), (), None),
        (step("Draining", serving=NEW), GATEWAYS.pods, OLD),
        (step("Draining", serving=NEW), (pod("gateway", OLD, ready=False),), None),
        (step("Draining", serving=NEW), (pod("gateway", OLD, ready=True, deleting=True),), None),
    ],
)
def test_what_a_failed_rollout_may_return_to_still_serves(found, pods, revision):
    assert fallback_revision(found, Observed({}, pods)) == revision


def entry(number: int, revision: str = OLD, completed: bool = True) -> RecordedSpec:
    return RecordedSpec(f"spec-{number}", number, f"digest-{number}", revision, completed)


ENTRIES = [entry(1), entry(2), entry(3, completed=False), entry(4, NEW, completed=False)]


@pytest.mark.parametrize(
    ("entries", "failed", "number"),
    [
        (ENTRIES, "digest-4", 2),
        (ENTRIES, "digest-2", 1),
        ([entry(3, completed=False)], "digest-4", 3),
        ([entry(3, completed=False)], "digest-3", None),
        ([entry(4, NEW)], "", None),
    ],
)
def test_the_last_good_spec_is_the_newest_complete_serving_one(entries, failed, number):
    found = last_good(entries, OLD, failed)
    assert (found and found.number) == number


@pytest.mark.parametrize(
    ("limit", "needed", "gone"),
    [
        (10, ["digest-4"], []),
        (2, ["digest-4"], [1]),
        (0, ["digest-4"], [3, 2, 1]),
        (0, ["digest-4", "digest-2"], [3, 1]),
        (1, ["digest-4", "digest-1"], [2]),
    ],
)
def test_the_history_keeps_the_newest_and_what_is_needed(limit, needed, gone):
    assert [one.number for one in unneeded(ENTRIES, limit, needed)] == gone
