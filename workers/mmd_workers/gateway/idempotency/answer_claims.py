"""Finds the gateway with the answer to a request with an idempotency key, and reads the answer there. Gateways share nothing but NATS.

For each request name, one of the Ready gateways is the keeper of its claims, and all of them agree on which. A gateway that is about to make an
answer claims it at the keeper. If another gateway was first, it reads that gateway's answer instead; a gateway gives up its claim when it drops
the answer. A claim is a hint: if its gateway has no such answer or does not reply, the next gateway takes over that claim, but no newer one. So
a request runs twice only if the Ready gateways change between the two, if they do not reach each other, or if there are more claims than a
keeper stores.
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
TEND_SECONDS = 1.0  # the interval between checks for expired answers
CLAIM_SECONDS = 2.0
READ_SECONDS = 10.0  # the other gateway counts as lost after this time without a reply
AGAIN_SECONDS = 0.25  # the pause after a failed read
WAIT_SECONDS = 2.0
"""The longest wait for new data before a reader gets an empty reply; a reader with slow clients asks just as often."""

_log = logging.getLogger(__name__)


class AnswerClaims:
    """One gateway's part: its own claims, the claims it keeps for others, and the reading of its answers by others.

    `others()`: the other Ready gateways.
    """

    def __init__(
        self, bus: Bus, pod: str, others: Callable[[], Sequence[str]], answers: RetainedAnswers
    ) -> None:
        self._bus, self.pod, self._others, self._answers = bus, pod, others, answers
        self._claims: dict[str, OrderedDict[str, AnswerClaimed]] = {}  # by tenant and name, oldest first
        self._num_claims = 0
        self._given_up: deque[AnswerClaim] = deque(maxlen=MAX_CLAIMS)  # not yet reported to their keepers
        self._wake = asyncio.Event()
        self._log = RateLimitedLog(_log)
        self._subscriptions: list[Subscription] = []
        self._task: asyncio.Task[None] | None = None
        answers.on_drop = self._give_up

    async def start(self) -> None:
        """Serve other gateways, and start to forget expired answers."""
        subjects, bus = self._bus.subjects, self._bus
        self._subscriptions = [
            await bus.serve(subjects.answer_claim(self.pod), AnswerClaim, self._on_claim),
            await bus.serve(subjects.answer_read(self.pod), AnswerRead, self._on_read),
        ]
        self._task = asyncio.create_task(self._tend_for_ever(), name="answer-claims")

    async def close(self) -> None:
        """Stop serving other gateways."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        for subscription in self._subscriptions:
            await subscription.unsubscribe()

    async def holder(self, name: RequestName, claim: str, lost: str = "") -> AnswerClaimed:
        """The gateway that has or is making the answer, and its claim; this gateway, if it is to make the answer under the new `claim`.

        With an empty `claim` the answer is only looked up; if no gateway has it, the holder is empty. `lost`: a claim whose gateway turned out
        not to have the answer.
        """
        request = AnswerClaim(name.digest, name.tenant, self.pod, claim, lost)
        keeper = self._keeper(name.digest)
        if keeper == self.pod:
            return self._take(request)
        try:
            return await self._send_claim(keeper, request)
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
        """Read another gateway's answer of this name into `answer`.

        Returns how the answer ended, or None if the other gateway does not have it, which is impossible once `on_begin` has been called.

        Raises:
            AnswerGoneError: the other gateway no longer has the next block.
            IdempotencyKeyReusedError: at the other gateway the key belongs to a request with another body.
            PeerLostError: the other gateway was lost before the end.
        """
        has_begun, partial_block, last_reply = False, b"", time.monotonic()
        while True:
            max_bytes = 0 if answer.is_full else PIECE_BYTES
            run = answer.run if has_begun else ""
            read = AnswerRead(
                name.digest,
                answer.digest.hex(),
                reader,
                run,
                answer.next_block,
                len(partial_block),
                max_bytes,
            )
            try:
                piece, data = await self._bus.request_frame(
                    self._bus.subjects.answer_read(holder), read, AnswerPiece, READ_SECONDS
                )
            except (PeerLostError, DeadlineError, OverloadedError) as error:
                # A busy gateway replies later, and so do all gateways after a restart of the message server.
                is_retryable = has_begun or isinstance(error, OverloadedError)
                if is_retryable and time.monotonic() - last_reply < READ_SECONDS:
                    await asyncio.sleep(AGAIN_SECONDS)
                    continue
                if has_begun:
                    raise PeerLostError(
                        f"gateway {holder}, which has this answer, does not respond; retry"
                    ) from error
                return None
            last_reply = time.monotonic()
            if piece.end == "unknown":
                if has_begun:
                    raise PeerLostError(f"gateway {holder} no longer has this answer; retry")
                return None
            if piece.end == "beyond" and not piece.status:
                return None
            if piece.status and not has_begun:
                has_begun, answer.is_beyond = True, piece.end == "beyond"
                on_begin()
                answer.begin(
                    piece.status, [(n.encode("latin-1"), v.encode("latin-1")) for n, v in piece.headers]
                )
            if piece.end == "beyond":
                return "failed"
            blocks, offset = [], 0
            for length in piece.lengths:
                blocks.append(partial_block + bytes(data[offset : offset + length]))
                offset, partial_block = offset + length, b""
            if piece.cut and blocks:
                partial_block = blocks.pop()
            answer.extend(blocks)
            if piece.end:
                return piece.end
            await answer.room(WAIT_SECONDS)

    def _keeper(self, name: str) -> str:
        """The keeper of a name, by rendezvous hashing: a gateway that joins or leaves changes the keeper of few names."""
        pods = [self.pod, *self._others()]
        return max(pods, key=lambda pod: hashlib.sha256(f"{name} {pod}".encode()).digest())

    async def _send_claim(self, keeper: str, claim: AnswerClaim) -> AnswerClaimed:
        subject = self._bus.subjects.answer_claim(keeper)
        return await self._bus.request(subject, claim, AnswerClaimed, CLAIM_SECONDS)

    def _give_up(self, answer: RetainedAnswer) -> None:
        """Give up the claim of an answer that this gateway no longer has."""
        if not answer.claim:
            return
        lost = AnswerClaim(answer.name.digest, answer.name.tenant, self.pod, lost=answer.claim)
        if self._keeper(lost.name) == self.pod:
            self._take(lost)
        else:
            self._given_up.append(lost)
            self._wake.set()

    async def _tend_for_ever(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TEND_SECONDS):
                    await self._wake.wait()
            try:
                await self._tend()
            except Exception as error:  # noqa: BLE001 - without this loop answers would be kept for ever
                self._log.warning(
                    "tend", f"forgetting answers failed: {type(error).__name__}: {error}", error
                )

    async def _tend(self) -> None:
        while self._answers.forget_one():
            await asyncio.sleep(0)
        self._wake.clear()
        silent_keepers: set[str] = set()
        while self._given_up:
            lost = self._given_up.popleft()
            keeper = self._keeper(lost.name)
            if keeper in silent_keepers:
                continue
            if keeper == self.pod:
                self._take(lost)
                continue
            try:
                await self._send_claim(keeper, lost)
            except (PeerLostError, DeadlineError, OverloadedError):
                # A claim is a hint: the next gateway takes it over.
                silent_keepers.add(keeper)

    async def _on_claim(self, claim: AnswerClaim) -> AnswerClaimed:
        return self._take(claim)

    def _take(self, claim: AnswerClaim) -> AnswerClaimed:
        tenant_claims = self._claims.get(claim.tenant, OrderedDict())
        current = tenant_claims.get(claim.name)
        if current is not None and current.claim == claim.lost:
            if claim.claim or current.holder == claim.gateway:
                self._forget(claim.tenant, claim.name)
            current = None
        # A gateway that claims a name again no longer has the answer that it claimed before.
        if current is not None and (current.holder != claim.gateway or not claim.claim):
            return current
        if not claim.claim:
            return AnswerClaimed("", "")
        if current is not None:
            self._forget(claim.tenant, claim.name)
        granted = AnswerClaimed(claim.gateway, claim.claim)
        tenant_claims = self._claims.setdefault(claim.tenant, OrderedDict())
        tenant_claims[claim.name] = granted
        self._num_claims += 1
        # If the gateway needs no API keys, all requests belong to one tenant without a name.
        if claim.tenant and len(tenant_claims) > MAX_CLAIMS_OF_TENANT:
            self._forget(claim.tenant, next(iter(tenant_claims)))
        if self._num_claims > MAX_CLAIMS:
            fullest_tenant = max(self._claims, key=lambda tenant: len(self._claims[tenant]))
            self._forget(fullest_tenant, next(iter(self._claims[fullest_tenant])))
        return granted

    def _forget(self, tenant: str, name: str) -> None:
        tenant_claims = self._claims[tenant]
        del tenant_claims[name]
        self._num_claims -= 1
        if not tenant_claims:
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
