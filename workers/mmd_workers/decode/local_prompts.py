"""Prompts that a decode pod computes itself, because a handover would cost more.

The part of such a prompt that the prefix cache lacks is short and has no medium. Everything else is as on a pod with both roles: the
sequence stays in the engine.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from mmd_api.contract.errors import DrainingError, MmdError, OverloadedError, RequestCancelledError
from mmd_workers.engine.interface import SampledToken
from mmd_workers.features.references import media_end
from mmd_workers.observe.metrics import Metrics
from mmd_workers.sequences.engine import SequenceEngine
from mmd_workers.sequences.sequence_events import SequenceOwner
from mmd_workers.sequences.token_publisher import SequenceBook, sequence_id
from mmd_workers.wire.bus import Bus
from mmd_workers.wire.messages.message_parts import Phase
from mmd_workers.wire.messages.prefill import GenerateRequest, Placed

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Prompt:
    """A prompt until its first token. Times are Unix seconds."""

    placed: float
    task: asyncio.Task[None] | None = None
    added: float = 0.0
    cached_tokens: int | None = None  # found in the prefix cache by the engine


class PromptService(SequenceOwner):
    """Adds placed requests to the engine. A request that needs a medium after all goes back to its gateway, which avoids this pod."""

    def __init__(
        self,
        bus: Bus,
        pod: str,
        engine: SequenceEngine,
        book: SequenceBook,
        handovers_waiting: Callable[[], int],
        most: int,
        metrics: Metrics,
    ) -> None:
        """`handovers_waiting()`: number of offers that wait for KV blocks; prompts would take the blocks freed for them. `most`: limit of
        prompts at the same time.
        """
        self._bus = bus
        self._pod = pod
        self._engine = engine
        self._book = book
        self._handovers_waiting = handovers_waiting
        self._max_prompts = most
        self._metrics = metrics
        self._prompts: dict[str, _Prompt] = {}
        self._returns: set[asyncio.Task[None]] = set()
        self._draining = False

    async def start(self) -> None:
        """Accept requests from now on."""
        await self._bus.serve(self._bus.subjects.prefill(self._pod), GenerateRequest, self._place)

    def waiting(self, sampled_at: float) -> list[int]:
        """Tokens to compute for each prompt that waits for its first token and is missing from the engine's figures.

        `sampled_at`: when the figures were sampled, in Unix seconds. Tokens that the engine found in its prefix cache, or that are expected
        there, do not count.
        """
        return [
            tracked.tokens_to_compute(prompt.cached_tokens)
            for name, prompt in self._prompts.items()
            if not 0 < prompt.added < sampled_at and (tracked := self._book.get(name))
        ]

    def drain(self) -> None:
        """Accept no more requests."""
        self._draining = True

    async def _place(self, request: GenerateRequest) -> Placed:
        name = sequence_id(request.request_id, request.attempt)
        if name not in self._prompts and self._book.get(name) is None:
            if (refusal := self._refusal(request)) is not None:
                self._metrics.local_prompts.labels("refused").inc()
                return Placed(request.request_id, accepted=False, code=refusal.code, message=refusal.message)
            self._metrics.local_prompts.labels("accepted").inc()
            self._book.open(request)
            self._prompts[name] = prompt = _Prompt(time.time())
            prompt.task = asyncio.create_task(self._add(name, request, prompt), name=f"prompt-{name}")
        return Placed(request.request_id, accepted=True)

    def _refusal(self, request: GenerateRequest) -> MmdError | None:
        if self._draining:
            return DrainingError("this pod is draining")
        if self._book.was_cancelled(request.request_id, request.attempt):
            return RequestCancelledError("its cancellation arrived first")
        if waiting := self._handovers_waiting():
            return OverloadedError(f"{waiting} handovers are waiting for KV blocks of this pod")
        if len(self._prompts) >= self._max_prompts:
            return OverloadedError(f"{len(self._prompts)} prompts are already waiting on this pod")
        return None

    async def _add(self, name: str, request: GenerateRequest, prompt: _Prompt) -> None:
        try:
            if request.features:
                cached = await self._engine.cached_tokens(name, request)
                if cached < media_end(request.features):
                    return await self._return(name, request, cached)
            prompt.added = (await self._engine.add(name, request, stop_after_prefill=False)).at
        except MmdError as error:
            await self._give_back(name, error)
        except Exception as error:  # the request must not vanish, whatever went wrong
            log.exception("prompt of %s crashed", name)
            await self._give_back(name, MmdError(f"internal error: {type(error).__name__}: {error}"))

    async def _return(self, name: str, request: GenerateRequest, cached_tokens: int) -> None:
        """Give a request back, once, because it needs its media."""
        if self._book.get(name) is not None:
            self._metrics.local_prompts.labels("returned").inc()
            await self._give_back(name, _without_media(request, cached_tokens))

    async def _give_back(self, name: str, error: MmdError) -> None:
        self._prompts.pop(name, None)
        # This comes first: a pod whose engine fails gives back all sequences that are open.
        await self._book.fail(name, error)
        self._engine.abort(name)

    def cancel(self, sequence: str) -> None:
        """Stop adding a sequence; the caller aborts it in the engine."""
        prompt = self._prompts.pop(sequence, None)
        if prompt is not None and prompt.task is not None:
            prompt.task.cancel()

    def on_admitted(self, sequence: str, cached_tokens: int) -> None:
        """The engine runs the prompt now. After a preemption this may repeat, with fewer cached tokens than before."""
        if (prompt := self._prompts.get(sequence)) is not None:
            prompt.cached_tokens = cached_tokens
        if (tracked := self._book.get(sequence)) is None:
            return
        request = tracked.request
        if not request.decode_pods and cached_tokens < media_end(request.features):
            task = asyncio.create_task(self._return(sequence, request, cached_tokens))
            self._returns.add(task)
            task.add_done_callback(self._returns.discard)

    def on_token(self, token: SampledToken) -> None:
        """The first token ends the prefill."""
        prompt = self._prompts.pop(token.sequence_id, None)
        tracked = self._book.get(token.sequence_id)
        if prompt is None or tracked is None:
            return
        sizes = {"tokens": len(tracked.request.token_ids), "cached_tokens": prompt.cached_tokens or 0}
        tracked.phases += [
            Phase("queue", prompt.placed, prompt.added, {"for": "prefill"}),
            Phase("prefill", prompt.added, time.time(), sizes),
        ]

    def on_failed(self, sequence: str, error: MmdError) -> None:
        """Forget a prompt; the book reports the failure."""
        self._prompts.pop(sequence, None)


def _without_media(request: GenerateRequest, cached_tokens: int) -> OverloadedError:
    return OverloadedError(
        f"media of the prompt end after {media_end(request.features)} tokens, of which this pod has only {cached_tokens} in its prefix "
        "cache, and it has no encoders"
    )
