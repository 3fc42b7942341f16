"""An operator whose Lease has its release's name leaves the work to one of an earlier release, which knows one Lease for all."""

from __future__ import annotations

from typing import Any

import pytest

from mmd_operator.kube.leadership import LEASE_SECONDS, EarlierOperator

EARLIER, LATER, NOBODY = "pod-0_1_ab12cd34", "pod-0_1_ab12cd34_multimodal-operator", None


def lease(version: int, holder: str | None) -> dict[str, Any]:
    return {"metadata": {"resourceVersion": str(version)}, "spec": {"holderIdentity": holder}}


def waits(*seen: tuple[float, dict[str, Any] | None], leading: bool = False) -> list[bool]:
    """Whether to wait at each of these times, at which the shared Lease is as given."""
    earlier = EarlierOperator()
    return [earlier.may_act(shared, now, leading=leading) for now, shared in seen]


def test_an_earlier_operator_that_renews_its_lease_is_waited_for() -> None:
    assert waits(*((100.0 * n, lease(n, EARLIER)) for n in range(5))) == [True] * 5


def test_one_that_ended_is_followed_once_its_standby_had_time_to_take_the_lease() -> None:
    freed = lease(2, NOBODY)
    assert waits((0, lease(1, EARLIER)), (1, freed), (LEASE_SECONDS, freed), (LEASE_SECONDS + 1, freed)) == [
        True,
        True,
        True,
        False,
    ]


def test_one_that_was_killed_is_followed_once_its_standby_had_time_after_the_lease_expired() -> None:
    left = lease(1, EARLIER)
    assert waits((0, left), (LEASE_SECONDS + 2, left), (2 * LEASE_SECONDS, left)) == [True, True, False]


@pytest.mark.parametrize("shared", [None, lease(1, LATER)], ids=["no-lease", "held-by-a-later-operator"])
def test_where_no_earlier_operator_can_hold_the_lease_none_is_waited_for(
    shared: dict[str, Any] | None,
) -> None:
    assert waits((0, shared)) == [False]


def test_a_leader_gives_way_to_an_earlier_operator_and_not_to_a_free_lease() -> None:
    assert waits((0, lease(1, NOBODY)), (2, lease(2, EARLIER)), leading=True) == [False, True]
