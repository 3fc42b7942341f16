"""Where requests go, as tables and properties; every clock is an argument."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmd_api.contract.load import PodLoad
from mmd_workers.gateway.router import (
    EMBEDDING_SECONDS_PER_TOKEN,
    FeatureNeed,
    NeverFits,
    NothingRoutable,
    Overloaded,
    Placement,
    Router,
    RouteRequest,
)
from mmd_workers.wire.messages import Heartbeat

NOW = 1000.0


def pod(
    name: str, roles: str = "p", sent: float = NOW, state: str = "ready", revision: str = "r1", **more
) -> Heartbeat:
    names = {"e": "encode", "p": "prefill", "d": "decode"}
    extra = {key: more.pop(key) for key in ("prefix_blocks", "features", "takes_prompts") if key in more}
    load = PodLoad(
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


def test_a_missing_encoder_delays_no_placement_because_jobs_wait_in_their_queue() -> None:
    assert isinstance(router().route(image(), [pod("a"), D], NOW), Placement)


def test_when_every_queue_is_full_the_answer_has_a_retry_after() -> None:
    full = [pod("a", prefill_waiting_requests=100, prefill_waiting_tokens=5000), D]
    outcome = router().route(text(), full, NOW)
    assert isinstance(outcome, Overloaded)
    assert outcome.retry_after_seconds == pytest.approx(5.0)


def test_a_pod_that_decodes_itself_gets_no_decoders() -> None:
    placed = router().route(text(), [pod("m", "epd")], NOW)
    assert isinstance(placed, Placement)
    assert placed.decode_pods == ()


@pytest.mark.parametrize(
    ("pods", "role"),
    [
        ([pod("p", kv_blocks_total=6), pod("d", "d", kv_blocks_total=100)], "prefill"),
        ([pod("p", kv_blocks_total=100), pod("d", "d", kv_blocks_total=9)], "decode"),
        ([pod("pd", "pd", kv_blocks_total=9)], "prefill"),
    ],
)
def test_a_request_that_fits_into_no_pod_is_refused_at_once_with_the_numbers(pods, role):
    outcome = router().route(text(100), pods, NOW)  # 100 + 50 tokens are 10 blocks, the prompt and a token 7
    assert isinstance(outcome, NeverFits)
    assert f"the largest {role} pod holds {16 * min(p.load.kv_blocks_total for p in pods)}" in outcome.message
    assert "lower max_tokens" in outcome.message


def test_a_pod_without_a_reported_kv_pool_or_limited_by_its_context_is_not_excluded():
    unknown = [pod("p"), pod("d", "d")]
    assert isinstance(router().route(text(10_000), unknown, NOW), Placement)
    at_context = [pod("p"), replace(pod("d", "d", kv_blocks_total=8), max_model_len=128)]
    assert isinstance(router().route(text(100), at_context, NOW), Placement)


def test_a_request_that_fits_nowhere_gets_the_capacity_of_the_largest_pod() -> None:
    pods = [pod("p"), *(pod(name, "d", kv_blocks_total=n) for name, n in (("x", 3), ("y", 5), ("z", 4)))]
    outcome = router().route(text(100), pods, NOW)
    assert isinstance(outcome, NeverFits)
    assert "150 tokens, but the largest decode pod holds 80;" in outcome.message


def test_a_pool_of_blocks_of_one_token_is_a_pool_that_has_been_reported() -> None:
    pods = [pod("p"), pod("d", "d", kv_blocks_total=149, kv_block_tokens=1)]
    assert isinstance(router().route(text(100), pods, NOW), NeverFits)
    pods[1] = pod("d", "d", kv_blocks_total=150, kv_block_tokens=1)
    assert isinstance(router().route(text(100), pods, NOW), Placement)


def test_a_cached_prefix_is_as_long_as_the_named_blocks_whatever_the_size_of_the_pods_own() -> None:
    a = pod("a", prefix_blocks=["b1"], kv_block_tokens=64)
    request = text(100, prefix_blocks=("b0", "b1"), block_tokens=32)
    assert router().estimate_ttft_seconds(request, a, [a]) == pytest.approx((100 - 64) / 1000)


@pytest.mark.parametrize(("known", "cached"), [([], 0), (["b0"], 16), (["b3"], 64), (["b3", "b1", "x"], 64)])
def test_a_cached_prefix_saves_the_time_of_its_tokens(known: list[str], cached: int) -> None:
    a = pod("a", prefix_blocks=known)
    request = text(100, prefix_blocks=tuple(f"b{i}" for i in range(6)))
    assert router().estimate_ttft_seconds(request, a, [a]) == pytest.approx((100 - cached) / 1000)


BLOCKS = {"kv_blocks_total": 100, "kv_blocks_free": 100}
DECODERS = [
    (
        "by the fuller of batch and pool",
        [
            pod("busy", "d", **BLOCKS | {"kv_blocks_free": 50}, decode_running=7),
            pod("full", "d", **BLOCKS | {"kv_blocks_free": 2}, decode_running=1),
            pod("free", "d", **BLOCKS | {"kv_blocks_free": 90}, decode_running=1),
        ],
        ["free", "busy", "full"],
    ),
    (
        "without those that the request never fits",
        [
            pod("small", "d", kv_blocks_total=4, kv_blocks_free=4),
            pod("large", "d", **BLOCKS, decode_running=7),
        ],
        ["large"],
    ),
    (
        "counting a reserved block once: it is not free",
        [
            pod("less", "d", kv_blocks_total=100, kv_blocks_free=50, kv_blocks_reserved=40),
            pod("more", "d", kv_blocks_total=100, kv_blocks_free=40),
        ],
        ["less", "more"],
    ),
    (
        "counting sequences that wait like those that run",
        [pod("waits", "d", decode_running=3, decode_waiting=3), pod("runs", "d", decode_running=5)],
        ["runs", "waits"],
    ),
    (
        "in parts of what the batch takes",
        [pod("small", "d", decode_running=4), pod("large", "d", decode_running=7, decode_max_sequences=16)],
        ["large", "small"],
    ),
    (
        "in parts of what the pool holds",
        [
            pod("small", "d", kv_blocks_total=20, kv_blocks_free=10),
            pod("large", "d", kv_blocks_total=200, kv_blocks_free=120),
        ],
        ["large", "small"],
    ),
    (
        "a batch of unknown size being one of one sequence",
        [pod("unknown", "d", decode_max_sequences=0, decode_running=1), pod("known", "d", decode_running=7)],
        ["known", "unknown"],
    ),
    (
        "a pool of unknown size not being full",
        [pod("full", "d", **BLOCKS | {"kv_blocks_free": 10}), pod("unknown", "d", decode_running=1)],
        ["unknown", "full"],
    ),
    (
        "those to avoid last, however idle",
        [pod("avoided", "d"), pod("busy", "d", decode_running=8, decode_waiting=90)],
        ["busy", "avoided"],
    ),
    (
        "those that also prefill not at all while there are others",
        [pod("both", "pd"), pod("busy", "d", decode_running=8)],
        ["busy"],
    ),
]


@pytest.mark.parametrize(
    ("pods", "expected"), [row[1:] for row in DECODERS], ids=[row[0] for row in DECODERS]
)
def test_decoders_are_ordered(pods: list[Heartbeat], expected: list[str]) -> None:
    prefill = pod("p", prefill_tokens_per_second=1e6)
    for seed in range(5):
        placed = router(seed).route(text(avoid=frozenset({"avoided"})), [prefill, *pods], NOW)
        assert isinstance(placed, Placement)
        assert placed.prefill_pod == "p"
        assert list(placed.decode_pods) == expected


def test_decoders_with_the_same_load_are_not_always_in_the_same_order() -> None:
    pods = [pod("p"), pod("x", "d"), pod("y", "d")]
    assert {router(seed).route(text(), pods, NOW).decode_pods for seed in range(20)} == {
        ("x", "y"),
        ("y", "x"),
    }


ROOMY = {"decode_max_sequences": 1000, "kv_blocks_total": 100}
OWN_DECODES = [
    ("as a sequence", 16, {"decode_running": 5}, {"decode_running": 13, "decode_max_sequences": 16}),
    ("with its prompt's blocks", 320, ROOMY | {"kv_blocks_free": 100}, ROOMY | {"kv_blocks_free": 70}),
    ("with parts of a block", 24, ROOMY | {"kv_blocks_free": 100}, ROOMY | {"kv_blocks_free": 98}),
]


@pytest.mark.parametrize(
    ("tokens", "x", "y"), [row[1:] for row in OWN_DECODES], ids=[row[0] for row in OWN_DECODES]
)
def test_an_own_placement_counts_once_at_its_decoder(tokens: int, x: dict, y: dict) -> None:
    """With one more, x is still the better one; with two more, y is."""
    one = router()
    pods = [pod("p"), pod("x", "d", **x), pod("y", "d", **y)]
    placed = [one.route(text(tokens), pods, NOW + 0.1 + i / 100).decoder for i in range(3)]
    assert placed == ["x", "x", "y"]


def test_a_placement_that_a_decoder_reports_is_not_counted_again() -> None:
    one = router()
    pods = [pod("p"), pod("x", "d", **BLOCKS), pod("y", "d", **BLOCKS | {"kv_blocks_free": 70})]
    placed = one.route(text(320), pods, NOW + 0.1)
    assert placed.decoder == "x"
    one.confirm(placed, pods)
    shown = pod("x", "d", sent=NOW + 0.2, kv_blocks_total=100, kv_blocks_free=80, kv_blocks_reserved=20)
    assert one.route(text(320), [pods[0], shown, pods[2]], NOW + 0.3).decoder == "x"


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
    for name, now in (("a", NOW + 0.1), ("b", NOW + 0.2)):
        placed = one.route(text(1000), pods, now)
        assert placed.prefill_pod == name
        one.confirm(placed, pods)
    newer = [pod("a", sent=NOW + 0.3), pod("b", sent=NOW + 0.3, prefill_waiting_tokens=1500), D]
    assert one.route(text(1000), newer, NOW + 0.4).prefill_pod == "a"


def test_own_placements_fill_a_queue_that_heartbeats_still_call_empty() -> None:
    one = router(max_waiting=3)
    pods = [pod("a"), D]
    outcomes = [one.route(text(), pods, NOW + 0.1 + i / 100) for i in range(4)]
    assert [type(o) for o in outcomes] == [Placement] * 3 + [Overloaded]


def test_a_placement_that_was_refused_or_never_sent_counts_no_more() -> None:
    one = router(max_waiting=1)
    pods = [pod("a"), pod("x", "d"), pod("y", "d", decode_running=1, decode_max_sequences=9)]
    decoders: list[str] = []
    for i in range(4):
        placed = one.route(text(), pods, NOW + 0.1 + i / 100)
        assert isinstance(placed, Placement)
        decoders.append(placed.decoder)
        one.take_back(placed)
        one.take_back(placed)
    assert decoders == ["x"] * 4
    assert isinstance(one.route(text(), pods, NOW + 0.2), Placement)
    assert isinstance(one.route(text(), pods, NOW + 0.3), Overloaded)


def test_of_two_placements_only_the_one_taken_back_is_forgotten() -> None:
    one = router()
    pods = [pod("a", "pd"), pod("b", "pd", prefill_waiting_tokens=10**6)]
    first = one.route(text(300), pods, NOW + 0.1)
    one.route(text(500), pods, NOW + 0.1)
    one.take_back(first)
    assert one.estimate_ttft_seconds(text(100), pods[0], pods) == pytest.approx(0.5 + 0.1)


BEFORE, AFTER = pod("a", sent=1.0), pod("a", sent=1.5)  # its acceptance
FORGETTING = [
    ("no newer heartbeat", True, [BEFORE], 0.6, True),
    ("a heartbeat since it was accepted", True, [AFTER], 0.6, False),
    ("a heartbeat before it was accepted", False, [AFTER], 0.6, True),
    ("another pod's heartbeat", True, [BEFORE, pod("b", sent=9.0, prefill_waiting_tokens=10**6)], 0.6, True),
    ("a heartbeat of the pod's next incarnation", True, [replace(BEFORE, incarnation="j")], 0.6, False),
    ("no heartbeat for nearly three seconds", True, [BEFORE], 3.49, True),
    ("no heartbeat for three seconds", True, [BEFORE], 3.5, False),
    ("no answer for three seconds", False, [AFTER], 3.5, False),
    ("a pod that is gone", True, [], 0.6, False),
]


P = pod("p0")


def taker(name: str = "t", **more) -> Heartbeat:
    """A decode pod that computes prompts itself."""
    return pod(name, "d", takes_prompts=True, **more)


CACHED = {"prefix_blocks": ["b3"]}  # 64 tokens
IDENTITIES = tuple(f"b{number}" for number in range(5))


@pytest.mark.parametrize(
    ("request_", "pods", "expected"),
    [
        pytest.param(text(32), [P, taker()], "t", id="a short prompt"),
        pytest.param(text(33), [P, taker()], "p0", id="a long prompt"),
        pytest.param(text(32), [P, D], "p0", id="of a pod that does not take prompts"),
        pytest.param(
            text(90, prefix_blocks=IDENTITIES), [P, taker("u"), taker(**CACHED)], "t", id="its rest is short"
        ),
        pytest.param(text(32, media_end=20), [P, taker()], "p0", id="media that are not cached"),
        pytest.param(
            text(90, prefix_blocks=IDENTITIES, media_end=64),
            [P, taker(**CACHED)],
            "t",
            id="media that are cached",
        ),
        pytest.param(
            text(90, prefix_blocks=IDENTITIES, media_end=65),
            [P, taker(**CACHED)],
            "p0",
            id="media cached in part",
        ),
        pytest.param(text(32), [P, taker(prefill_waiting_tokens=96)], "t", id="some prompts wait there"),
        pytest.param(text(32), [P, taker(prefill_waiting_tokens=97)], "p0", id="too many wait there"),
        pytest.param(text(32), [P, taker(decode_running=7)], "t", id="one place is left"),
        pytest.param(text(32), [P, taker(decode_running=8)], "p0", id="no place is left"),
        pytest.param(
            text(32), [P, taker("u", decode_running=4), taker(decode_running=3)], "t", id="the least busy"
        ),
        pytest.param(text(32, avoid=frozenset({"t"})), [P, taker()], "p0", id="a pod that refused it"),
        pytest.param(text(32, prefill_only=True), [P, taker()], "p0", id="a prompt that was given back"),
        pytest.param(
            text(32), [P, taker(kv_blocks_total=10, kv_blocks_free=0)], "p0", id="no KV block is left"
        ),
    ],
)
def test_a_prompt_of_which_little_is_left_to_compute_goes_to_a_decode_pod(
    request_: RouteRequest, pods: list[Heartbeat], expected: str
) -> None:
    routing = router()
    routing.local_prefill_tokens = 32
    placement = routing.route(request_, pods, NOW)
    assert isinstance(placement, Placement)
    assert placement.prefill_pod == expected
    assert bool(placement.decode_pods) == (expected == "p0")
    routing.local_prefill_tokens = 0
    placement = routing.route(replace(request_, avoid=frozenset()), pods, NOW)
    assert isinstance(placement, Placement)
    assert placement.prefill_pod == "p0"


def test_a_short_prompt_needs_no_prefill_pod() -> None:
    routing = router()
    routing.local_prefill_tokens = 32
    placement = routing.route(text(32), [taker()], NOW)
    assert isinstance(placement, Placement)
    assert placement.prefill_pod == "t"
    assert routing.route(text(33), [taker()], NOW) == NothingRoutable("prefill")


def test_short_prompts_of_a_burst_go_to_prefill_pods_when_decode_pods_have_enough() -> None:
    routing = router()
    routing.local_prefill_tokens = 32
    pods = [P, taker(decode_max_sequences=100)]
    chosen = Counter(routing.route(text(32), pods, NOW).prefill_pod for _ in range(10))
    assert chosen == {"t": 4, "p0": 6}


@pytest.mark.parametrize("skew_seconds", [-3600.0, 0.0, 3600.0])
@pytest.mark.parametrize(
    ("accepted", "heartbeats", "then", "counts"),
    [row[1:] for row in FORGETTING],
    ids=[row[0] for row in FORGETTING],
)
def test_an_own_placement_counts_after(
    accepted: bool, heartbeats: list[Heartbeat], then: float, counts: bool, skew_seconds: float
) -> None:
    """Whatever the clocks of the pods say."""
    first, *seen = [replace(beat, sent=beat.sent + NOW + skew_seconds) for beat in (BEFORE, *heartbeats)]
    one = router()
    placed = one.route(text(1000), [first, D], NOW + 0.5)
    assert isinstance(placed, Placement)
    if accepted:
        one.confirm(placed, [first, D])
    one.route(text(1), [*seen, pod("z"), D], NOW + then)  # z takes it, whatever is counted
    assert one.estimate_ttft_seconds(text(1), first, [first]) == pytest.approx(0.001 + 1.0 * counts)


def test_a_pod_takes_requests_until_its_queue_is_full() -> None:
    def outcome(waiting: int) -> object:
        return router(max_waiting=3).route(text(), [pod("a", prefill_waiting_requests=waiting), D], NOW)

    assert [type(outcome(n)) for n in (2, 3, 4)] == [Placement, Overloaded, Overloaded]


@pytest.mark.parametrize(
    ("waiting_tokens", "seconds"),
    [((500, 90_000), 1.0), ((5000, 7000), 5.0), ((29_000, 30_500), 29.0), ((31_000, 90_000), 30.0)],
)
def test_overload_ends_when_the_shortest_queue_does_within_bounds(
    waiting_tokens: tuple[int, int], seconds: float
) -> None:
    full = [
        pod(f"p{i}", prefill_waiting_requests=100, prefill_waiting_tokens=tokens)
        for i, tokens in enumerate(waiting_tokens)
    ]
    assert router().route(text(), [*full, D], NOW) == Overloaded(pytest.approx(seconds))


DECODE_COSTS = [
    ("room in the batch", {"decode_running": 7}, 0.0),
    ("the batch just full", {"decode_running": 8}, 0.0),
    ("two too many", {"decode_running": 10}, 2 * 0.02),
    ("three that wait", {"decode_running": 2, "decode_waiting": 3}, 3 * 0.02),
    ("both", {"decode_running": 10, "decode_waiting": 3}, 5 * 0.02),
    ("a step that was not measured", {"decode_waiting": 3, "itl_seconds": 0.0}, 3 * 0.001),
    ("a batch of unknown size", {"decode_running": 2, "decode_max_sequences": 0}, 1 * 0.02),
]


@pytest.mark.parametrize(
    ("load", "seconds"), [row[1:] for row in DECODE_COSTS], ids=[row[0] for row in DECODE_COSTS]
)
def test_a_pod_that_also_decodes_costs_a_step_for_each_sequence_that_waits(
    load: dict, seconds: float
) -> None:
    both = pod("m", "pd", **{"prefill_waiting_tokens": 400, "itl_seconds": 0.02, **load})
    assert router().estimate_ttft_seconds(text(100), both, [both]) == pytest.approx(0.4 + seconds + 0.1)
    prefills = replace(both, roles=["prefill"])
    assert router().estimate_ttft_seconds(text(100), prefills, [prefills]) == pytest.approx(0.5)


def test_own_placements_cost_a_step_each_once_the_batch_is_full() -> None:
    one = router()
    both = pod("m", "pd", decode_running=6, itl_seconds=0.02)
    seconds = []
    for i in range(4):
        seconds.append(one.estimate_ttft_seconds(text(100), both, [both]))
        one.route(text(100), [both], NOW + 0.1 + i / 100)
    expected = [0.1, 0.2, 0.3, 0.4 + 0.02]
    assert seconds == pytest.approx(expected)


TIES = [
    ("a tenth of a long wait", 1000, 99, {"a", "b", "c"}),
    ("more than a tenth of a long wait", 1000, 101, {"a"}),
    ("five milliseconds of a short one", 10, 4, {"a", "b", "c"}),
    ("more than five milliseconds of a short one", 10, 6, {"a"}),
]


@pytest.mark.parametrize(
    ("tokens", "ahead", "chosen"), [row[1:] for row in TIES], ids=[row[0] for row in TIES]
)
def test_pods_are_as_good_as_the_best_within(tokens: int, ahead: int, chosen: set[str]) -> None:
    pods = [pod("a"), pod("b", prefill_waiting_tokens=ahead), pod("c", prefill_waiting_tokens=ahead), D]
    assert {router(seed).route(text(tokens), pods, NOW).prefill_pod for seed in range(60)} == chosen


def test_of_two_that_are_as_good_as_the_best_the_better_one_is_taken() -> None:
    pods = [pod("a", prefill_waiting_tokens=99), pod("b"), D]
    assert {router(seed).route(text(1000), pods, NOW).prefill_pod for seed in range(20)} == {"b"}


def test_of_equal_pods_the_one_with_fewer_own_placements_is_taken() -> None:
    """What others have placed is certain to wait there; what one has placed oneself has only just been sent."""
    for seed in range(20):
        one = router(seed)
        a = pod("a")
        one.route(text(100), [a, D], NOW + 0.1)
        pods = [a, pod("b", prefill_waiting_tokens=100), D]
        assert one.route(text(100), pods, NOW + 0.2).prefill_pod == "b"


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


def test_the_last_token_of_a_prompt_is_computed_however_much_is_cached() -> None:
    a = pod("a", prefix_blocks=["b5"])
    request = text(96, prefix_blocks=tuple(f"b{i}" for i in range(6)))
    assert router().estimate_ttft_seconds(request, a, [a]) == pytest.approx(1 / 1000)


def test_an_image_costs_the_encoders_backlog_its_own_work_and_its_transfer() -> None:
    a = pod("a", "p")
    one = pod("e0", "e", encode_queued_work={"image": 1000}, encode_work_per_second={"image": 500.0})
    two = pod("e1", "e", encode_queued_work={"image": 424}, encode_work_per_second={"image": 300.0})
    new = pod("e2", "e")  # it has measured nothing: its work is no one's help yet
    expected = (1000 + 424 + 576) / 800 + 576 * EMBEDDING_SECONDS_PER_TOKEN + 600 / 1000
    assert router().estimate_ttft_seconds(image(), a, [a, one, two, new]) == pytest.approx(expected)


def test_a_pod_that_encodes_for_itself_transfers_nothing_and_waits_for_no_other_encoder() -> None:
    both = pod("b", "ep", encode_queued_work={"image": 424}, encode_work_per_second={"image": 500.0})
    other = pod("e", "e", encode_queued_work={"image": 10**6}, encode_work_per_second={"image": 500.0})
    estimate = router().estimate_ttft_seconds(image(), both, [both, other])
    assert estimate == pytest.approx((424 + 576) / 500 + 600 / 1000)


def test_the_longer_of_queue_and_encoding_counts() -> None:
    encoder = pod("e", "e", encode_work_per_second={"image": 576.0})
    transfer = 576 * EMBEDDING_SECONDS_PER_TOKEN
    for waiting, seconds in ((500, 1 + transfer), (1500, 1.5)):
        a = pod("a", prefill_waiting_tokens=waiting)
        assert router().estimate_ttft_seconds(image(), a, [a, encoder]) == pytest.approx(seconds + 0.6)


def test_media_of_one_kind_share_encoders_and_kinds_add_up() -> None:
    a = pod("a")
    encoder = pod("e", "e", encode_work_per_second={"image": 100.0, "audio": 50.0})
    features = (
        FeatureNeed("f1", "image", 100, 0),
        FeatureNeed("f2", "image", 200, 0),
        FeatureNeed("f3", "audio", 100, 0),
    )
    request = RouteRequest("r.0", 1000, 50, features=features)
    assert router().estimate_ttft_seconds(request, a, [a, encoder]) == pytest.approx(3 + 2 + 1)


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


@pytest.mark.parametrize(
    ("roles", "free"), [("e", True), ("ep", False)], ids=["an encoder pod", "a pod that encodes for itself"]
)
def test_a_feature_costs_no_encoding_only_where_a_job_can_be_sent_for_it(roles: str, free: bool) -> None:
    """Its job goes to the encoder pod that has it; a pod that encodes for itself takes no jobs."""
    here = pod("a")
    there = [
        here,
        pod("x", roles, features=["f1"]),
        pod("e", "e", encode_work_per_second={"image": 100.0}),
        D,
    ]
    seconds = [router().estimate_ttft_seconds(image(feature=f), here, there) for f in ("f1", "f2")]
    assert (seconds[0] < seconds[1]) is free
    assert (seconds[0] == seconds[1]) is not free
