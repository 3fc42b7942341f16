"""The progress of a deployment's weights download, from its Job, the Job's pods and their reports. Independent of the API server."""

from __future__ import annotations

from collections.abc import Sequence

from mmd_api.contract import paths
from mmd_api.contract.weights import EXIT_STATUS, MAX_PROGRESS_BYTES, WeightsProgress
from mmd_api.status import WeightsStatus
from mmd_operator.kube.pauses import Pauses
from mmd_operator.kube.pod_client import NoAnswerError, ReportFetcher
from mmd_operator.observed.observed import Child, Observed, PodView, manifest_key
from mmd_operator.observed.problems import Deadlines, Problem, ProblemReason, crashed, pod_problem
from mmd_operator.resources.naming import WEIGHTS, Manifest
from mmd_operator.rollout.rollout_steps import DOWNLOAD_RETRY_SECONDS

_REASONS: dict[int | None, ProblemReason] = {status: reason for reason, status in EXIT_STATUS.items()}


class WeightsDownload:
    """The download of one deployment (one UID).

    `_last_report`: UID of the pod that was asked last, when it was asked, and its report. `_maximum`: the Job, and the most bytes that its pods
    reported as present and as verified.
    """

    def __init__(self, report_fetcher: ReportFetcher, pauses: Pauses) -> None:
        self._report_fetcher, self._pauses = report_fetcher, pauses
        self._last_report: tuple[str, float, WeightsProgress | None] = ("", 0.0, None)
        self._maximum: tuple[str, int, int] | None = None
        self.advances = False
        """Whether the last `look` found more bytes than any before, or a download waiting for another of the same files. A retry that gets no
        further than earlier ones does not advance."""

    async def look(
        self, planned: Sequence[Manifest], observed: Observed, now: float
    ) -> tuple[WeightsStatus | None, tuple[PodView, ...]]:
        """The state of the download and the pods of its Job, the newest last; None if the plan has no Job. `now`: monotonic seconds."""
        manifest = next((m for m in planned if m["kind"] == "Job"), None)
        self.advances = False
        if manifest is None:
            return None, ()
        name = manifest["metadata"]["name"]
        pods = pods_of_job(name, observed)
        progress = await self._progress(pods, now)
        volumes = manifest["spec"]["template"]["spec"]["volumes"]
        claim = next(v["persistentVolumeClaim"]["claimName"] for v in volumes if "persistentVolumeClaim" in v)
        status = weights_status(name, claim, observed.children.get(manifest_key(manifest)), progress)
        if progress is not None and status.state in ("Waiting", "Downloading"):
            self.advances = self._grows(name, progress) or (
                progress.state == "Waiting" and progress.total_bytes > 0
            )
        return status, pods

    def _grows(self, job: str, progress: WeightsProgress) -> bool:
        """Whether a Job has more bytes than ever before. Its first report does not count: what it had before is unknown."""
        current = job, progress.bytes, progress.verified_bytes
        previous_maximum = self._maximum if self._maximum is not None and self._maximum[0] == job else current
        self._maximum = job, max(previous_maximum[1], current[1]), max(previous_maximum[2], current[2])
        return self._maximum != previous_maximum

    async def _progress(self, pods: Sequence[PodView], now: float) -> WeightsProgress | None:
        """The report of the newest pod, or its last words if it has ended."""
        if not pods:
            return None
        pod = pods[-1]
        if pod.finished:
            return _parsed(pod.last_words)
        uid, asked_at, progress = self._last_report
        if uid == pod.uid and now - asked_at < self._pauses.download_seconds:
            return progress
        if pod.address is not None:
            try:
                answer = await self._report_fetcher.get(
                    pod.address, pod.report_port, paths.WORKER_STATE, MAX_PROGRESS_BYTES
                )
                progress = _parsed(answer.decode("utf-8", "replace"))
            except NoAnswerError:
                progress = progress if uid == pod.uid else None
        self._last_report = pod.uid, now, progress if pod.address is not None else None
        return self._last_report[2]


