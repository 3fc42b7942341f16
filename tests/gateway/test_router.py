"""Where requests go, as tables and properties; every clock is an argument."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmd_workers.gateway.router import (
    FeatureNeed,
    NothingRoutable,
    Overloaded,
    Placement,
    Router,
    RouteRequest,
)
from mmd_workers.wire.messages import Heartbeat, Load

NOW = 1000.0


def pod(
    name: str, roles: str = "p", sent: float = NOW, state: str = "ready", revision: str = "r1", **more
) -> Heartbeat:
    names = {"e": "encode", "p": "prefill", "d": "decode"}
    extra = {key: more.pop(key) for key in ("prefix_blocks", "features") if key in more}
    load = Load(
        **{"prefill_tokens_per_second": 1000.0, "kv_block_tokens": 16, "decode_max_sequences": 8, **more}
    )
    return Heartbeat(
        pod=name,
        pool="any",
        roles=[names[r] for r in roles],
        incarnation="i",
        revision=revision,
        state=state,
        http_endpoint="",
        sent=sent,
        load=load,
        **extra,
    )


def router(seed: int = 0, max_waiting: int = 100) -> Router:
    return Router("r1", max_waiting, random.Random(seed))


def text(tokens: int = 100, **more) -> RouteRequest:
    return RouteRequest("r.0", tokens, 50, **more)


def image(tokens: int = 600, work: int = 576, feature: str = "f1", modality: str = "image") -> RouteRequest:
    return RouteRequest("r.0", tokens, 50, features=(FeatureNeed(feature, modality, work, 576),))


D = pod("d0", "d")

TABLE = [
    (
        "the shorter queue",
        text(),
        [pod("a", prefill_waiting_tokens=900), pod("b", prefill_waiting_tokens=100), D],
        "b",
    ),
    (
        "a longer queue that drains faster",
        text(),
        [
            pod("a", prefill_waiting_tokens=900, prefill_tokens_per_second=10_000.0),
            pod("b", prefill_waiting_tokens=500),
            D,
        ],
        "a",
    ),
    (
        "a cached prefix over an equal queue",
        text(320, prefix_blocks=tuple(f"b{i}" for i in range(20))),
        [pod("a"), pod("b", prefix_blocks=[f"b{i}" for i in range(18)]), D],
        "b",
    ),
    (
        "a cached prefix shown by its last block alone",
        text(320, prefix_blocks=tuple(f"b{i}" for i in range(20))),
        [pod("a"), pod("b", prefix_blocks=["b17"]), D],
        "b",
    ),
    (
        "a short queue over a small cached prefix",
        text(320, prefix_blocks=tuple(f"b{i}" for i in range(20))),
        [pod("a"), pod("b", prefix_blocks=["b0"], prefill_waiting_tokens=2000), D],
        "a",
    ),
    (
        "the pod that has the feature already",
        image(),
        [pod("a"), pod("b", features=["f1"]), pod("e", "e", encode_work_per_second={"image": 500.0}), D],
        "b",
    ),
    (
        "a text request ignores what encoders have to do",
        text(),
        [
            pod("a", "ep", encode_queued_work={"video": 10**6}, encode_work_per_second={"video": 100.0}),
            pod("b", "ep", prefill_waiting_tokens=800),
            D,
        ],
        "a",
    ),
    (
        "an image goes where the own encoder is idle",
        image(),
        [
            pod("a", "ep", encode_queued_work={"image": 10**5}, encode_work_per_second={"image": 1000.0}),
            pod("b", "ep", encode_work_per_second={"image": 1000.0}, prefill_waiting_tokens=800),
            D,
        ],
        "b",
    ),
    (
        "not to a pod that drains",
        text(),
        [pod("a", state="draining"), pod("b", prefill_waiting_tokens=10**4), D],
        "b",
    ),
    (
        "not to a pod that loads",
        text(),
        [pod("a", state="loading"), pod("b", prefill_waiting_tokens=10**4), D],
        "b",
    ),
    (
        "not to another revision",
        text(),
        [pod("a", revision="r2"), pod("b", prefill_waiting_tokens=10**4), D],
        "b",
    ),
    (
        "away from the pod that just failed",
        text(avoid=frozenset({"a"})),
        [pod("a"), pod("b", prefill_waiting_tokens=900), D],
        "b",
    ),
    (
        "back to the pod that just failed if it is all there is",
        text(avoid=frozenset({"a"})),
        [pod("a"), D],
        "a",
    ),
    (
        "past a pod whose queue is full",
        text(),
        [pod("a", prefill_waiting_requests=100), pod("b", prefill_waiting_tokens=10**5), D],
        "b",
    ),
    (
        "to the failed pod rather than nowhere when the other is full",
        text(avoid=frozenset({"a"})),
        [pod("a"), pod("b", prefill_waiting_requests=100), D],
        "a",
    ),
    (
        "away from a pod whose own batch is full",
        text(),
        [
            pod("a", "pd", decode_running=8, decode_waiting=40, itl_seconds=0.02),
            pod("b", "pd", decode_running=2, itl_seconds=0.02),
        ],
        "b",
    ),
]


@pytest.mark.parametrize(
    ("request_", "pods", "expected"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE]
)
def test_a_request_goes(request_: RouteRequest, pods: list[Heartbeat], expected: str) -> None:
    for seed in range(5):
        placed = router(seed).route(request_, pods, NOW)
        assert isinstance(placed, Placement)
        assert placed.prefill_pod == expected


@pytest.mark.parametrize(
    ("pods", "missing"),
    [
        ([], "prefill"),
        ([D], "prefill"),
        ([pod("a")], "decode"),
        ([pod("a", state="loading"), D], "prefill"),
        ([pod("e", "e")], "prefill"),
    ],
)
def test_a_missing_role_is_named(pods: list[Heartbeat], missing: str) -> None:
    assert router().route(text(), pods, NOW) == NothingRoutable(missing)


def test_a_missing_encoder_holds_nobody_up_because_jobs_wait_in_their_queue() -> None:
    assert isinstance(router().route(image(), [pod("a"), D], NOW), Placement)


def test_when_every_queue_is_full_the_answer_says_when_to_come_back() -> None:
    full = [pod("a", prefill_waiting_requests=100, prefill_waiting_tokens=5000), D]
    outcome = router().route(text(), full, NOW)
    assert isinstance(outcome, Overloaded)
    assert outcome.retry_after_seconds == pytest.approx(5.0)


def test_a_pod_that_decodes_itself_gets_no_decoders() -> None:
    placed = router().route(text(), [pod("m", "epd")], NOW)
    assert isinstance(placed, Placement)
    assert placed.decode_pods == ()


def test_decoders_are_ordered_by_load_with_those_that_never_fit_last() -> None:
    pods = [
        pod("p"),
        pod("busy", "d", decode_running=7, kv_blocks_total=100, kv_blocks_free=50),
        pod("full", "d", decode_running=1, kv_blocks_total=100, kv_blocks_free=2),
        pod("small", "d", decode_running=0, kv_blocks_total=4, kv_blocks_free=4),
        pod("free", "d", decode_running=1, kv_blocks_total=100, kv_blocks_free=90),
    ]
    placed = router().route(text(), pods, NOW)
    assert isinstance(placed, Placement)
    assert placed.decode_pods == ("free", "busy", "full", "small")


def test_a_burst_between_two_heartbeats_spreads_over_equal_pods() -> None:
    one = router()
    pods = [*(pod(f"p{i}") for i in range(4)), D]
    counts = Counter(one.route(text(), pods, NOW + 0.1 + i / 1000).prefill_pod for i in range(100))
    assert set(counts) == {"p0", "p1", "p2", "p3"}
    assert max(counts.values()) - min(counts.values()) <= 4


def test_a_burst_spreads_over_decoders_too() -> None:
    one = router()
    pods = [pod("p"), *(pod(f"d{i}", "d") for i in range(4))]
    counts = Counter(one.route(text(), pods, NOW + 0.1 + i / 1000).decode_pods[0] for i in range(40))
    assert max(counts.values()) - min(counts.values()) <= 1


def test_gateways_that_know_the_same_do_not_all_choose_the_same() -> None:
    pods = [*(pod(f"p{i}") for i in range(4)), D]
    first = Counter(router(seed).route(text(), pods, NOW).prefill_pod for seed in range(200))
    assert max(first.values()) < 100


def test_own_placements_count_until_a_heartbeat_shows_them() -> None:
    one = router()
    pods = [pod("a"), pod("b", prefill_waiting_tokens=500), D]
    assert one.route(text(1000), pods, NOW + 0.1).prefill_pod == "a"
    assert one.route(text(1000), pods, NOW + 0.2).prefill_pod == "b"
    newer = [pod("a", sent=NOW + 0.3), pod("b", sent=NOW + 0.3, prefill_waiting_tokens=1500), D]
    assert one.route(text(1000), newer, NOW + 0.4).prefill_pod == "a"


def test_own_placements_fill_a_queue_that_heartbeats_still_call_empty() -> None:
    one = router(max_waiting=3)
    pods = [pod("a"), D]
    outcomes = [one.route(text(), pods, NOW + 0.1 + i / 100) for i in range(4)]
    assert [type(o) for o in outcomes] == [Placement] * 3 + [Overloaded]


pods_strategy = st.lists(
    st.builds(
        lambda i, roles, waiting, requests, running, state, revision: pod(
            f"p{i}",
            roles,
            state=state,
            revision=revision,
            prefill_waiting_tokens=waiting,
            prefill_waiting_requests=requests,
            decode_running=running,
            kv_blocks_total=64,
            kv_blocks_free=max(0, 64 - running),
        ),
        st.integers(0, 50),
        st.sampled_from(["e", "p", "d", "ep", "pd", "epd"]),
        st.integers(0, 10**6),
        st.integers(0, 20),
        st.integers(0, 64),
        st.sampled_from(["ready", "ready", "ready", "loading", "draining", "drained"]),
        st.sampled_from(["r1", "r1", "r1", "r2"]),
    ),
    max_size=8,
    unique_by=lambda p: p.pod,
)


@given(pods=pods_strategy, seed=st.integers(0, 100), media=st.booleans())
@settings(max_examples=400, deadline=None)
def test_whatever_the_pods_say_only_ready_pods_of_this_revision_with_room_are_chosen(
    pods, seed, media
) -> None:
    request = image() if media else text()
    outcome = router(seed, max_waiting=10).route(request, pods, NOW)
    good = {p.pod: p for p in pods if p.state == "ready" and p.revision == "r1"}
    if isinstance(outcome, Placement):
        chosen = good[outcome.prefill_pod]
        assert "prefill" in chosen.roles
        assert chosen.load.prefill_waiting_requests < 10
        assert all("decode" in good[name].roles for name in outcome.decode_pods)
        assert bool(outcome.decode_pods) != ("decode" in chosen.roles)
        assert outcome.estimated_ttft_seconds > 0
    elif isinstance(outcome, Overloaded):
        assert all(p.load.prefill_waiting_requests >= 10 for p in good.values() if "prefill" in p.roles)
        assert 1 <= outcome.retry_after_seconds <= 30
    else:
        assert not any(outcome.missing_role in p.roles for p in good.values())


@given(tokens=st.integers(1, 10**5), backlog=st.integers(0, 10**7), cut=st.integers(0, 100))
@settings(max_examples=100, deadline=None)
def test_the_estimate_of_text_does_not_move_with_encoder_backlog_and_falls_with_what_is_cached(
    tokens, backlog, cut
) -> None:
    blocks = tuple(f"b{i}" for i in range(min(100, tokens // 16)))
    request = text(tokens, prefix_blocks=blocks)
    idle = [pod("a", "ep"), D]
    busy = [pod("a", "ep", encode_queued_work={"video": backlog}, encode_work_per_second={"video": 1.0}), D]
    one = router()
    assert one.estimate_ttft_seconds(request, idle[0], idle) == one.estimate_ttft_seconds(
        request, busy[0], busy
    )
    cached = pod("a", "ep", prefix_blocks=list(blocks[:cut]))
    assert one.estimate_ttft_seconds(request, cached, [cached]) <= one.estimate_ttft_seconds(
        request, idle[0], idle
    )
