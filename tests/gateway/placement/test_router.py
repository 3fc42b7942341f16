"""Where requests go, as tables and properties; every clock is an argument."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmd_api.contract.load import PodLoad
from mmd_workers.caches.index import CacheIndex
from mmd_workers.features.held import feature_identity
from mmd_workers.gateway.placement.fleet import COMPARED_AT_ONCE, Fleet
from mmd_workers.gateway.placement.router import (
    EMBEDDING_SECONDS_PER_TOKEN,
    FeatureNeed,
    NeverFits,
    NothingRoutable,
    Overloaded,
    Placement,
    PlacementLimits,
    Router,
    RouteRequest,
)
from mmd_workers.gateway.placement.ttft_model import Factors, Terms
from mmd_workers.wire.messages.every_pod import CacheReport, Heartbeat

NOW = 1000.0


def pod(
    name: str, roles: str = "p", sent: float = NOW, state: str = "ready", revision: str = "r1", **more
) -> Heartbeat:
    names = {"e": "encode", "p": "prefill", "d": "decode"}
    given = ("node", "takes_prompts", "encodes_small_media")
    extra = {key: more.pop(key) for key in given if key in more}
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


BLOCKS_OF_PROMPT = tuple(b"b%d" % i for i in range(100))
SIZE = 16
FEATURE = feature_identity("f1")


def router(
    seed: int = 0, max_waiting: int = 100, cached: Mapping[str, Sequence[bytes]] | None = None
) -> Router:
    """`cached`: blocks of 16 tokens and features that pods have reported, by pod."""
    index, features = CacheIndex(), CacheIndex()
    for name, identities in (cached or {}).items():
        index.take(CacheReport(name, "i", 1, SIZE, [each for each in identities if each != FEATURE], []))
        features.take(CacheReport(name, "i", 1, 1, [each for each in identities if each == FEATURE], []))
    return Router("r1", PlacementLimits(max_waiting), random.Random(seed), index, features)


def prefix(blocks: int) -> dict[int, tuple[bytes, ...]]:
    return {SIZE: BLOCKS_OF_PROMPT[:blocks]}


def text(tokens: int = 100, **more) -> RouteRequest:
    return RouteRequest("r.0", tokens, 50, **more)


def image(tokens: int = 600, work: int = 576, feature: str = "f1", modality: str = "image") -> RouteRequest:
    return RouteRequest("r.0", tokens, 50, features=(FeatureNeed(feature, modality, work, 576),))


D = pod("d0", "d")


def newest(pods: Sequence[Heartbeat]) -> Callable[[str], Heartbeat | None]:
    return {beat.pod: beat for beat in pods}.get


def estimated(
    one: Router, request: RouteRequest, prefill: Heartbeat, *others: Heartbeat, now: float = NOW
) -> float:
    """Seconds to the first token, by the placement on the only pod that prefills; it is taken back."""
    placed = one.route(request, [prefill, *others, D], now)
    assert isinstance(placed, Placement)
    assert placed.prefill_pod == prefill.pod
    one.take_back(placed)
    return placed.estimated_ttft_seconds


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


def test_a_request_goes_to_the_pod_that_has_its_feature() -> None:
    pods = [pod("a"), pod("b"), pod("e", "e", encode_work_per_second={"image": 500.0}), D]
    for seed in range(5):
        assert router(seed, cached={"b": [FEATURE]}).route(image(), pods, NOW).prefill_pod == "b"


CACHED = [
    ("a cached prefix over an equal queue", [pod("a"), pod("b"), D], {"b": BLOCKS_OF_PROMPT[:18]}, "b"),
    (
        "a longer cached prefix over a shorter one",
        [pod("a"), pod("b"), D],
        {"a": BLOCKS_OF_PROMPT[:9], "b": BLOCKS_OF_PROMPT[:18]},
        "b",
    ),
    (
        "what is cached without a gap over more with one",
        [pod("a"), pod("b"), D],
        {"a": [*BLOCKS_OF_PROMPT[:1], *BLOCKS_OF_PROMPT[2:20]], "b": BLOCKS_OF_PROMPT[:9]},
        "b",
    ),
    (
        "a short queue over a small cached prefix",
        [pod("a"), pod("b", prefill_waiting_tokens=2000), D],
        {"b": BLOCKS_OF_PROMPT[:1]},
        "a",
    ),
    (
        "a cached prefix over a queue that costs less than the rest",
        [pod("a"), pod("b", prefill_waiting_tokens=200), D],
        {"b": BLOCKS_OF_PROMPT[:18]},
        "b",
    ),
]


@pytest.mark.parametrize(
    ("pods", "cached", "expected"), [row[1:] for row in CACHED], ids=[row[0] for row in CACHED]
)
def test_a_prompt_of_twenty_blocks_goes_to(
    pods: list[Heartbeat], cached: dict[str, list[bytes]], expected: str
) -> None:
    for seed in range(5):
        placed = router(seed, cached=cached).route(text(320, prefix=prefix(20)), pods, NOW)
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
def test_a_request_that_fits_no_pod_is_refused_with_numbers(pods, role):
    outcome = router().route(text(100), pods, NOW)  # 100 + 50 tokens are 10 blocks, the prompt and a token 7
    assert isinstance(outcome, NeverFits)
    assert f"the largest {role} pod holds {16 * min(p.load.kv_blocks_total for p in pods)}" in outcome.message
    assert "lower max_tokens" in outcome.message


def test_a_companion_needs_room_and_time_as_the_prompt_does() -> None:
    blocks = [pod("p"), pod("d", "d", kv_blocks_total=19)]  # 304 tokens
    assert isinstance(router().route(text(100, companion_tokens=104), blocks, NOW), Placement)
    outcome = router().route(text(100, companion_tokens=105), blocks, NOW)
    assert isinstance(outcome, NeverFits)
    assert (
        "its negative prompt of 105 and up to 50 output tokens after each need KV for 305 tokens"
        in outcome.message
    )
    whole = replace(
        pod("pd", "pd", kv_blocks_total=19), max_model_len=200
    )  # more than a context, and less than two
    assert isinstance(router().route(text(100, companion_tokens=105), [whole], NOW), NeverFits)
    assert isinstance(router().route(text(140, companion_tokens=104), [whole], NOW), NeverFits)
    assert isinstance(router().route(text(148), [whole], NOW), Placement)
    alone, guided = (
        estimated(router(), request, pod("p")) for request in (text(2000), text(1000, companion_tokens=1000))
    )
    assert guided == pytest.approx(alone)


def test_pods_with_unknown_or_context_limited_kv_stay_eligible():
    unknown = [pod("p"), pod("d", "d")]
    assert isinstance(router().route(text(10_000), unknown, NOW), Placement)
    at_context = [pod("p"), replace(pod("d", "d", kv_blocks_total=8), max_model_len=128)]
    assert isinstance(router().route(text(100), at_context, NOW), Placement)


def test_a_request_that_fits_nowhere_gets_the_capacity_of_the_largest_pod() -> None:
    pods = [pod("p"), *(pod(name, "d", kv_blocks_total=n) for name, n in (("x", 3), ("y", 5), ("z", 4)))]
    outcome = router().route(text(100), pods, NOW)
    assert isinstance(outcome, NeverFits)
    assert "150 tokens, but the largest decode pod holds 80;" in outcome.message


def test_a_pool_of_single_token_blocks_counts_as_reported() -> None:
    pods = [pod("p"), pod("d", "d", kv_blocks_total=149, kv_block_tokens=1)]
    assert isinstance(router().route(text(100), pods, NOW), NeverFits)
    pods[1] = pod("d", "d", kv_blocks_total=150, kv_block_tokens=1)
    assert isinstance(router().route(text(100), pods, NOW), Placement)


@pytest.mark.parametrize(
    ("known", "cached"), [([], 0), ([b"b0"], 16), ([b"b0", b"b1", b"x"], 32), ([b"b1", b"b2"], 0)]
)
def test_a_cached_prefix_saves_the_time_of_its_tokens(known: list[bytes], cached: int) -> None:
    a = pod("a")
    one = router(cached={"a": known})
    assert estimated(one, text(100, prefix=prefix(6)), a) == pytest.approx((100 - cached) / 1000)


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
    one.confirm(placed, newest(pods))
    shown = pod("x", "d", sent=NOW + 0.2, kv_blocks_total=100, kv_blocks_free=80, kv_blocks_reserved=20)
    assert one.route(text(320), [pods[0], shown, pods[2]], NOW + 0.3).decoder == "x"


def test_a_burst_between_two_heartbeats_spreads_over_equal_pods() -> None:
    one = router()
    pods = [*(pod(f"p{i}") for i in range(4)), D]
    counts = Counter(one.route(text(), pods, NOW + 0.1 + i / 1000).prefill_pod for i in range(100))
    assert set(counts) == {"p0", "p1", "p2", "p3"}
    assert max(counts.values()) - min(counts.values()) <= 4


def test_a_burst_stays_with_its_cached_prefix_while_that_is_faster() -> None:
    """Of each prompt 16 tokens are missing there, and 1,600 elsewhere."""
    one = router(cached={"b": BLOCKS_OF_PROMPT[:99]})
    pods = [pod("a"), pod("b"), D]
    request = text(1600, prefix=prefix(100))
    placed = [one.route(request, pods, NOW + 0.1 + i / 100) for i in range(20)]
    assert [each.prefill_pod for each in placed] == ["b"] * 20
    assert placed[19].terms == Terms(queue=19 * 0.016, prefill=0.016)


def test_a_wholly_cached_prompt_counts_as_one_waiting_token() -> None:
    one = router(cached={"a": BLOCKS_OF_PROMPT[:100]})
    placed = [one.route(text(1600, prefix=prefix(100)), [pod("a"), D], NOW + 0.1) for _ in range(3)]
    assert [each.terms.queue for each in placed] == pytest.approx([0, 0.001, 0.002])


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
        one.confirm(placed, newest(pods))
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
    assert estimated(one, text(100), pods[0], now=NOW + 0.1) == pytest.approx(0.5 + 0.1)


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


def seen(end: int) -> FeatureNeed:
    """A medium that ends after so many tokens of the prompt."""
    return FeatureNeed("f1", "image", 16, 16, end)


@pytest.mark.parametrize(
    ("request_", "pods", "expected"),
    [
        pytest.param(text(32), [P, taker()], "t", id="a short prompt"),
        pytest.param(text(33), [P, taker()], "p0", id="a long prompt"),
        pytest.param(text(32), [P, pod("d0", "d")], "p0", id="of a pod that does not take prompts"),
        pytest.param(
            text(90, prefix=prefix(5)), [P, taker("u"), taker("has4")], "has4", id="its rest is short"
        ),
        pytest.param(text(32, features=(seen(20),)), [P, taker()], "p0", id="media that are not cached"),
        pytest.param(
            text(90, prefix=prefix(5), features=(seen(64),)), [P, taker("has4")], "has4", id="media cached"
        ),
        pytest.param(
            text(90, prefix=prefix(5), features=(seen(65),)),
            [P, taker("has4")],
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
            text(90, prefix=prefix(5)), [P, taker("has5"), taker("has4")], "has5", id="the longest prefix"
        ),
        pytest.param(
            text(32), [P, taker(kv_blocks_total=10, kv_blocks_free=0)], "p0", id="no KV block is left"
        ),
    ],
)
def test_a_prompt_with_little_left_to_compute_goes_to_decode(
    request_: RouteRequest, pods: list[Heartbeat], expected: str
) -> None:
    routing = router(cached={"has4": BLOCKS_OF_PROMPT[:4], "has5": BLOCKS_OF_PROMPT[:5]})
    routing.limits = replace(routing.limits, local_prefill_tokens=32)
    placement = routing.route(request_, pods, NOW)
    assert isinstance(placement, Placement)
    assert placement.prefill_pod == expected
    assert bool(placement.decode_pods) == (expected == "p0")
    routing.limits = replace(routing.limits, local_prefill_tokens=0)
    placement = routing.route(replace(request_, avoid=frozenset()), pods, NOW)
    assert isinstance(placement, Placement)
    assert placement.prefill_pod == "p0"


def test_a_short_prompt_needs_no_prefill_pod() -> None:
    routing = router()
    routing.limits = replace(routing.limits, local_prefill_tokens=32)
    placement = routing.route(text(32), [taker()], NOW)
    assert isinstance(placement, Placement)
    assert placement.prefill_pod == "t"
    assert routing.route(text(33), [taker()], NOW) == NothingRoutable("prefill")


def test_bursts_of_short_prompts_overflow_to_prefill_until_heartbeats_show_room() -> None:
    routing = router()
    routing.limits = replace(routing.limits, local_prefill_tokens=32)
    pods = [P, taker(decode_max_sequences=100)]
    placements = [routing.route(text(32), pods, NOW) for _ in range(10)]
    assert Counter(one.prefill_pod for one in placements) == {"t": 4, "p0": 6}  # type: ignore[union-attr]
    for one in placements:
        routing.confirm(one, newest(pods))  # type: ignore[arg-type]
    shown = [P, taker(decode_max_sequences=100, sent=NOW + 1)]
    assert routing.route(text(32), shown, NOW + 1).prefill_pod == "t"  # type: ignore[union-attr]
    refused = routing.route(text(32), shown, NOW + 1)
    for _ in range(10):
        routing.take_back(refused)  # type: ignore[arg-type]
        refused = routing.route(text(32), shown, NOW + 1)
        assert refused.prefill_pod == "t"  # type: ignore[union-attr]


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
        one.confirm(placed, newest([first, D]))
    faster = pod("z", prefill_tokens_per_second=1e6)
    one.route(text(1), [*seen, faster, D], NOW + then)  # it takes it, whatever is counted
    assert estimated(one, text(1), first, now=NOW + then) == pytest.approx(0.001 + 1.0 * counts)


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
def test_a_decoding_pod_costs_a_step_for_each_waiting_sequence(load: dict, seconds: float) -> None:
    both = pod("m", "pd", **{"prefill_waiting_tokens": 400, "itl_seconds": 0.02, **load})
    assert estimated(router(), text(100), both) == pytest.approx(0.4 + seconds + 0.1)
    prefills = replace(both, roles=["prefill"])
    assert estimated(router(), text(100), prefills) == pytest.approx(0.5)


def test_own_placements_cost_a_step_each_once_the_batch_is_full() -> None:
    one = router()
    both = pod("m", "pd", decode_running=6, itl_seconds=0.02)
    placed = [one.route(text(100), [both], NOW + 0.1 + i / 100) for i in range(4)]
    seconds = [each.estimated_ttft_seconds for each in placed]  # type: ignore[union-attr]
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


@pytest.mark.parametrize(("ahead", "chosen"), [(9, {"a", "b", "c"}), (20, {"a"})])
def test_an_overhead_common_to_all_pods_does_not_make_them_equal(ahead: int, chosen: set[str]) -> None:
    pods = [pod("a"), pod("b", prefill_waiting_tokens=ahead), pod("c", prefill_waiting_tokens=ahead), D]
    found = set()
    for seed in range(60):
        one = router(seed)
        one.model.factors = Factors(overhead=1.0)
        found.add(one.route(text(100), pods, NOW).prefill_pod)
    assert found == chosen


def test_the_better_of_two_nearly_equal_pods_is_taken() -> None:
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
def test_only_ready_pods_of_this_revision_with_room_are_chosen(pods, seed, media) -> None:
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
    a = pod("a")
    one = router(cached={"a": BLOCKS_OF_PROMPT[:6]})
    assert estimated(one, text(96, prefix=prefix(6)), a) == pytest.approx(1 / 1000)


def test_an_image_costs_the_encoders_backlog_its_own_work_and_its_transfer() -> None:
    a = pod("a", "p")
    one = pod("e0", "e", encode_queued_work={"image": 1000}, encode_work_per_second={"image": 500.0})
    two = pod("e1", "e", encode_queued_work={"image": 424}, encode_work_per_second={"image": 300.0})
    new = pod("e2", "e")  # it has measured nothing: its work is no one's help yet
    expected = (1000 + 424 + 576) / 800 + 576 * EMBEDDING_SECONDS_PER_TOKEN + 600 / 1000
    assert estimated(router(), image(), a, one, two, new) == pytest.approx(expected)


def test_work_that_no_encoder_has_taken_yet_is_backlog_too() -> None:
    one, encoder = router(), pod("e", "e", encode_work_per_second={"image": 576.0})
    one.waiting_encode_work = {"image": 1152.0, "video": 1e6}
    placed = one.route(image(), [pod("p"), encoder, D], NOW)
    assert placed.terms.encode == 3.0


def test_prompts_that_wait_for_their_media_are_ahead_of_other_media_alone() -> None:
    pods = [
        pod("a", prefill_waiting_tokens=900, prefill_blocked_tokens=800),
        pod("b", prefill_waiting_tokens=300),
        D,
    ]
    assert router().route(text(), pods, NOW).prefill_pod == "a"
    assert router().route(image(), pods, NOW).prefill_pod == "b"


def test_a_self_encoding_pod_needs_no_transfer_and_no_other_encoder() -> None:
    both = pod("b", "ep", encode_queued_work={"image": 424}, encode_work_per_second={"image": 500.0})
    other = pod("e", "e", encode_queued_work={"image": 10**6}, encode_work_per_second={"image": 500.0})
    assert estimated(router(), image(), both, other) == pytest.approx((424 + 576) / 500 + 600 / 1000)


def beside_encoders(
    *encoders: Heartbeat,
    limit: int = 576,
    only: bool = False,
    first: bool = False,
    holder: str = "nobody",
    **load,
) -> Placement:
    """Of an image of 576 tokens on a prefill pod that has a tower; both kinds of towers do 576 patches a second."""
    one, rates = router(cached={holder: [FEATURE]}), {"encode_work_per_second": {"image": 576.0}}
    one.limits = replace(one.limits, local_encode_tokens=limit)
    request = replace(image(), encoders_only=only, encoders_first=first)
    prefill = pod("p", **{"encodes_small_media": True, **rates, **load})
    placed = one.route(request, [prefill, *encoders, D], NOW)
    assert isinstance(placed, Placement)
    return placed


IDLE_ENCODER = pod("e", "e", encode_work_per_second={"image": 576.0})
BUSY_ENCODER = pod("e", "e", encode_work_per_second={"image": 576.0}, encode_queued_work={"image": 5760})
ENCODED_HERE = [
    ("a small medium, which need not travel", [IDLE_ENCODER], {}, True),
    ("no medium of one token more", [IDLE_ENCODER], {"limit": 575}, False),
    ("none where the limit is 0", [BUSY_ENCODER], {"limit": 0}, False),
    ("none that it has", [], {"holder": "p", "limit": 1}, False),
    ("none where it has no tower", [BUSY_ENCODER], {"encodes_small_media": False}, False),
    ("a small medium while no encoder pod is there", [], {}, True),
    ("no larger medium while no encoder pod is there", [], {"limit": 575}, False),
    ("none of a suspected medium", [BUSY_ENCODER], {"only": True}, False),
    ("none of a suspected medium while no encoder pod is there", [], {"only": True}, False),
    ("none of a further answer", [BUSY_ENCODER], {"first": True}, False),
    ("one of a further answer while no encoder pod is there", [], {"first": True}, True),
    ("none that an encoder pod has", [IDLE_ENCODER], {"holder": "e"}, False),
    ("none where prompts wait that share the pod with its tower", [IDLE_ENCODER], {"prefill_waiting_tokens": 100}, False),
    ("one where media wait longer than prompts", [BUSY_ENCODER], {"prefill_waiting_tokens": 1000}, True),
    ("none where its own tower is as busy", [BUSY_ENCODER], {"encode_queued_work": {"image": 5800}}, False),
]  # fmt: skip


@pytest.mark.parametrize(
    ("encoders", "options", "here"), [row[1:] for row in ENCODED_HERE], ids=[row[0] for row in ENCODED_HERE]
)
def test_a_prefill_pod_with_a_tower_beside_encoder_pods_encodes(
    encoders: list[Heartbeat], options: dict, here: bool
) -> None:
    assert beside_encoders(*encoders, **options).encode_here == here


def test_the_estimate_is_that_of_the_tower_which_is_chosen() -> None:
    """576 patches a second and 1,000 tokens a second; 500 tokens wait."""
    here = beside_encoders(BUSY_ENCODER, prefill_waiting_tokens=500)
    assert here.terms == Terms(queue=0.5, encode=1.0, prefill=0.6, in_turn=True)
    assert here.estimated_ttft_seconds == pytest.approx(2.1)
    there = beside_encoders(IDLE_ENCODER, prefill_waiting_tokens=500)
    assert there.terms == Terms(0.5, 1.0, 576 * EMBEDDING_SECONDS_PER_TOKEN, 0.6)


def test_the_prefill_pod_with_the_idle_tower_encodes_a_small_medium() -> None:
    one, rates = router(), {"encode_work_per_second": {"image": 576.0}}
    one.limits = replace(one.limits, local_encode_tokens=576)
    tower = {"encodes_small_media": True, **rates}
    pods = [pod("a", encode_queued_work={"image": 5760}, **tower), pod("b", **tower), BUSY_ENCODER, D]
    placed = one.route(image(), pods, NOW)
    assert (placed.prefill_pod, placed.encode_here) == ("b", True)


def test_older_pods_that_encode_everything_are_estimated_by_their_own_towers() -> None:
    """Their configuration is older than the gateway's, which knows of the new pool."""
    one, rates = router(), {"encode_work_per_second": {"image": 576.0}}
    one.limits = replace(one.limits, local_encode_tokens=0)
    pods = [
        pod("a", "ep", encode_queued_work={"image": 5760}, **rates),
        pod("b", "ep", **rates),
        IDLE_ENCODER,
        D,
    ]
    placed = one.route(image(), pods, NOW)
    assert (placed.prefill_pod, placed.encode_here) == ("b", False)
    assert placed.terms == Terms(encode=1.0, prefill=0.6)