def pods_of_job(name: str, observed: Observed) -> tuple[PodView, ...]:
    """The pods of a Job, the newest last."""
    pods = [pod for pod in observed.pods if pod.component == WEIGHTS and pod.name.startswith(f"{name}-")]
    return tuple(sorted(pods, key=lambda pod: (pod.created_at, pod.name)))


def weights_status(
    name: str, claim: str, job: Child | None, progress: WeightsProgress | None
) -> WeightsStatus:
    """The state of a download. `job`: the Job as the watch shows it."""
    job_state = job.job if job is not None else None
    status = WeightsStatus(claim=claim, job=name, state="Pending")
    if progress is not None:
        numbers = progress.model_dump(
            exclude={"state", "verified_bytes", "bytes_per_second", "remaining_seconds"}
        )
        status = status.model_copy(update={**numbers, "state": progress.state})
    if job_state is not None and job_state.failed_at is not None:
        return status.model_copy(update={"state": "Failed"})
    if job_state is not None and job_state.complete:
        return status.model_copy(update={"state": "Complete"})
    if progress is None or progress.state != "Downloading":
        return status if status.state != "Complete" else status.model_copy(update={"state": "Downloading"})
    rate = {
        "bytes_per_second": progress.bytes_per_second,
        "remaining_seconds": progress.remaining_seconds,
    }
    return status.model_copy(update=rate)


def weights_problems(
    status: WeightsStatus | None, job: Child | None, pods: Sequence[PodView], now: float
) -> list[Problem]:
    """Problems keeping a download from completing. `now`: Unix seconds."""
    if status is None or status.state == "Complete":
        return []
    waiting = [
        problem
        for pod in pods
        if not pod.finished and (problem := pod_problem(pod, now, Deadlines())) is not None
    ]
    failed = [pod for pod in pods if pod.finished and pod.exit_code not in (None, 0)]
    failed_job = (
        job.job if job is not None and job.job is not None and job.job.failed_at is not None else None
    )
    if waiting or (not failed and failed_job is None):
        return waiting
    remedy = (
        f"`kubectl delete job {status.job}` starts it again at once, the operator {DOWNLOAD_RETRY_SECONDS / 60:.0f} minutes after its end"
        if failed_job is not None
        else f"Job {status.job} tries again after a pause"
    )
    reason: ProblemReason = "WeightsUnreachable"
    seen = f"Job {status.job} failed ({failed_job.failure})" if failed_job is not None else ""
    if failed and failed[-1].exit_code in _REASONS:
        reason, seen = _REASONS[failed[-1].exit_code], failed[-1].last_words
    elif failed:
        reason, seen, _ = crashed(failed[-1])
    return [Problem(reason, WEIGHTS, seen, remedy, revision=job.revision if job else None)]


def weights_words(status: WeightsStatus | None) -> str:
    """The progress of a download, in words; empty if there is nothing to wait for."""
    if status is None or status.state == "Complete":
        return ""
    where = f"Job {status.job}, which downloads the model to claim {status.claim}"
    if status.state in ("Pending", "Failed"):
        return f"waiting for {where}" + (": it has failed" if status.state == "Failed" else "")
    if status.state == "Waiting" or not status.total_bytes:
        return f"waiting for {where}: it waits for its server, or for another download of the same files"
    parts = [f"{_gibibytes(status.bytes or 0)} of {_gibibytes(status.total_bytes)} GiB"]
    if status.bytes_per_second:
        parts.append(f"{status.bytes_per_second / 2**20:.1f} MiB/s")
    if status.remaining_seconds is not None:
        parts.append(f"{status.remaining_seconds} s left")
    return f"waiting for {where}: {', '.join(parts)}"


def _gibibytes(size: int) -> str:
    return f"{size / 2**30:.2f}"


def _parsed(text: str) -> WeightsProgress | None:
    try:
        return WeightsProgress.parse(text)
    except ValueError:
        return None
