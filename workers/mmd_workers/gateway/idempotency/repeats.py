"""Serves requests with an idempotency key: the first makes the answer, and all repeats get the same answer.

A repeat gets the answer from its beginning, or resumes a stream after the last event that it received. `retained` keeps the answers, and
`answer_claims` finds those of other gateways.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from http import HTTPStatus

from starlette.datastructures import Headers

from mmd_api.contract.errors import (
    AnswerGoneError,
    ClientGoneError,
    DeadlineError,
    InvalidValueError,
    MmdError,
    PeerLostError,
)
from mmd_workers.gateway.answers.exchange import Exchange, until_gone
from mmd_workers.gateway.basics.api_errors import ApiError, api_error
from mmd_workers.gateway.idempotency.answer_claims import AnswerClaims
from mmd_workers.gateway.idempotency.retained import (
    RUN_CHARACTERS,
    End,
    RequestName,
    RetainedAnswer,
    RetainedAnswers,
    RetainedPiece,
)

KEY_HEADER = "idempotency-key"
EVENT_HEADER = "last-event-id"
REPEATED_HEADER = "idempotent-replayed"
EVENT_HEAD_BYTES = 256  # the beginning of an event, which has its number
MAX_HOLDERS = 3  # gateways asked in turn when each proves not to have the answer
POLL_SECONDS = 1.0  # the wait for data after the deadline, while the request's own end is on its way

_log = logging.getLogger(__name__)

_KEY = re.compile(r"[\x21-\x7e]{1,255}")
_NUMBER = re.compile(rb'^data: \{"type":"[^"]*","sequence_number":([0-9]+)', re.MULTILINE)
_EVENT = re.compile(rf"([0-9a-f]{{{RUN_CHARACTERS}}})-([0-9]{{1,9}})")

Make = Callable[[Exchange], Awaitable[bool]]
"""Makes an answer, errors included, for the client of this exchange; returns True if the answer is not an error."""


@dataclass(frozen=True, slots=True)
class KeyedRequest:
    """A request's key, and the stream that it resumes.

    `run`: the run whose stream the client resumes; empty if it resumes none. `at`: the first block that the client does not have.
    """

    name: RequestName
    run: str = ""
    at: int = 0

    @property
    def resumes(self) -> bool:
        """True if the client has the beginning of a stream and resumes it."""
        return bool(self.run)


def keyed_request(headers: Headers, tenant: str, path: str) -> KeyedRequest | None:
    """Parse the headers of a request; None if it has no key.

    Raises:
        ApiError: 400, naming the header.
    """
    keys, events = set(headers.getlist(KEY_HEADER)), headers.getlist(EVENT_HEADER)
    if not keys:
        if events:
            raise _invalid(EVENT_HEADER, f"a stream is resumed by its {KEY_HEADER}; send both, or none")
        return None
    key = keys.pop()
    if keys or not _KEY.fullmatch(key):
        raise _invalid(KEY_HEADER, "send one key of 1 to 255 visible ASCII characters")
    name = RequestName.of(tenant, path, key)
    if not events:
        return KeyedRequest(name)
    event = _EVENT.fullmatch(events[0])
    if len(events) > 1 or event is None:
        raise _invalid(EVENT_HEADER, "send the id of the last event that you have, as it was in the stream")
    return KeyedRequest(name, event[1], int(event[2]) + 1)


class Repeats:
    """All requests of this gateway with an idempotency key."""

    def __init__(self, answers: RetainedAnswers, claims: AnswerClaims) -> None:
        self.answers, self._claims = answers, claims

    def find(self, request: KeyedRequest, digest: bytes) -> RetainedAnswer | None:
        """The answer to a request that this gateway has or is making. `digest`: digest of the request's body.

        Raises:
            IdempotencyKeyReusedError: the key belongs to a request with another body.
        """
        return self.answers.find(request.name.digest, digest)

    async def repeat(
        self, exchange: Exchange, request: KeyedRequest, answer: RetainedAnswer, deadline: float
    ) -> None:
        """Respond with an answer that `find` returned. `deadline`: Unix time until which the client waits for it.

        Raises:
            MmdError: the answer is gone, or does not arrive in time.
            ApiError: the request is invalid.
            ClientGoneError: the client hung up, or closing its connection is the only way to report that the rest is missing.
        """
        await until_gone(exchange.receive, _deliver(exchange, answer, request, deadline, is_first=False))

    async def first(
        self,
        exchange: Exchange,
        request: KeyedRequest,
        digest: bytes,
        deadline: float,
        make: Make,
        not_needed: Callable[[], None],
    ) -> None:
        """Make the answer for this client and all that repeat its request, or read it from the gateway that has it.

        Either continues as long as one of these clients waits. `digest` and `deadline` are those of `find` and `repeat`. `not_needed` is called
        when it is certain that `make` will not be called.

        Raises:
            TooManyRequestsError: too many answers are being made.
            ClientGoneError: no client waits for the answer any more.
        """
        name = request.name
        if request.resumes:  # the answer has no beginning, which repeats would need
            name = RequestName(name.tenant, f"{name.digest} {exchange.request_id}")
            not_needed()
        answer = self.answers.begin(name, digest)
        answer.begin_at(request.at)
        work = asyncio.create_task(self._make(exchange, request, answer, make, not_needed))
        client = asyncio.create_task(
            until_gone(exchange.receive, _deliver(exchange, answer, request, deadline, is_first=True))
        )
        try:
            await asyncio.wait({client})
            is_gone = False
            try:
                client.result()
            except ClientGoneError:
                is_gone = True  # another client reads the answer, or may still ask for it
            except MmdError as error:
                await exchange.fail(api_error(error))
            except ApiError as error:
                await exchange.fail(error)
            await answer.until_unwanted()
            if not answer.state:
                self.answers.finish(answer, "broken", keep=False)
                if is_gone:
                    raise ClientGoneError("the client hung up, and none repeated its request")
        finally:
            for task in (work, client):
                task.cancel()
            await asyncio.wait({work, client})
            if not work.cancelled() and (bug := work.exception()) is not None:
                _log.error("making the answer of %s failed", exchange.request_id, exc_info=bug)

    async def _make(
        self,
        exchange: Exchange,
        request: KeyedRequest,
        answer: RetainedAnswer,
        make: Make,
        not_needed: Callable[[], None],
    ) -> None:
        end: End = "broken"
        maker = replace(exchange, send=answer.put, notes=dict(exchange.notes))
        try:
            relayed = await self._relayed(exchange, request, answer, not_needed)
            if relayed is not None:
                end = relayed
                return
            if request.resumes:
                raise AnswerGoneError(
                    "no stream with this idempotency-key is retained; send the request again without last-event-id"
                )
            end = "complete" if await make(maker) else "failed"
        except MmdError as error:
            answer.fault = error
            if not answer.status:
                answer.relayed = False  # this error is not the answer of the other gateway
                await maker.fail(api_error(error))
                end = "failed"
        finally:
            self.answers.finish(answer, end, keep=end == "complete" and not request.resumes)

    async def _relayed(
        self,
        exchange: Exchange,
        request: KeyedRequest,
        answer: RetainedAnswer,
        on_begin: Callable[[], None],
    ) -> End | None:
        """Read the answer from another gateway, if one has it. `on_begin` is called when the answer begins to arrive."""
        lost = ""
        claim = "" if request.resumes else exchange.request_id
        answer.claim = claim  # even if the keeper does not reply
        for _ in range(MAX_HOLDERS):
            claimed = await self._claims.holder(request.name, claim, lost)
            if claimed.holder in ("", self._claims.pod):
                break
            answer.relayed = True
            end = await self._claims.relay(
                claimed.holder, request.name, answer, exchange.request_id, on_begin
            )
            if end is not None:
                answer.claim = ""
                return end
            answer.relayed = False  # must be reset before this gateway makes the answer
            lost = claimed.claim
        return None


async def _deliver(
    exchange: Exchange, answer: RetainedAnswer, request: KeyedRequest, deadline: float, *, is_first: bool
) -> None:
    """Send an answer to one client as it grows. `is_first`: the answer is made for this client, and ends at its deadline.

    Raises:
        AnswerGoneError: the next block is no longer kept.
        DeadlineError: the answer has not ended by this client's deadline.
        MmdError: the rest of the answer will not arrive.
        ApiError: there is no such stream, or no such event in it.
    """
    has_begun = False
    if answer.status:  # checked before this client counts as a reader
        _check_resumption(request, answer)
    last_event = answer.block(request.at - 1)
    with answer.reader(request.at) as reader:
        try:
            while True:
                first_block, remaining_seconds = reader.at, deadline - time.time()
                piece = await answer.read(
                    reader, remaining_seconds if remaining_seconds > 0 else POLL_SECONDS
                )
                last_event = _last_event(answer, range(first_block, reader.at)) or last_event
                if piece.status and not has_begun:
                    _check_resumption(request, answer)
                    has_begun = True
                    await _begin(exchange, piece, is_repeat=not is_first or answer.relayed)
                if piece.blocks:
                    body = b"".join(piece.blocks)
                    await exchange.send({"type": "http.response.body", "body": body, "more_body": True})
                if piece.end == "broken":
                    raise _fault(answer)
                if piece.end:
                    await exchange.send({"type": "http.response.body", "body": b""})
                    return
                if not piece.blocks and time.time() >= deadline and (not is_first or answer.relayed):
                    raise DeadlineError(
                        "the request that this one repeats has not ended before the deadline of this one; retry, or raise "
                        "x-request-timeout or spec.gateway.requestTimeoutSeconds"
                    )
        except MmdError as error:
            if has_begun and not exchange.streaming:  # too late for an error response: the connection ends
                raise ClientGoneError(error.message) from error
            raise
        finally:
            number = _NUMBER.search(last_event, 0, EVENT_HEAD_BYTES)
            exchange.next_event = int(number[1]) + 1 if number else request.at


def _last_event(answer: RetainedAnswer, blocks: range) -> bytes:
    """The last of these blocks other than comments; empty if there is none."""
    newest_first = map(answer.block, reversed(blocks))
    return next((block for block in newest_first if not block.startswith(b":")), b"")


def _fault(answer: RetainedAnswer) -> MmdError:
    """The reason why the rest will not arrive. It is not an event with an id, because the stream may go on at the gateway that makes it."""
    if answer.fault is None:
        return PeerLostError("the request that makes this answer was cancelled; retry")
    return type(answer.fault)(answer.fault.message)


def _check_resumption(request: KeyedRequest, answer: RetainedAnswer) -> None:
    """Check that a beginning answer is the stream that the client resumes, if any; error responses pass unchecked."""
    if not request.resumes or answer.status != HTTPStatus.OK:
        return
    if not answer.is_stream:
        raise _invalid(EVENT_HEADER, "this answer is no stream; send the request without it")
    if answer.run != request.run:
        raise AnswerGoneError(
            "the stream with this event is no longer retained, and another has its idempotency-key; send the request without last-event-id"
        )
    if answer.is_beyond or (request.at > answer.next_block and not answer.relayed):
        raise _invalid(EVENT_HEADER, "the stream has no such event; send the id of one that you have")


async def _begin(exchange: Exchange, piece: RetainedPiece, *, is_repeat: bool) -> None:
    """Send the head. A repeat has the id of the request that it repeats."""
    headers = list(piece.headers)
    names = Headers(raw=headers)
    if is_repeat:
        headers.append((REPEATED_HEADER.encode(), b"true"))
        exchange.timeline.repeats = names.get("x-request-id", "")
    exchange.streaming = names.get("content-type", "").startswith("text/event-stream")
    exchange.timeline.status = piece.status
    await exchange.send({"type": "http.response.start", "status": piece.status, "headers": headers})


def _invalid(header: str, message: str) -> ApiError:
    return ApiError(InvalidValueError(f"{header}: {message}"), param=header)
