"""When an object that somebody keeps changing may be repaired again."""

from __future__ import annotations

from mmd_operator.kube.contests import (
    CALM_SECONDS,
    FREE_REPAIRS,
    MAX_CONTESTS,
    Contests,
)
from mmd_operator.kube.pauses import PRODUCTION


def test_the_first_repairs_come_at_once_and_later_ones_ever_more_rarely():
    contests, pauses = Contests(PRODUCTION), []
    now = 0.0
    for _ in range(FREE_REPAIRS + 10):
        pauses.append(contests.pause("a", now))
        now += pauses[-1]
        contests.repaired("a", now, "rival")
    assert pauses[:FREE_REPAIRS] == [0.0] * FREE_REPAIRS
    assert pauses[FREE_REPAIRS : FREE_REPAIRS + 3] == [
        PRODUCTION.first_contest_seconds * n for n in (1, 2, 4)
    ]
    assert pauses[-1] == PRODUCTION.last_contest_seconds
    assert contests.pause("b", now) == 0.0


def test_an_object_that_was_left_alone_is_repaired_at_once_again():
    contests = Contests(PRODUCTION)
    for now in range(FREE_REPAIRS):
        assert contests.against("a", now) is None
        contests.repaired("a", now, "rival")
    assert contests.against("a", now) == 'field manager "rival"'
    assert contests.against("a", now + CALM_SECONDS + 1) is None
    assert contests.pause("a", now + CALM_SECONDS + 1) == 0.0


def test_what_is_remembered_is_bounded():
    contests = Contests(PRODUCTION)
    for n in range(MAX_CONTESTS + 5):
        for _ in range(FREE_REPAIRS):
            contests.repaired(n, 0.0, None)
    assert contests.against(4, 0.0) is None
    assert contests.against(5, 0.0) == "another client"
