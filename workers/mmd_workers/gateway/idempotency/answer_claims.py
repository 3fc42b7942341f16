"""Which gateway has the answer to a request with an idempotency key, and reading it there. Gateways share nothing but NATS.

One of the Ready gateways keeps the claims of a name, the same one as all of them see it. A gateway that is about to make an answer claims
it there, and reads the answer of the gateway that was first, which gives its claim up when it drops the answer. A claim is a hint: where its
gateway has no such answer, or does not reply, the next one takes it over, but only that claim and no newer one. So a request runs twice only
if the gateways that are Ready change between the two, or do not reach each other, or if there are more claims than are kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Literal

from mmd_api.contract.errors import DeadlineError, OverloadedError, PeerLostError
from mmd_workers.basics.limited_log import RateLimitedLog
from mmd_workers.gateway.idempotency.retained import (
    PIECE_BYTES,
    End,
    RequestName,
    RetainedAnswer,
    RetainedAnswers,
    RetainedPiece,
)
from mmd_workers.wire.bus import Bus, Subscription
from mmd_workers.wire.codec import Frame
from mmd_workers.wire.messages.gateway import AnswerClaim, AnswerClaimed, AnswerPiece, AnswerRead

MAX_CLAIMS = 8192
MAX_CLAIMS_OF_TENANT = 2048
TEND_SECONDS = 1.0  # between two looks for answers whose time is over
CLAIM_SECONDS = 2.0
READ_SECONDS = 10.0  # without a reply, until the other gateway counts as lost
AGAIN_SECONDS = 0.25  # after a reading that failed
WAIT_SECONDS = (
    2.0  # for news, before a reader has an empty reply; a reader whose own clients are slow asks as often
)

_log = logging.getLogger(__name__)


class AnswerClaims:
    """This gateway's part: its own claims, those it keeps, and its answers as others read them. `others()`: the gateways that are Ready besides
    this one.
    """

    def __init__(
        self, bus: Bus, pod: str, others: Callable[[], Sequence[str]], answers: RetainedAnswers
    ) -> None:
        self._bus, self.pod, self._others, self._answers = bus, pod, others, answers
        self._claims: dict[str, OrderedDict[str, AnswerClaimed]] = {}  # by tenant and name, the oldest first
        self._num_claims = 0
        self._given_up: deque[AnswerClaim] = deque(maxlen=MAX_CLAIMS)  # that their keepers do not know yet
        self._wanted = asyncio.Event()
        self._log = RateLimitedLog(_log)
        self._subscriptions: list[Subscription] = []
        self._task: asyncio.Task[None] | None = None
        answers.on_drop = self._give_up

    async def start(self) -> None:
        """Listen to other gateways, and forget what is old."""
        subjects, bus = self._bus.subjects, self._bus
        self._subscriptions = [
            await bus.serve(subjects.answer_claim(self.pod), AnswerClaim, self._on_claim),
            await bus.serve(subjects.answer_read(self.pod), AnswerRead, self._on_read),
        ]
        self._task = asyncio.create_task(self._tend_for_ever(), name="answer-claims")

    async def close(self) -> None:
        """Stop listening."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        for subscription in self._subscriptions:
            await subscription.unsubscribe()

    async def holder(self, name: RequestName, claim: str, lost: str = "") -> AnswerClaimed:
        """The gateway that has the answer, or is making it, and its claim: this one, if it is to make it under the new `claim`. Without
        `claim` the answer is only looked for, and no gateway may have it. `lost`: the claim of one that does not have it after all.
        """
        request = AnswerClaim(name.digest, name.tenant, self.pod, claim, lost)
        keeper = self._keeper(name.digest)
        if keeper == self.pod:
            return self._take(request)
        try:
            return await self._tell(keeper, request)
        except (PeerLostError, DeadlineError, OverloadedError) as error:
            self._log.warning(
                f"keeper {keeper}",
                f"making an answer although gateway {keeper} may know of one with its idempotency key: {error.message}",
            )
            return AnswerClaimed(self.pod, claim)

    async def relay(
        self,
        holder: str,
        name: RequestName,
        answer: RetainedAnswer,
        reader: str,
        on_begin: Callable[[], None] = lambda: None,
    ) -> End | None:
        """Read another gateway's answer of this name into this one. Returns its end; None: it is not there, which is never so after
        `on_begin` has been called.

        Raises:
            AnswerGoneError: it no longer has that block.
            IdempotencyKeyReusedError: the key stands for a request with another body there.
            PeerLostError: the other gateway is gone before the end.
        """
        begun, rest, replied = False, b"", time.monotonic()
        while True:
            most = 0 if answer.is_full else PIECE_BYTES
            run = answer.run if begun else ""
            read = AnswerRead(
                name.digest, answer.digest.hex(), reader, run, answer.next_block, len(rest), most
            )
            try:
                piece, data = await self._bus.request_frame(
                    self._bus.subjects.answer_read(holder), read, AnswerPiece, READ_SECONDS
                )
            except (PeerLostError, DeadlineError, OverloadedError) as error:
                # A busy gateway replies later, and so does each when the message server has been restarted.
                is_there = begun or isinstance(error, OverloadedError)
                if is_there and time.monotonic() - replied < READ_SECONDS:
                    await asyncio.sleep(AGAIN_SECONDS)
                    continue
                if begun:
                    raise PeerLostError(
                        f"gateway {holder}, which has this answer, does not respond; retry"
                    ) from error
                return None
            replied = time.monotonic()
            if piece.end == "unknown":
                if begun:
                    raise PeerLostError(f"gateway {holder} no longer has this answer; retry")
                return None
            if piece.end == "beyond" and not piece.status:
                return None
            if piece.status and not begun:
                begun, answer.is_beyond = True, piece.end == "beyond"
                on_begin()
                answer.begin(
                    piece.status, [(n.encode("latin-1"), v.encode("latin-1")) for n, v in piece.headers]
                )
            if piece.end == "beyond":
                return "failed"
            blocks, offset = [], 0
            for length in piece.lengths:
                blocks.append(rest + bytes(data[offset : offset + length]))
                offset, rest = offset + length, b""
            if piece.cut and blocks:
                rest = blocks.pop()
            answer.extend(blocks)
            if piece.end:
                return piece.end
            await answer.room(WAIT_SECONDS)

    def _keeper(self, name: str) -> str:
        """By rendezvous: a gateway that comes or goes changes the keeper of few names."""
        pods = [self.pod, *self._others()]
        return max(pods, key=lambda pod: hashlib.sha256(f"{name} {pod}".encode()).digest())

    async def _tell(self, keeper: str, claim: AnswerClaim) -> AnswerClaimed:
        subject = self._bus.subjects.answer_claim(keeper)
        return await self._bus.request(subject, claim, AnswerClaimed, CLAIM_SECONDS)

    def _give_up(self, answer: RetainedAnswer) -> None:
        """Its answer is not here any more."""
        if not answer.claim:
            return
        lost = AnswerClaim(answer.name.digest, answer.name.tenant, self.pod, lost=answer.claim)
        if self._keeper(lost.name) == self.pod:
            self._take(lost)
        else:
            self._given_up.append(lost)
            self._wanted.set()

    async def _tend_for_ever(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TEND_SECONDS):
                    await self._wanted.wait()
            try:
                await self._tend()
            except Exception as error:  # noqa: BLE001 - without this loop answers would be kept for ever
                self._log.warning(
                    "tend", f"forgetting answers failed: {type(error).__name__}: {error}", error
                )

    async def _tend(self) -> None:
        while self._answers.forget_one():
            await asyncio.sleep(0)
        self._wanted.clear()
        silent: set[str] = set()
        while self._given_up:
            lost = self._given_up.popleft()
            keeper = self._keeper(lost.name)
            if keeper in silent:
                continue
            if keeper == self.pod:
                self._take(lost)
                continue
            try:
                await self._tell(keeper, lost)
            except (
                PeerLostError,
                DeadlineError,
                OverloadedError,
            ):  # a claim is a hint: the next one takes it over
                silent.add(keeper)

    async def _on_claim(self, claim: AnswerClaim) -> AnswerClaimed:
        return self._take(claim)

    def _take(self, claim: AnswerClaim) -> AnswerClaimed:
        of_tenant = self._claims.get(claim.tenant, OrderedDict())
        held = of_tenant.get(claim.name)
        if held is not None and held.claim == claim.lost:
            if claim.claim or held.holder == claim.gateway:
                self._forget(claim.tenant, claim.name)
            held = None
        # A gateway that claims once more no longer has what it claimed before.
        if held is not None and (held.holder != claim.gateway or not claim.claim):
            return held
        if not claim.claim:
            return AnswerClaimed("", "")
        if held is not None:
            self._forget(claim.tenant, claim.name)
        taken = AnswerClaimed(claim.gateway, claim.claim)
        of_tenant = self._claims.setdefault(claim.tenant, OrderedDict())
        of_tenant[claim.name] = taken
        self._num_claims += 1
        # Where the gateway needs no API keys, all requests are of one tenant, which has no name.
        if claim.tenant and len(of_tenant) > MAX_CLAIMS_OF_TENANT:
            self._forget(claim.tenant, next(iter(of_tenant)))
        if self._num_claims > MAX_CLAIMS:
            most = max(self._claims, key=lambda tenant: len(self._claims[tenant]))
            self._forget(most, next(iter(self._claims[most])))
        return taken

    def _forget(self, tenant: str, name: str) -> None:
        of_tenant = self._claims[tenant]
        del of_tenant[name]
        self._num_claims -= 1
        if not of_tenant:
            del self._claims[tenant]

    async def _on_read(self, read: AnswerRead) -> Frame:
        answer = self._answers.find_for(read.reader, read.name, bytes.fromhex(read.body))
        if answer is None or answer.relayed or (read.run and read.run != answer.run):
            return Frame(AnswerPiece(0, [], [], False, "unknown"), b"")
        if read.at > answer.next_block:
            piece = RetainedPiece(answer.status, answer.headers, [], False, "")
            return _frame(piece, "beyond")
        reader = answer.remote_reader(read.reader, read.at, read.skip)
        piece = await answer.read(reader, WAIT_SECONDS, min(read.most_bytes, PIECE_BYTES))
        if piece.end:
            answer.remote_has_all(read.reader)
        return _frame(piece, piece.end)


def _frame(piece: RetainedPiece, end: End | Literal["beyond"]) -> Frame:
    headers = [[name.decode("latin-1"), value.decode("latin-1")] for name, value in piece.headers]
    lengths = [len(block) for block in piece.blocks]
    header = AnswerPiece(piece.status, headers, lengths, piece.cut, end)
    return Frame(header, b"".join(piece.blocks))