def test_media_placed_since_the_last_heartbeat_count_as_work_of_the_tower() -> None:
    one, rates = router(), {"encode_work_per_second": {"image": 576.0}}
    one.limits = replace(one.limits, local_encode_tokens=576)
    pods = [pod("p", encodes_small_media=True, **rates), BUSY_ENCODER, D]
    placed = [one.route(image(), pods, NOW + number / 100) for number in range(10)]
    assert [each.encode_here for each in placed] == [True] * 7 + [False] * 3
    assert placed[1].terms.queue == pytest.approx(1.6)


def test_what_a_tower_has_already_is_counted_once() -> None:
    one, rates = router(), {"encode_work_per_second": {"image": 576.0}}
    one.limits = replace(one.limits, local_encode_tokens=576)
    busy = pod("p", encodes_small_media=True, encode_queued_work={"image": 2880}, **rates)
    placed = [one.route(image(), [busy, BUSY_ENCODER, D], NOW + number / 100) for number in range(3)]
    assert [each.terms.encode for each in placed] == [6.0] * 3
    assert [each.terms.queue for each in placed] == pytest.approx([0.0, 1.6, 3.2])


def test_the_longer_of_queue_and_encoding_counts() -> None:
    encoder = pod("e", "e", encode_work_per_second={"image": 576.0})
    transfer = 576 * EMBEDDING_SECONDS_PER_TOKEN
    for waiting, seconds in ((500, 1 + transfer), (1500, 1.5)):
        a = pod("a", prefill_waiting_tokens=waiting)
        assert estimated(router(), image(), a, encoder) == pytest.approx(seconds + 0.6)


