"""The gateway's state of one sequence: attempts, ordered tokens, possible holders. Pure: no clock, no network, no text."""

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
    """The sequence to generate. It is the same for every attempt, unless one of its media cannot be encoded. Times are Unix seconds."""

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
    """One output token, in order. Log probabilities are set only if requested; those of the prompt come with the first token."""

    token_id: int
    finish_reason: FinishReason | None
    logprob: float | None = None
    top_logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprob] = field(default_factory=list)


class RequestState:
    """One sequence through all its attempts. Every token counts once, whoever sends it, however often and in whatever order.

    Only tokens of the current attempt are accepted. An attempt begins at the index the previous one reached, so the joined output
    has neither repeated nor missing tokens. Of a taken token only the id is kept, which the next attempt needs.
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
        self._first_attempt = 0  # first attempt with the present prompt
        self._num_taken = 0
        self._with_logprobs: deque[TokenItem] = deque()  # tokens not yet taken

    @property
    def num_tokens(self) -> int:
        """Number of tokens received in order."""
        return len(self.token_ids)

    @property
    def pending_tokens(self) -> int:
        """Number of tokens in order that have not been taken."""
        return len(self.token_ids) - self._num_taken

    def take(self, limit: int) -> list[Taken]:
        """Take the next tokens in order, each of them once."""
        begin = self._num_taken
        self._num_taken = end = min(begin + limit, len(self.token_ids))
        tokens: list[Taken] = []
        for index in range(begin, end):
            reason = self.finish_reason if index + 1 == len(self.token_ids) else None
            item = self._with_logprobs.popleft() if self._with_logprobs else None
            if item is None:
                tokens.append(Taken(self.token_ids[index], reason))
            else:
                tokens.append(
                    Taken(item.token_id, reason, item.logprob, item.top_logprobs, item.prompt_logprobs)
                )
        return tokens

    @property
    def finished(self) -> bool:
        """True if the last token has arrived."""
        return self.finish_reason is not None

    @property
    def has_gap(self) -> bool:
        """True if tokens wait for an earlier one that is missing."""
        return bool(self._ahead)

    @property
    def started(self) -> bool:
        """True if the current attempt has produced a token."""
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
        """Begin the next attempt on these pods; messages of older attempts no longer count."""
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
        """Use another prompt from the next attempt on. The answer to the present prompt must have no token yet."""
        assert not self.token_ids
        self.spec = spec
        self._first_attempt = self.attempt + 1

    def unplace(self) -> None:
        """Note that no pod holds the sequence now; messages of the last attempt no longer count."""
        if self.failure is not None and self.failure.code == SuspectError.code:
            self.engine_failures += 1
        self.prefill_pod = None
        self.decode_pods = ()
        self.decoding_pod = None
        self.failure = None
        self._ahead.clear()

    def accept(self, item: TokenItem, pod: str, now: float) -> list[TokenItem]:
        """Accept a token, and return the tokens that are now in order. Duplicates and tokens of other attempts are dropped."""
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
        """True if this is the attempt that is placed now."""
        return attempt == self.attempt and self.prefill_pod is not None

    def held_by(self, pod: str) -> None:
        """Note a pod's report that it works on the current attempt. If it is not the prefill pod, it decodes."""
        if pod != self.prefill_pod:
            self.decoding_pod = pod

    def fail(self, message: RequestFailed) -> bool:
        """Note that a worker gave up; return False if the message is not about the current attempt."""
        if message.attempt != self.attempt or self.prefill_pod is None or self.finished:
            return False
        self.failure = message
        return True

    def certain_holder(self) -> str | None:
        """The pod that the current attempt depends on: the prefill pod until the decoder is known, then the decoder."""
        if self.decoding_pod is not None:
            return self.decoding_pod
        return None if self.started and self.decode_pods else self.prefill_pod

    def possible_holders(self) -> frozenset[str]:
        """The pods that may hold the attempt; more than one only between prefill and the first message of the decoder."""
        certain = self.certain_holder()
        if certain is not None:
            return frozenset({certain})
        return frozenset({*self.decode_pods, *((self.prefill_pod,) if self.prefill_pod else ())})

    def cancel(self) -> Cancel | None:
        """The message that frees every attempt so far at every worker; None if nothing was ever placed."""
        return Cancel(self.spec.request_id, self.attempt) if self.attempt >= 0 else None
