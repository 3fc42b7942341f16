"""The record of who runs an encode job and how often it has failed. Pure: no clock, no network.

The receiver keeps it, the pod that waits for the feature: it lives as long as anybody needs the job, and hears of every run. The queue knows
neither, since a server that was away delivers again what an encoder still runs.
"""

from __future__ import annotations

from mmd_workers.wire.messages.prefill import EncodeCheck, EncodeRun, EncodeWanted


class JobRuns:
    """The runs of one job: one at a time."""

    def __init__(self) -> None:
        self._run: EncodeRun | None = None
        self._failed = 0
        self._presumed_dead: set[EncodeRun] = set()  # counted as failed, as other encoders reported

    def answer(self, check: EncodeCheck) -> EncodeWanted:
        """Record what an encoder reports. Its run begins, or goes on, if the reply names no other.

        Reports may come twice: only the run in progress can end. An encoder that was only cut off from the server, or stopped for a while,
        looked dead to others. Once it reports again, its run counts as failed no longer, and goes on if it is still in progress.
        """
        if check.ended is not None and check.ended == self._run:
            self._run = None
            self._failed += check.failed
            if check.failed and check.run is not None:
                self._presumed_dead.add(check.ended)
        reporter = check.run or check.ended
        if reporter in self._presumed_dead:
            self._presumed_dead.remove(reporter)
            self._failed -= 1
            if check.in_progress:
                self._run = reporter
            elif check.run is None:
                self._failed += check.failed
        if self._run is None:
            self._run = check.run
        other = None if self._run == check.run else self._run
        return EncodeWanted(check.job_id, wanted=True, attempt=1 + self._failed, other=other)


def unwanted(check: EncodeCheck) -> EncodeWanted:
    """The reply of a pod that does not wait for the feature."""
    return EncodeWanted(check.job_id, wanted=False)
