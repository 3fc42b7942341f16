"""Tokens may come twice, out of order, from old attempts and dead pods: the client's output is each of them once, in order."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from mmd_api.contract.sampling import Guidance
from mmd_workers.gateway.placement.sequence_state import RequestState, SequenceSpec
from mmd_workers.wire.messages.gateway import RequestFailed, TokenItem
from mmd_workers.wire.messages.message_parts import Sampling

NOW = 1000.0
GUIDANCE = Guidance(2.0, [7, 8])


def state(max_tokens: int = 100) -> RequestState:
    sampling = Sampling(max_tokens=max_tokens)
    spec = SequenceSpec("r.0", [1, 2, 3], [], sampling, NOW, NOW + 60, guidance=GUIDANCE)
    return RequestState(spec)


def token(index: int, attempt: int = 0, last: bool = False, token_id: int | None = None) -> TokenItem:
    return TokenItem(
        "r.0", attempt, index, 100 + index if token_id is None else token_id, "stop" if last else None
    )


def ids(request: RequestState) -> list[int]:
    return request.token_ids.tolist()


@given(length=st.integers(1, 30), seed=st.integers(0, 2**32), moves=st.integers(0, 4))
@settings(max_examples=300, deadline=None)
def test_any_delivery_of_any_attempts_gives_every_token_once_and_in_order(
    length: int, seed: int, moves: int
) -> None:
    rng = random.Random(seed)
    request = state()
    taken: list[int] = []
    for move in range(moves + 1):
        placed = request.place("g", f"p{move}", ["d0"], cached_tokens=move)
        assert placed.cached_tokens == move
        assert placed.output_token_ids == [100 + i for i in range(len(taken))]
        assert (placed.guidance, placed.companion_tokens) == (GUIDANCE, 2 + len(taken))
        sent = [
            token(i, attempt=rng.choice([move, move, max(0, move - 1)]), last=i == length - 1)
            for i in range(length)
        ]
        if move < moves:
            sent = sent[: rng.randrange(length)]  # this attempt dies on the way
        else:
            sent = [token(i, attempt=move, last=i == length - 1) for i in range(length)]
        sent += rng.choices(sent, k=rng.randrange(5)) if sent else []
        rng.shuffle(sent)
        for item in sent:
            taken += [t.index for t in request.accept(item, "d0", NOW)]
        if request.finished:
            break
    assert taken == list(range(length))
    assert ids(request) == [100 + i for i in range(length)]
    assert request.finished


def test_tokens_ahead_of_a_gap_wait_for_it() -> None:
    request = state()
    request.place("g", "p", [])
    assert request.accept(token(1), "p", NOW) == []
    assert request.has_gap
    assert [t.index for t in request.accept(token(0), "p", NOW)] == [0, 1]
    assert not request.has_gap


def test_tokens_of_an_older_attempt_are_ignored() -> None:
    request = state()
    request.place("g", "p0", [])
    request.accept(token(0), "p0", NOW)
    request.place("g", "p1", [])
    assert request.accept(token(1, attempt=0), "p0", NOW) == []
    assert ids(request) == [100]


def test_nothing_counts_between_two_placements() -> None:
    request = state()
    request.place("g", "p0", [])
    request.unplace()
    assert request.accept(token(0), "p0", NOW) == []
    assert not request.fail(RequestFailed("r.0", 0, "p0", "internal", "late", True))


def test_tokens_beyond_the_limit_are_dropped() -> None:
    request = state(max_tokens=2)
    request.place("g", "p", [])
    assert request.accept(token(5), "p", NOW) == []
    assert not request.has_gap


def test_the_first_of_two_different_tokens_of_one_index_is_kept() -> None:
    request = state()
    request.place("g", "p", [])
    request.accept(token(0), "p", NOW)
    request.accept(token(0, token_id=7), "p", NOW)
    assert ids(request) == [100]
    assert request.duplicates == 1


def test_prefill_holds_it_until_the_decoder_reports() -> None:
    request = state()
    request.place("g", "p", ["d0", "d1"])
    assert request.certain_holder() == "p"
    request.accept(token(0), "p", NOW)
    assert request.certain_holder() is None
    assert request.possible_holders() == {"p", "d0", "d1"}
    request.accept(token(1), "d1", NOW)
    assert request.possible_holders() == {"d1"}


def test_a_pod_that_decodes_itself_holds_it_throughout() -> None:
    request = state()
    request.place("g", "p", [])
    request.accept(token(0), "p", NOW)
    assert request.certain_holder() == "p"


def test_an_unrequested_cancellation_is_a_retryable_failure() -> None:
    request = state()
    request.place("g", "p", [])
    request.accept(TokenItem("r.0", 0, 0, 5, "cancelled"), "p", NOW)
    assert request.failure is not None
    assert request.failure.retryable
    assert not request.finished


def test_only_engine_failures_count_and_each_counts_once() -> None:
    request = state()
    seen: list[int] = []
    for number, code in enumerate(
        (
            "engine_failed",
            "preempted",
            "peer_lost",
            "drained",
            "engine_dead",
            "overloaded",
            "",
            "engine_failed",
        )
    ):
        seen.append(request.place("g", f"p{number}", ["d0"]).engine_failures)
        for _ in range(2 if code else 0):
            assert request.fail(RequestFailed("r.0", number, f"p{number}", code, "it failed", retryable=True))
        request.unplace()
    seen.append(request.place("g", "p9", []).engine_failures)
    assert seen == [0, 1, 1, 1, 1, 1, 1, 1, 2]
    assert not request.fail(RequestFailed("r.0", 3, "p3", "engine_failed", "late", retryable=True))
    request.unplace()
    assert request.place("g", "p10", []).engine_failures == 2
