"""Leases as timelines, and the one law under any order of events: a lease leaves the table exactly once."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmd_api.contract.errors import LeaseError
from mmd_workers.kv.leases import LeaseTable


def granted(seconds: float = 10.0) -> LeaseTable:
    table = LeaseTable()
    table.grant("l", "p-0", "i0", "r#0", now=0.0, seconds=seconds)
    return table


def test_a_commit_within_the_lease_ends_it_for_good():
    table = granted()
    table.commit("l", now=9.9)
    assert table.expire(now=1000.0) == []
    assert table.release("l") is None
    assert table.drop_owner("p-0", "i0") == []
    assert len(table) == 0


def test_a_lease_is_committed_once():
    table = granted()
    table.commit("l", now=1.0)
    with pytest.raises(LeaseError, match="offer the request again"):
        table.commit("l", now=2.0)


@pytest.mark.parametrize("now", [10.0, 10.1, 99.0])
def test_a_commit_at_or_after_expiry_is_refused(now):
    table = granted()
    with pytest.raises(LeaseError, match="offer the request again"):
        table.commit("l", now)
    assert [lease.sequence_id for lease in table.expire(now)] == ["r#0"]
    with pytest.raises(LeaseError):
        table.commit("l", now)


def test_a_renewed_lease_lives_longer_and_never_shorter():
    table = granted()
    assert table.renew("l", now=8.0, seconds=10.0).expires == 18.0
    assert table.renew("l", now=9.0, seconds=1.0).expires == 18.0
    assert table.expire(now=17.9) == []
    assert len(table.expire(now=18.0)) == 1


def test_an_expired_lease_cannot_be_renewed():
    with pytest.raises(LeaseError):
        granted().renew("l", now=10.0, seconds=10.0)


def test_a_lost_worker_loses_only_its_own_leases():
    table = granted()
    table.grant("m", "p-0", "i1", "s#0", now=0.0, seconds=10.0)
    table.grant("n", "p-1", "i0", "t#0", now=0.0, seconds=10.0)
    assert [lease.sequence_id for lease in table.drop_owner("p-0", "i0")] == ["r#0"]
    assert len(table) == 2


def test_a_lease_id_in_use_is_refused():
    table = granted()
    with pytest.raises(ValueError, match="create a new id"):
        table.grant("l", "p-0", "i0", "r#0", now=0.0, seconds=1.0)


events = st.lists(
    st.tuples(
        st.sampled_from(["grant", "renew", "commit", "release", "expire", "drop", "get"]),
        st.integers(0, 5),  # which lease
        st.integers(0, 2),  # which owner
        st.floats(0, 4),  # seconds that pass before
    ),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(events)
def test_every_lease_leaves_the_table_exactly_once_whatever_happens(timeline):
    table, now, held = LeaseTable(), 0.0, set()
    ids: list[str] = []

    def ended(leases):
        for lease in leases:
            held.remove(lease.lease_id)  # KeyError: ended twice, or after its commit

    for what, which, owner, seconds in timeline:
        now += seconds
        lease_id = ids[which % len(ids)] if ids else "none"
        if what == "grant":
            lease_id = f"l{len(ids)}"
            table.grant(lease_id, f"p{owner}", "i", "r#0", now, 5.0)
            held.add(lease_id)
            ids.append(lease_id)
        elif what == "expire":
            ended(table.expire(now))
        elif what == "drop":
            ended(table.drop_owner(f"p{owner}", "i"))
        elif what == "release":
            lease = table.release(lease_id)
            ended([lease] if lease else [])
        elif what in ("commit", "renew", "get"):
            try:
                if what == "commit":
                    table.commit(lease_id, now)
                    held.remove(lease_id)
                else:
                    table.renew(lease_id, now, 5.0) if what == "renew" else table.get(lease_id, now)
            except LeaseError:
                pass
        assert len(table) == len(held)
    ended(table.expire(now + 1000))
    assert len(table) == len(held) == 0