@pytest.mark.parametrize(("blocks", "encodes"), [(0, True), (36, True), (37, False), (60, False)])
def test_a_medium_whose_tokens_are_all_cached_is_neither_encoded_nor_moved(
    blocks: int, encodes: bool
) -> None:
    one, a = router(cached={"a": BLOCKS_OF_PROMPT[:blocks]}), pod("a")
    encoder = pod("e", "e", encode_work_per_second={"image": 576.0})
    need = FeatureNeed("f1", "image", 576, 576, end=590)
    request = RouteRequest("r.0", 1000, 50, features=(need,), prefix=prefix(60))
    seconds = (1.0 + 576 * EMBEDDING_SECONDS_PER_TOKEN) * encodes + (1000 - 16 * blocks) / 1000
    assert estimated(one, request, a, encoder) == pytest.approx(seconds)


def test_media_of_one_kind_share_encoders_and_kinds_add_up() -> None:
    a = pod("a")
    encoder = pod("e", "e", encode_work_per_second={"image": 100.0, "audio": 50.0})
    features = (
        FeatureNeed("f1", "image", 100, 0),
        FeatureNeed("f2", "image", 200, 0),
        FeatureNeed("f3", "audio", 100, 0),
    )
    request = RouteRequest("r.0", 1000, 50, features=features)
    assert estimated(router(), request, a, encoder) == pytest.approx(3 + 2 + 1)


