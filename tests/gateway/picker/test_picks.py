"""Which gateway a request goes to: the state of the gateways and a key in, endpoints out."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from mmd_api.contract.errors import OverloadedError
from mmd_workers.gateway.picker.picks import GatewayLoad, PickRequest, Picks

PLAIN = PickRequest()


def gateway(number: int, requests: int = 0, most: int = 10, **more) -> GatewayLoad:
    load = GatewayLoad(f"gateway-{number}", f"10.0.0.{number}:8000", True, requests, most, 1.0)
    return replace(load, **more)


def picks(*gateways: GatewayLoad, seed: int = 1) -> Picks:
    made = Picks(random.Random(seed))
    made.gateways = gateways
    return made


def keyed(key: str) -> PickRequest:
    return PickRequest(sticky_key=key)


def test_the_least_loaded_gateway_comes_first_and_others_are_fallbacks():
    beats = [gateway(1, 5), gateway(2, 3, most=20), gateway(3, 4), gateway(4, 9)]
    assert picks(*beats).pick(PLAIN) == ["10.0.0.2:8000", "10.0.0.3:8000", "10.0.0.1:8000"]


def test_requests_are_spread_between_two_heartbeats_too():
    chosen = picks(*(gateway(n, most=100) for n in (1, 2, 3)))
    counted = Counter(chosen.pick(PLAIN)[0] for _ in range(30))
    assert set(counted.values()) == {10}


def test_a_heartbeat_replaces_the_count_of_requests_sent_before_it():
    chosen = picks(gateway(1), gateway(2, requests=3))
    assert [chosen.pick(PLAIN)[0] for _ in range(3)] == ["10.0.0.1:8000"] * 3
    chosen.gateways = [gateway(1, requests=0, sent=2.0), gateway(2, requests=3)]  # they have ended
    assert chosen.pick(PLAIN)[0] == "10.0.0.1:8000"


def test_ties_fall_differently_at_different_pickers():
    beats = [gateway(n) for n in range(1, 9)]
    first = {picks(*beats, seed=n).pick(PLAIN)[0] for n in range(30)}
    assert len(first) > 4


def test_a_key_leads_every_picker_to_the_same_gateway_whatever_the_load():
    beats = [gateway(n, requests=n) for n in range(1, 6)]
    other_way = [replace(b, requests=9 - b.requests, sent=5.0) for b in reversed(beats)]
    for n in range(50):
        wanted = keyed(f"key-{n}")
        assert picks(*beats).pick(wanted)[0] == picks(*other_way).pick(wanted)[0]


def test_keys_are_spread_and_only_those_of_a_gateway_that_goes_move():
    beats = [gateway(n, most=10_000) for n in range(1, 6)]
    before, after = picks(*beats), picks(*beats[:-1])
    gone, moved = 0, 0
    counted = Counter()
    for n in range(500):
        old, new = before.pick(keyed(f"{n}"))[0], after.pick(keyed(f"{n}"))[0]
        counted[old] += 1
        gone += old == "10.0.0.5:8000"
        moved += old != new
    assert moved == gone
    assert min(counted.values()) > 60


def test_a_key_goes_elsewhere_where_its_gateway_is_full():
    beats = [gateway(1), gateway(2)]
    home = picks(*beats).pick(keyed("a"))[0]
    full = [replace(b, requests=10) if b.endpoint == home else b for b in beats]
    assert picks(*full).pick(keyed("a"))[0] != home


def test_a_gateway_that_drains_is_chosen_only_while_no_other_is_ready():
    drains = gateway(1, is_ready=False)
    assert picks(drains, gateway(2, requests=9)).pick(PLAIN) == ["10.0.0.2:8000"]
    assert picks(drains).pick(PLAIN) == ["10.0.0.1:8000"]


@pytest.mark.parametrize("subset", [None, frozenset(), frozenset({"10.9.9.9:8000"})])
def test_without_an_eligible_gateway_the_answer_is_503(subset):
    beats = [] if subset is None else [gateway(1)]
    with pytest.raises(OverloadedError) as refused:
        picks(*beats).pick(replace(PLAIN, subset=subset))
    assert refused.value.status == 503
    assert ("subset" in refused.value.message) == (subset is not None)


def test_only_endpoints_of_the_subset_are_chosen():
    beats = [gateway(1), gateway(2, requests=9), gateway(3)]
    wanted = replace(PLAIN, subset=frozenset({"10.0.0.2:8000", "10.9.9.9:8000"}))
    assert picks(*beats).pick(wanted) == ["10.0.0.2:8000"]
    assert picks(*beats).pick(replace(wanted, sticky_key="a")) == ["10.0.0.2:8000"]


def test_no_request_is_refused_because_all_gateways_are_full():
    full = picks(gateway(1, 10), gateway(2, 12))
    assert full.pick(PLAIN) == ["10.0.0.1:8000", "10.0.0.2:8000"]
    home = picks(gateway(1), gateway(2)).pick(keyed("a"))[0]
    assert full.pick(keyed("a"))[0] == home


def test_a_gateway_hidden_by_a_subset_keeps_its_sent_count():
    chosen = picks(gateway(1, most=100), gateway(2, requests=8, most=200))
    both = [chosen.pick(PLAIN)[0] for _ in range(2)]
    assert set(both) == {"10.0.0.1:8000"}
    chosen.pick(PickRequest(subset=frozenset({"10.0.0.2:8000"})))
    after = [chosen.pick(PLAIN)[0] for _ in range(4)]
    assert after.count("10.0.0.2:8000") == 1


def test_endless_requests_make_a_gateway_look_at_most_an_eighth_busier():
    chosen = picks(gateway(1, most=80), gateway(2, requests=11, most=80))
    for _ in range(1000):
        chosen.pick(PickRequest(subset=frozenset({"10.0.0.1:8000"})))
    assert chosen.pick(PLAIN)[0] == "10.0.0.1:8000"
