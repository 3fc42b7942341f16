"""Pauses grow to their longest and differ from one caller to the next."""

from mmd_workers.basics.backoff import Backoff


def test_pauses_double_up_to_the_longest_and_stay_there() -> None:
    pauses = Backoff(0.1, 1.0)
    for longest in (0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0):
        assert longest / 2 <= pauses.next() <= longest


def test_those_who_failed_together_do_not_come_back_together() -> None:
    assert len({Backoff(0.1, 1.0).next() for _ in range(20)}) > 10