@given(tokens=st.integers(1, 10**5), backlog=st.integers(0, 10**7), cut=st.integers(0, 100))
@settings(max_examples=100, deadline=None)
def test_a_texts_estimate_ignores_encoder_backlog_and_falls_with_cached_tokens(tokens, backlog, cut) -> None:
    request = text(tokens, prefix=prefix(min(100, tokens // SIZE)))
    idle = pod("a", "ep")
    busy = pod("a", "ep", encode_queued_work={"video": backlog}, encode_work_per_second={"video": 1.0})
    seconds = estimated(router(), request, idle)
    assert estimated(router(), request, busy) == seconds
    assert estimated(router(cached={"a": BLOCKS_OF_PROMPT[:cut]}), request, idle) <= seconds


@pytest.mark.parametrize(
    ("roles", "free"), [("e", True), ("ep", False)], ids=["an encoder pod", "a pod that encodes for itself"]
)
def test_a_cached_feature_saves_encoding_only_where_its_holder_takes_jobs(roles: str, free: bool) -> None:
    """Its job goes to the encoder pod that has it; a pod that encodes for itself takes no jobs."""
    slow = {"prefill_waiting_tokens": 10**6} if "p" in roles else {}
    others = pod("x", roles, **slow), pod("e", "e", encode_work_per_second={"image": 100.0})
    one = router(cached={"x": [FEATURE]})
    seconds = [estimated(one, image(feature=f), pod("a"), *others) for f in ("f1", "f2")]
    assert (seconds[0] < seconds[1]) is free
    assert (seconds[0] == seconds[1]) is not free


# --- where bytes travel -------------------------------------------------------------------------------------------------


def moving(one: Router, *, same: float = 0.001, other: float = 0.1) -> Router:
    """Its KV has 1,000 bytes a token; a megabyte takes so many seconds on one node, and between two."""
    one.kv.note("x", "y", same_node=True, tokens=1000, num_bytes=10**6, seconds=same, now=NOW)
    one.kv.note("x", "z", same_node=False, tokens=1000, num_bytes=10**6, seconds=other, now=NOW)
    return one


def test_the_decoder_on_the_prefill_pods_node_comes_first_among_equals() -> None:
    pods = [pod("p", node="n1"), pod("x", "d", node="n2"), pod("y", "d", node="n1"), pod("z", "d")]
    for seed in range(5):
        placed = moving(router(seed)).route(text(1000), pods, NOW)
        assert isinstance(placed, Placement)
        assert placed.decode_pods[0] == "y"


def test_prefill_goes_where_a_decoder_with_room_is_near() -> None:
    pods = [
        pod("a", node="n1"),
        pod("b", node="n2"),
        pod("x", "d", node="n1", decode_running=8),
        pod("y", "d", node="n2"),
    ]
    for seed in range(5):
        placed = moving(router(seed)).route(text(1000), pods, NOW)
        assert isinstance(placed, Placement)
        assert (placed.prefill_pod, placed.decoder) == ("b", "y")


def test_a_longer_queue_is_not_worth_a_decoder_that_is_near() -> None:
    pods = [
        pod("a", node="n1"),
        pod("b", node="n2", prefill_waiting_tokens=900),
        pod("x", "d", node="n1", decode_running=8),
        pod("y", "d", node="n2"),
    ]
    placed = moving(router()).route(text(1000), pods, NOW)
    assert isinstance(placed, Placement)
    assert placed.prefill_pod == "a"


def test_pods_of_an_unknown_node_are_near_to_nobody() -> None:
    pods = [pod("p"), pod("x", "d", decode_running=1), pod("y", "d", node="n1"), pod("q", node="n2")]
    placed = moving(router()).route(text(1000), pods, NOW)
    assert isinstance(placed, Placement)
    assert placed.decoder == "y"


def test_a_pair_that_was_slow_is_avoided() -> None:
    one = router()
    pods = [pod("p"), pod("x", "d"), pod("y", "d")]
    one.route(text(), pods, NOW)
    one.kv_moved("p", "x", 1000, 10**6, 1.0, NOW)
    one.kv_moved("p", "y", 1000, 10**6, 0.01, NOW)
    for number in range(5):
        placed = one.route(text(1000), pods, NOW + number * 10)
        assert isinstance(placed, Placement)
        assert placed.decode_pods == ("y", "x")


def test_a_decoder_that_has_the_prefix_needs_no_kv_of_it() -> None:
    one = moving(router(cached={"y": BLOCKS_OF_PROMPT[:60]}), other=1.0)
    pods = [pod("p"), pod("x", "d"), pod("y", "d", decode_running=1)]
    assert one.route(text(1000), pods, NOW).decoder == "x"
    assert one.route(text(1000, prefix=prefix(60)), pods, NOW + 10).decoder == "y"


def test_prefill_stays_where_the_prefix_is_when_the_decoder_has_it_too() -> None:
    """Of 1,600 tokens 16 have to travel, although not on one node; without the prefix elsewhere, all would be computed."""
    both = {"a": BLOCKS_OF_PROMPT[:99], "x": BLOCKS_OF_PROMPT[:99]}
    pods = [
        pod("a", node="n1", prefill_tokens_per_second=16_000.0),
        pod("b", node="n2", prefill_tokens_per_second=16_000.0),
        pod("x", "d", node="n2"),
    ]
    for seed in range(5):
        placed = moving(router(seed, cached=both), other=1.0).route(text(1600, prefix=prefix(100)), pods, NOW)
        assert isinstance(placed, Placement)
        assert placed.prefill_pod == "a"


def test_embeddings_are_as_slow_as_the_pod_received_them_before() -> None:
    pods = [pod("a"), pod("b"), pod("e", "e", encode_work_per_second={"image": 10**6}), D]
    one = router()
    one.take_back(one.route(image(), pods, NOW))
    for _ in range(60):
        one.embeddings_moved("a", 576, 576 * 8192, 2.0, NOW)
        one.embeddings_moved("b", 576, 576 * 8192, 0.01, NOW)
    for number in range(5):
        placed = one.route(image(), pods, NOW + number / 10)
        assert placed.prefill_pod == "b"
        one.take_back(placed)
    slow, fast = (estimated(one, image(), receiver, pods[2]) for receiver in pods[:2])
    assert slow - fast == pytest.approx(1.99, rel=0.01)


def test_a_pod_that_received_one_feature_slowly_receives_others_before_long() -> None:
    """Once five seconds instead of 36 ms; at the other pod a request waits for 100 ms."""
    pods = [
        pod("a", prefill_waiting_tokens=100),
        pod("b"),
        pod("e", "e", encode_work_per_second={"image": 10**6}),
        D,
    ]
    one, now = router(), NOW
    for _ in range(20):
        for name in "ab":
            one.embeddings_moved(name, 1200, 1200 * 8100, 0.036, now)
    one.embeddings_moved("b", 1200, 1200 * 8100, 5.0, now)
    chosen = []
    for _ in range(200):
        now += 1
        placed = one.route(image(), pods, now)
        assert isinstance(placed, Placement)
        one.take_back(placed)
        one.embeddings_moved(placed.prefill_pod, 1200, 1200 * 8100, 0.036, now)
        chosen.append(placed.prefill_pod)
    assert chosen[:20] == ["a"] * 20
    assert chosen[180:] == ["b"] * 20


def test_a_placement_names_its_terms_and_outcomes_change_the_next_estimate() -> None:
    one = router()
    pods = [pod("a", prefill_waiting_tokens=500), D]
    placed = one.route(text(100), pods, NOW)
    assert isinstance(placed, Placement)
    assert placed.terms == Terms(queue=0.5, prefill=0.1)
    assert placed.estimated_ttft_seconds == pytest.approx(0.6)
    one.take_back(placed)
    one.learn(placed, 1.2)
    again = one.route(text(100), pods, NOW + 1)
    assert isinstance(again, Placement)
    assert 0.6 < again.estimated_ttft_seconds < 1.2
    assert again.terms == placed.terms


def test_no_more_decoders_are_named_than_a_message_has_room_for() -> None:
    pods = [
        pod("p"),
        *(pod(f"d{n:03}", "d", decode_running=n, decode_max_sequences=1000) for n in range(100)),
    ]
    placed = router().route(text(), pods, NOW)
    assert isinstance(placed, Placement)
    assert list(placed.decode_pods) == [f"d{n:03}" for n in range(16)]


changes = st.lists(
    st.tuples(
        st.integers(0, 5),
        st.sampled_from(["beat", "beat", "gone", "state", "route", "route", "route"]),
        st.integers(0, 10**4),
    ),
    max_size=30,
)


@given(
    changes=changes, cached=st.dictionaries(st.sampled_from([f"p{n}" for n in range(6)]), st.integers(0, 20))
)
@settings(max_examples=150, deadline=None)
def test_a_router_that_followed_heartbeats_estimates_like_a_new_one(changes, cached) -> None:
    held = {name: BLOCKS_OF_PROMPT[:blocks] for name, blocks in cached.items()}
    one, now = router(cached=held, max_waiting=10**9), NOW
    beats = {f"p{n}": pod(f"p{n}", ["p", "ep", "pd"][n % 3]) for n in range(6)} | {
        "d0": D,
        "e": pod("e", "e"),
    }
    request = replace(image(feature="f1"), prefix=prefix(20))
    for number, action, amount in changes:
        name, now = f"p{number}", now + 0.1
        if action == "gone":
            beats.pop(name, None)
        elif action == "route":
            outcome = one.route(request, list(beats.values()), now)
            if isinstance(outcome, Placement):
                one.take_back(outcome)
                ready = one.routable(list(beats.values()))
                encoders = [beat for beat in ready if beat.roles == ["encode"]]
                expected = {
                    beat.pod: estimated(router(cached=held, max_waiting=10**9), request, beat, *encoders)
                    for beat in ready
                    if "prefill" in beat.roles
                }
                assert outcome.estimated_ttft_seconds == pytest.approx(expected[outcome.prefill_pod])
                best = min(expected.values())
                assert outcome.estimated_ttft_seconds <= best + max(0.005, best * 0.1) + 1e-9
        else:
            beat = beats.get(name, pod(name, ["p", "ep", "pd"][number % 3]))
            load = replace(beat.load, prefill_waiting_tokens=amount)
            beat = replace(beat, sent=now, load=load)
            if action == "state":
                beat = replace(beat, state="draining" if beat.state == "ready" else "ready")
            beats[name] = beat


@pytest.mark.parametrize("place", [0, COMPARED_AT_ONCE - 1, COMPARED_AT_ONCE, 2 * COMPARED_AT_ONCE + 3])
def test_a_heartbeat_is_taken_in_wherever_its_pod_is_among_many(place: int) -> None:
    beats = [pod(f"p{number:03}", prefill_waiting_tokens=900) for number in range(2 * COMPARED_AT_ONCE + 4)]
    fleet = Fleet("r1")
    fleet.update(beats)
    newest = list(beats)
    newest[place] = pod(f"p{place:03}", prefill_waiting_tokens=7)
    assert fleet.update(newest) == [newest[place]]
    assert [row for row, tokens in enumerate(fleet.prefill.waiting_tokens) if tokens == 7] == [place]
    assert fleet.update(list(newest)) == []
