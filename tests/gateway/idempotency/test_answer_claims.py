"""The claims that one gateway keeps of all: one holder at a time for each name, and no tenant's claims at the cost of another's."""

from __future__ import annotations

from typing import Any, cast

import pytest

from mmd_workers.gateway.idempotency import answer_claims
from mmd_workers.gateway.idempotency.answer_claims import AnswerClaims
from mmd_workers.gateway.idempotency.retained import RequestName, RetainedAnswers
from mmd_workers.wire.bus import Bus
from mmd_workers.wire.messages.gateway import AnswerClaim, AnswerClaimed, AnswerPiece, AnswerRead

BODY = b"digest of a body"
NAME = RequestName.of("tenant", "chatcmpl-", "key")
HEAD: dict[str, Any] = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/event-stream"), (b"x-request-id", b"chatcmpl-98765432deadbeef")],
}


def claims_of(answers: RetainedAnswers) -> AnswerClaims:
    """Those of a gateway that is alone, and so keeps all of them itself: it sends nothing."""
    return AnswerClaims(cast("Bus", None), "gateway-0", list, answers)


async def claim(
    claims: AnswerClaims, gateway: str, number: str, lost: str = "", name: RequestName = NAME
) -> AnswerClaimed:
    return await claims._on_claim(AnswerClaim(name.digest, name.tenant, gateway, number, lost))


async def test_a_gateway_takes_over_only_the_claim_that_was_lost() -> None:
    """A request fails at gateway-0 and is sent again at both: gateway-1 finds the old claim stale, while gateway-0 makes the answer anew."""
    claims = claims_of(RetainedAnswers(1 << 20))
    assert await claim(claims, "gateway-0", "a") == AnswerClaimed("gateway-0", "a")
    assert await claim(claims, "gateway-1", "b") == AnswerClaimed("gateway-0", "a")
    assert await claim(claims, "gateway-0", "c") == AnswerClaimed("gateway-0", "c")
    assert await claim(claims, "gateway-1", "b", lost="a") == AnswerClaimed("gateway-0", "c")
    assert await claim(claims, "gateway-1", "b", lost="c") == AnswerClaimed("gateway-1", "b")


async def test_a_gateway_that_only_looks_takes_no_claim_and_ends_none() -> None:
    claims = claims_of(RetainedAnswers(1 << 20))
    assert await claim(claims, "gateway-1", "") == AnswerClaimed("", "")
    await claim(claims, "gateway-0", "a")
    assert await claim(claims, "gateway-1", "") == AnswerClaimed("gateway-0", "a")
    assert await claim(claims, "gateway-1", "", lost="a") == AnswerClaimed("", "")
    assert await claim(claims, "gateway-1", "b") == AnswerClaimed("gateway-0", "a")


async def test_a_gateway_gives_up_its_own_claim_alone() -> None:
    claims = claims_of(RetainedAnswers(1 << 20))
    await claim(claims, "gateway-0", "a")
    await claim(claims, "gateway-0", "", lost="older")
    assert await claim(claims, "gateway-1", "b") == AnswerClaimed("gateway-0", "a")
    await claim(claims, "gateway-0", "", lost="a")
    assert await claim(claims, "gateway-1", "b") == AnswerClaimed("gateway-1", "b")


async def test_an_answer_that_is_dropped_takes_its_claim_along() -> None:
    answers = RetainedAnswers(1 << 20)
    claims = claims_of(answers)
    answer = answers.begin(NAME, BODY)
    answer.claim = "a"
    assert (await claims.holder(NAME, "a")).holder == "gateway-0"
    answers.finish(answer, "failed", keep=False)
    assert await claim(claims, "gateway-1", "b") == AnswerClaimed("gateway-1", "b")


async def test_the_claims_of_a_tenant_displace_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_claims, "MAX_CLAIMS_OF_TENANT", 10)
    monkeypatch.setattr(answer_claims, "MAX_CLAIMS", 25)
    claims = claims_of(RetainedAnswers(1 << 20))
    await claim(claims, "gateway-0", "a")
    for tenant in ("loud", "louder", "loudest"):
        for n in range(100):
            await claim(claims, "gateway-1", "x", name=RequestName.of(tenant, "chatcmpl-", str(n)))
    assert await claim(claims, "gateway-1", "b") == AnswerClaimed("gateway-0", "a")
    assert claims._num_claims == sum(map(len, claims._claims.values())) == 25


async def test_a_reader_gets_nothing_of_another_run_than_it_began_with() -> None:
    answers = RetainedAnswers(1 << 20)
    claims = claims_of(answers)
    answer = answers.begin(NAME, BODY)
    await answer.put(dict(HEAD))
    await answer.put({"type": "http.response.body", "body": b"data: 1\n\n"})

    async def read(run: str, at: int) -> AnswerPiece:
        frame = await claims._on_read(AnswerRead(NAME.digest, BODY.hex(), "reader", run, at, 0, 1000))
        assert isinstance(frame.header, AnswerPiece)
        return frame.header

    assert (await read("deadbeef", 0)).lengths
    assert (await read("0123abcd", 0)).end == "unknown"
    assert (await read("", 2)).end == "beyond"
    assert (await read("", 2)).status == 200


async def test_a_reader_beyond_the_end_does_not_count_as_one() -> None:
    answers = RetainedAnswers(1 << 20)
    claims = claims_of(answers)
    answer = answers.begin(NAME, BODY)
    await answer.put(dict(HEAD))
    await claims._on_read(AnswerRead(NAME.digest, BODY.hex(), "reader", "", 9, 0, 1000))
    assert not answer.has_readers
