from collections.abc import Sequence

import pytest

from mmd_workers.wire.job_runs import JobRuns, unwanted
from mmd_workers.wire.messages.prefill import EncodeCheck, EncodeRun, EncodeWanted

A, A_AGAIN = EncodeRun("encoder-0", "i1"), EncodeRun("encoder-0", "i2")
B, B_AGAIN = EncodeRun("encoder-1", "i1"), EncodeRun("encoder-1", "i2")


def claim(run: EncodeRun | None, ended: EncodeRun | None = None, failed: bool = False) -> EncodeCheck:
    return EncodeCheck("feature", "job", run, ended=ended, failed=failed)


def goes_on(run: EncodeRun) -> EncodeCheck:
    return EncodeCheck("feature", "job", run, in_progress=True)


@pytest.mark.parametrize(
    ("checks", "attempt", "other"),
    [
        pytest.param([claim(A)], 1, None, id="the first run begins"),
        pytest.param([claim(A), claim(A)], 1, None, id="it goes on"),
        pytest.param([claim(A), claim(B)], 1, A, id="no second run beside it"),
        pytest.param([claim(A), claim(None, A), claim(B)], 1, None, id="given back"),
        pytest.param([claim(A), claim(B, A, True)], 2, None, id="its encoder died"),
        pytest.param([claim(A), claim(B, A), claim(A)], 1, B, id="the former encoder asks again"),
        pytest.param([claim(A), claim(A_AGAIN, A, True)], 2, None, id="died and started again"),
        pytest.param([claim(A), *[claim(None, A, True)] * 3, claim(B)], 2, None, id="reported three times"),
        pytest.param([claim(A), claim(B, A, True), claim(B, A, True)], 2, None, id="claimed twice"),
        pytest.param([claim(B, A, True)], 1, None, id="the end of a run that never began"),
        pytest.param(
            [claim(A), claim(B, A, True), claim(A_AGAIN, B, True), claim(B_AGAIN, A_AGAIN, True)],
            *(4, None),
            id="three deaths",
        ),
        pytest.param([claim(A), claim(B, A, True), claim(A)], 1, B, id="it was cut off, and asks again"),
        pytest.param([claim(A), claim(B, A, True), goes_on(A)], 1, None, id="it was cut off, and goes on"),
        pytest.param([claim(A), claim(B, A, True), goes_on(A), goes_on(B)], 1, A, id="its heir stops"),
        pytest.param([claim(A), claim(B, A, True), *[goes_on(A)] * 2], 1, None, id="it counts back once"),
        pytest.param([claim(A), claim(B, A, True), claim(A, B, True)], 2, None, id="and its heir died"),
        pytest.param([claim(A), claim(B, A, True), claim(None, A)], 1, B, id="it was cut off, and has ended"),
        pytest.param([claim(A), claim(B, A, True), claim(None, A, True)], 2, B, id="cut off, and it failed"),
        pytest.param(
            [claim(A), claim(B, A, True), goes_on(A), claim(B, A, True)], 2, None, id="cut off, then dead"
        ),
        pytest.param([claim(A), claim(None, A, True), claim(A)], 2, None, id="it failed, and tries again"),
    ],
)
def test_one_run_at_a_time_and_each_failed_one_counts_once(
    checks: Sequence[EncodeCheck], attempt: int, other: EncodeRun | None
) -> None:
    runs = JobRuns()
    answers = [runs.answer(check) for check in checks]
    assert answers[-1] == EncodeWanted("job", wanted=True, attempt=attempt, other=other)


def test_a_feature_that_nobody_waits_for_has_no_runs() -> None:
    assert unwanted(claim(A)) == EncodeWanted("job", wanted=False)
