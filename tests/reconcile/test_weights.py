"""The download of weights as the status and conditions show it, and what a rollout does while it lasts. Pure."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from mmd_api.contract.weights import EXIT_STATUS, WeightsProgress
from mmd_api.pipeline import pipeline_revision
from mmd_operator.kube.pauses import PRODUCTION
from mmd_operator.kube.pod_client import NoAnswerError, ReportFetcher
from mmd_operator.observed.observed import Child, Observed, PodView, child_of, pod_of
from mmd_operator.resources.naming import WEIGHTS
from mmd_operator.resources.plan import plan_objects
from mmd_operator.rollout.next_step import Step, next_step
from mmd_operator.rollout.rollout_deadline import advanced, clock_of
from mmd_operator.status.weights_download import (
    WeightsDownload,
    weights_problems,
    weights_status,
    weights_words,
)
from support.cluster.deployments import SPEC, deployment

from .bodies import UID, labels, workload

STORAGE = {"type": "Hub", "cache": {"claimName": "shared"}}
CACHED = deployment({**SPEC, "model": {"id": "org/llava", "storage": STORAGE}})
REVISION, OLD = pipeline_revision(CACHED.spec), "aaaaaaaaaa"
PLANNED = plan_objects(CACHED, "default")
(JOB,) = (m for m in PLANNED if m["kind"] == "Job")
NAME = JOB["metadata"]["name"]
NOW = datetime(2026, 1, 1, tzinfo=UTC).timestamp()
HALF = WeightsProgress(
    state="Downloading", bytes=2**29, total_bytes=2**30, bytes_per_second=2**20, remaining_seconds=512
)
POOLS = {"encoder": 1, "prefill": 1, "decode": 2}


def job(condition: str | None = None, at: str = "2026-01-01T00:00:00Z", owner: str = UID) -> Child:
    found = {
        "type": condition,
        "status": "True",
        "reason": "R",
        "message": "words",
        "lastTransitionTime": at,
    }
    metadata = {
        **JOB["metadata"],
        "uid": "job",
        "resourceVersion": "1",
        "ownerReferences": [{"uid": owner, "controller": True}],
    }
    return child_of(
        "Job", {**JOB, "metadata": metadata, "status": {"conditions": [found] if condition else []}}
    )


def pod(
    number: int, *, phase: str = "Running", exit_code: int | None = None, message: str = "", waits: str = ""
) -> PodView:
    ended = {"terminated": {"exitCode": exit_code, "message": message}}
    state: dict[str, Any] = ended if exit_code is not None else {"running": {}}
    status: dict[str, Any] = {
        "phase": phase,
        "podIP": "10.0.0.1",
        "conditions": [
            {"type": "Ready", "status": "True" if exit_code is None and not waits else "False"},
            {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": waits}
            if waits
            else {"type": "PodScheduled", "status": "True"},
        ],
        "containerStatuses": [] if waits else [{"name": WEIGHTS, "restartCount": 0, "state": state}],
    }
    metadata = {
        "name": f"{NAME}-{number}",
        "uid": str(number),
        "labels": labels(WEIGHTS, REVISION),
        "creationTimestamp": f"2026-01-01T00:{number // 60:02}:{number % 60:02}Z",
    }
    return pod_of({"metadata": metadata, "spec": {"containers": [{"name": WEIGHTS}]}, "status": status})


def step(*children: Child, now: float = NOW) -> Step:
    return next_step(CACHED.spec, REVISION, PLANNED, Observed({c.key: c for c in children}), UID, now)


def kinds(found: Step) -> set[str]:
    return {m["kind"] for m in found.apply if m["metadata"]["name"] != "demo-nats"}


def serving(revision: str) -> list[Child]:
    sets = [workload("StatefulSet", pool, revision, replicas=n, ready=n) for pool, n in POOLS.items()]
    gateway = workload("Deployment", "gateway", None, template=revision)
    return [*(child_of("StatefulSet", one) for one in sets), child_of("Deployment", gateway)]


@pytest.mark.parametrize("found", [(), (job(),), (job("Failed"),), (job("Complete", owner="another"),)])
def test_neither_pools_nor_the_gateway_start_before_the_claim_is_full(found: tuple[Child, ...]):
    assert not kinds(step(*found)) & {"StatefulSet", "Deployment"}
    assert "Job" in kinds(step(*found))


def test_they_start_when_it_is():
    assert {"StatefulSet", "Deployment"} <= kinds(step(job("Complete")))


def test_a_revision_that_serves_is_left_alone_while_another_is_downloaded():
    found = step(*serving(OLD), job())
    assert not kinds(found) & {"StatefulSet", "Deployment"}
    assert not found.remove


def test_pods_that_run_stay_as_planned_while_their_download_is_repeated():
    assert {"StatefulSet", "Deployment"} <= kinds(step(*serving(REVISION), job()))


@pytest.mark.parametrize(("minutes", "again"), [(9, False), (10, True)])
def test_a_failed_download_is_started_again_after_ten_minutes(minutes: int, again: bool):
    found = step(job("Failed"), now=NOW + 60 * minutes)
    assert [child.name for child in found.remove] == ([NAME] if again else [])


@pytest.mark.parametrize(
    ("found", "progress", "state", "words"),
    [
        (None, None, "Pending", f"waiting for Job {NAME}, which downloads the model to claim shared"),
        (job(), HALF, "Downloading", "0.50 of 1.00 GiB, 1.0 MiB/s, 512 s left"),
        (job(), WeightsProgress(state="Waiting"), "Waiting", "another download of the same files"),
        (job(), WeightsProgress(state="Complete"), "Downloading", "waiting for"),
        (job("Failed"), HALF, "Failed", "it has failed"),
        (job("Complete"), None, "Complete", ""),
    ],
)
def test_the_state_is_the_jobs_and_the_numbers_are_its_pods(found, progress, state: str, words: str):
    status = weights_status(NAME, "shared", found, progress)
    assert status.state == state
    assert words in weights_words(status)
    assert (status.bytes_per_second is None) == (state != "Downloading" or progress is not HALF)


FAILED = {"phase": "Failed", "message": "claim shared is full; enlarge it"}
FULL = EXIT_STATUS["WeightsTooLarge"]


@pytest.mark.parametrize(
    ("found", "pods", "reason", "words"),
    [
        (job(), [pod(0)], None, ""),
        (job(), [pod(0, **FAILED, exit_code=FULL)], "WeightsTooLarge", "is full; enlarge it; Job"),
        (job(), [pod(0, **FAILED, exit_code=FULL), pod(1)], "WeightsTooLarge", "tries again"),
        (job("Failed"), [pod(0, **FAILED, exit_code=FULL)], "WeightsTooLarge", "kubectl delete job"),
        (job(), [pod(0, **FAILED, exit_code=1)], "CrashLoop", "last with code 1"),
        (job("Failed"), [], "WeightsUnreachable", "R: words"),
        (job(), [pod(0, waits='persistentvolumeclaim "shared" not found')], "VolumePending", "claimName"),
        (job("Complete"), [pod(0, **FAILED, exit_code=FULL)], None, ""),
    ],
)
def test_a_problem_of_the_download_has_a_reason_and_a_remedy(found, pods, reason: str | None, words: str):
    status = weights_status(NAME, "shared", found, None)
    problems = weights_problems(status, found, pods, NOW)
    assert [p.reason for p in problems] == ([reason] if reason else [])
    assert words in "".join(map(str, problems))


class Pods(ReportFetcher):
    """Pods that answer with their progress, or do not."""

    def __init__(self) -> None:
        self.asked, self.answer = 0, HALF.dump().encode()

    async def get(self, address: str, port: int, path: str, max_bytes: int) -> bytes:
        self.asked += 1
        if not self.answer:
            raise NoAnswerError("TimeoutError")
        return self.answer


async def test_a_pod_is_asked_at_most_every_five_seconds():
    """Its answer wakes the next pass."""
    fetcher = Pods()
    download = WeightsDownload(fetcher, PRODUCTION)
    seen = Observed({job().key: job()}, (pod(0),))
    for at in (0.0, 0.1, PRODUCTION.download_seconds - 0.1):
        status, _ = await download.look(PLANNED, seen, at)
        assert status is not None
        assert status.bytes == 2**29
    assert fetcher.asked == 1
    fetcher.answer = b""
    status, _ = await download.look(PLANNED, seen, PRODUCTION.download_seconds)
    assert fetcher.asked == 2
    assert status is not None
    assert status.bytes == 2**29, "what is known was forgotten"
    fetcher.answer = b"<html>"
    status, _ = await download.look(PLANNED, seen, 2 * PRODUCTION.download_seconds)
    assert status is not None
    assert status.bytes is None


async def test_the_deadline_of_a_rollout_stands_only_while_its_download_advances():
    """Seconds, what the pod reports (None: it is Pending; bytes there, or another download's turn), and since when the rollout is stuck."""
    looking_up, turn = WeightsProgress(state="Waiting"), WeightsProgress(state="Waiting", total_bytes=2**30)
    timeline = [
        (0, None, 0),
        (60, looking_up, 0),
        (90, HALF, None),
        (100, HALF, 100),
        (120, HALF.model_copy(update={"bytes": 2**29 + 1}), None),
        (130, HALF.model_copy(update={"bytes": 2**29 + 1}), 130),
        (200, looking_up, 130),
        (260, HALF, 130),
        (300, None, 130),
        (310, HALF.model_copy(update={"bytes": 2**29 + 1, "verified_bytes": 9}), None),
        (320, turn, None),
        (330, turn, None),
        (340, None, 340),
    ]
    fetcher, record = Pods(), None
    download, started = WeightsDownload(fetcher, PRODUCTION), datetime(2026, 1, 1, tzinfo=UTC)
    for at, progress, since in timeline:
        now = started + timedelta(seconds=at)
        fetcher.answer = progress.dump().encode() if progress else b""
        seen = [pod(at)] if progress else []
        observed = Observed({c.key: c for c in (*serving(OLD), job())}, tuple(seen))
        await download.look(PLANNED, observed, float(at))
        found = next_step(CACHED.spec, REVISION, PLANNED, observed, UID, now.timestamp())
        clock = clock_of(found, observed, paused=False, downloading=download.advances)
        record = advanced(record, "a" * 10, REVISION, clock, (0, 0), now)
        assert record.since == (None if since is None else started + timedelta(seconds=since)), at


async def test_a_pod_that_succeeded_leaves_its_numbers():
    done = WeightsProgress(state="Complete", bytes=2**30, total_bytes=2**30)
    ended = pod(0, phase="Succeeded", exit_code=0, message=done.dump())
    seen = Observed({job("Complete").key: job("Complete")}, (ended,))
    status, pods = await WeightsDownload(Pods(), PRODUCTION).look(PLANNED, seen, 0.0)
    assert status is not None
    assert (status.state, status.bytes) == ("Complete", 2**30)
    assert not weights_problems(status, job("Complete"), pods, NOW + 10_000)
