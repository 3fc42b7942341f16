"""What the gateway knows of one sequence: attempts, tokens in order, who may hold it. Pure: no clock, no network, no text."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from mmd_api.contract.answers import FinishReason
from mmd_api.contract.errors import RequestCancelledError, SuspectError
from mmd_api.contract.sampling import Guidance
from mmd_workers.wire.messages.gateway import RequestFailed, TokenItem
from mmd_workers.wire.messages.message_parts import FeatureRef, PromptLogprob, Sampling, TokenLogprob
from mmd_workers.wire.messages.prefill import Cancel, GenerateRequest


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """What is to be generated; the same for every attempt, unless a medium of it cannot be encoded. Times are Unix seconds."""

    request_id: str
    token_ids: list[int]
    features: list[FeatureRef]
    sampling: Sampling
    arrived: float
    deadline: float
    trace: dict[str, str] = field(default_factory=dict)
    adapter: str = ""
    cache_salt: str = ""
    guidance: Guidance | None = None


@dataclass(frozen=True, slots=True)
class Taken:
    """A token of the output, in order. Log probabilities only where the request asks for them, those of its prompt with the first token."""

    token_id: int
    finish_reason: FinishReason | None
    logprob: float | None = None
    top_logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprob] = field(default_factory=list)


class RequestState:
    """One sequence through all its attempts: every token counts once, whoever sends it, however often and in which order.

    Tokens of the current attempt alone are taken. An attempt begins at the index where the last one got to, so the joined
    output has neither a repeated nor a missing token. Of a token that has been taken only the id is kept, which the next attempt needs.
    """

    def __init__(self, spec: SequenceSpec) -> None:
        self.spec = spec
        self.attempt = -1
        self.engine_failures = 0  # attempts that ended with `SuspectError`
        self.token_ids = array("l")
        self.finish_reason: FinishReason | None = None
        self.failure: RequestFailed | None = None
        self.prefill_pod: str | None = None
        self.decode_pods: tuple[str, ...] = ()
        self.decoding_pod: str | None = None
        self.last_token_at: float | None = None
        self.duplicates = 0
        self._ahead: dict[int, TokenItem] = {}
        self._tokens_before_attempt = 0
        self._first_attempt = 0  # with the present prompt
        self._num_taken = 0
        self._with_logprobs: deque[TokenItem] = deque()  # of the tokens that have not been taken

    @property
    def num_tokens(self) -> int:
        """Tokens in order so far."""
        return len(self.token_ids)

    @property
    def pending_tokens(self) -> int:
        """Tokens in order that have not been taken."""
        return len(self.token_ids) - self._num_taken

    def take(self, limit: int) -> list[Taken]:
        """The next tokens in order, each of them once."""
        begin = self._num_taken
        self._num_taken = end = min(begin + limit, len(self.token_ids))
        taken: list[Taken] = []
        for index in range(begin, end):
            reason = self.finish_reason if index + 1 == len(self.token_ids) else None
            item = self._with_logprobs.popleft() if self._with_logprobs else None
            if item is None:
                taken.append(Taken(self.token_ids[index], reason))
            else:
                taken.append(
                    Taken(item.token_id, reason, item.logprob, item.top_logprobs, item.prompt_logprobs)
                )
        return taken

    @property
    def finished(self) -> bool:
        """Whether the last token is here."""
        return self.finish_reason is not None

    @property
    def has_gap(self) -> bool:
        """Whether tokens wait for one that has not come."""
        return bool(self._ahead)

    @property
    def started(self) -> bool:
        """Whether the current attempt has brought a token."""
        return len(self.token_ids) > self._tokens_before_attempt

    def place(
        self,
        gateway: str,
        prefill_pod: str,
        decode_pods: Sequence[str],
        cached_tokens: int = 0,
        *,
        encode_here: bool = False,
    ) -> GenerateRequest:
        """Begin the next attempt on these pods; what is left of older ones no longer counts."""
        self.attempt += 1
        self.prefill_pod = prefill_pod
        self.decode_pods = tuple(decode_pods)
        self.decoding_pod = None
        self.failure = None
        self._ahead.clear()
        self._tokens_before_attempt = len(self.token_ids)
        spec = self.spec
        return GenerateRequest(
            request_id=spec.request_id,
            attempt=self.attempt,
            gateway=gateway,
            token_ids=spec.token_ids,
            features=spec.features,
            sampling=spec.sampling,
            decode_pods=list(decode_pods),
            deadline=spec.deadline,
            arrived=spec.arrived,
            output_token_ids=self.token_ids.tolist(),
            trace=spec.trace,
            adapter=spec.adapter,
            engine_failures=self.engine_failures,
            cached_tokens=cached_tokens,
            encode_here=encode_here,
            cache_salt=spec.cache_salt,
            first_attempt=self._first_attempt,
            guidance=spec.guidance,
        )

    def respecify(self, spec: SequenceSpec) -> None:
        """Another prompt from the next attempt on: no token of an answer to the present one has come."""
        assert not self.token_ids
        self.spec = spec
        self._first_attempt = self.attempt + 1

    def unplace(self) -> None:
        """Nobody holds the sequence now; what the last attempt still sends no longer counts."""
        if self.failure is not None and self.failure.code == SuspectError.code:
            self.engine_failures += 1
        self.prefill_pod = None
        self.decode_pods = ()
        self.decoding_pod = None
        self.failure = None
        self._ahead.clear()

    def accept(self, item: TokenItem, pod: str, now: float) -> list[TokenItem]:
        """Take a token; returns those that are in order now. Duplicates and other attempts' tokens are dropped."""
        if item.attempt != self.attempt or self.prefill_pod is None or self.finished:
            return []
        if pod != self.prefill_pod or not self.decode_pods:
            self.decoding_pod = pod
        expected = len(self.token_ids)
        if item.index < expected or item.index in self._ahead:
            self.duplicates += 1
            return []
        if item.index >= self.spec.sampling.max_tokens:
            return []
        if item.finish_reason == "cancelled":  # not requested by this gateway
            self.failure = RequestFailed(
                item.request_id,
                item.attempt,
                pod,
                RequestCancelledError.code,
                "the worker cancelled the request",
                retryable=True,
            )
            return []
        self._ahead[item.index] = item
        ready: list[TokenItem] = []
        while (
            self.finish_reason is None
            and (following := self._ahead.pop(len(self.token_ids), None)) is not None
        ):
            self.token_ids.append(following.token_id)
            if self.spec.sampling.logprobs is not None:
                self._with_logprobs.append(following)
            ready.append(following)
            self.finish_reason = following.finish_reason
        if self.finished:
            self._ahead.clear()
        if ready:
            self.last_token_at = now
        return ready

    def is_current(self, attempt: int) -> bool:
        """Whether this is the attempt that is placed now."""
        return attempt == self.attempt and self.prefill_pod is not None

    def held_by(self, pod: str) -> None:
        """A pod reports that it works on the current attempt: one that did not prefill it decodes it."""
        if pod != self.prefill_pod:
            self.decoding_pod = pod

    def fail(self, message: RequestFailed) -> bool:
        """Note that a worker gave up; False when it is not about the current attempt."""
        if message.attempt != self.attempt or self.prefill_pod is None or self.finished:
            return False
        self.failure = message
        return True

    def certain_holder(self) -> str | None:
        """The pod without which the current attempt cannot go on: prefill until the decoder is known, then the decoder."""
        if self.decoding_pod is not None:
            return self.decoding_pod
        return None if self.started and self.decode_pods else self.prefill_pod

    def possible_holders(self) -> frozenset[str]:
        """Pods of which one holds the attempt; more than one just after prefill, before the decoder has spoken."""
        certain = self.certain_holder()
        if certain is not None:
            return frozenset({certain})
        return frozenset({*self.decode_pods, *((self.prefill_pod,) if self.prefill_pod else ())})

    def cancel(self) -> Cancel | None:
        """Frees every attempt so far at every worker; None: nothing was ever placed."""
        return Cancel(self.spec.request_id, self.attempt) if self.attempt >= 0 else None
