"""Places the answers to one request (`n` for each prompt), follows their growth, and sends them as a stream or in one piece."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from mmd_workers.caches.index import Prefix
from mmd_workers.engine.memory.blocks import prompt_root, root_of
from mmd_workers.features.references import media_spans
from mmd_workers.gateway.answers.answer_part import AnswerPart
from mmd_workers.gateway.answers.answer_shape import AnswerShape
from mmd_workers.gateway.answers.choice_stream import ChoiceStream
from mmd_workers.gateway.answers.exchange import Exchange
from mmd_workers.gateway.answers.usage import PromptTokensDetails, Usage, prompt_details, usage_of
from mmd_workers.gateway.api.gateway import Gateway
from mmd_workers.gateway.api.request_records import count_tokens
from mmd_workers.gateway.content.chat_request import GenerationRequest
from mmd_workers.gateway.intake.fallback import Fallback
from mmd_workers.gateway.intake.omissions import HEADERS, headers_of
from mmd_workers.gateway.intake.prepared import Prepared
from mmd_workers.gateway.intake.sampling import MAX_SEED
from mmd_workers.gateway.placement.admission import Admission, EndedAnswer
from mmd_workers.gateway.placement.router import FeatureNeed, RouteRequest
from mmd_workers.gateway.placement.sequence_state import SequenceSpec
from mmd_workers.gateway.placement.timeline import sequence_id

STREAM_OPENS_AFTER_SECONDS = 5.0
"""A stream opens after this time even without a token; until then a failure still gets its HTTP status."""
KEEPALIVE_SECONDS = 10.0
LONG_PROMPT_TOKENS = 1024
LATE_PHASES_SECONDS = 0.25


class Choices:
    """All choices of a request, grouped by prompt.

    The caller that opens choices must `release` them, whatever happens.
    """

    def __init__(
        self,
        gateway: Gateway,
        exchange: Exchange,
        request: GenerationRequest,
        prompts: Sequence[Prepared],
        shape: AnswerShape,
        admission: Admission | None = None,
    ) -> None:
        """`admission`: the place in the order of tenants for which the choices wait before they are placed."""
        self._admission = admission
        self._gateway = gateway
        self._exchange = exchange
        self._request = request
        self._prompts = list(prompts)
        self._shape = shape
        self._news = asyncio.Event()
        self._streams: list[ChoiceStream] = []
        self._prefixes: dict[int, Prefix] = {}  # by number of the prompt
        self._prompt_details: PromptTokensDetails | None = None  # None: not counted yet

    async def open(self, index: int) -> None:
        """Place the choice with this number; its seed distinguishes it from other answers to its prompt."""
        gateway, request = self._gateway, self._request
        prepared = self._prompts[index // (request.n or 1)]
        spec, route = await self._placeable(index)
        fallback = prepared.fallback
        fall_back = None if fallback is None else partial(self._fall_back, index, fallback)
        timeline, sampling = self._exchange.timeline, spec.sampling
        sequence = gateway.dispatcher.open(spec, route, timeline, self._news, self._admission, fall_back)
        self._streams.append(
            ChoiceStream(
                index,
                sequence,
                gateway.frontend,
                request.stops,
                text_before=spec.token_ids if request.continues_prompt else (),
                stop_token_ids=sampling.stop_token_ids,
                min_tokens=sampling.min_tokens,
                special_tokens=request.skip_special_tokens is False,
                stops_shown=bool(request.include_stop_str_in_output),
                num_logprobs=request.num_logprobs,
                token_ids=bool(request.return_token_ids),
                parser=None if prepared.new_parser is None else prepared.new_parser(),
                reasoning=None if prepared.new_reasoning is None else prepared.new_reasoning(),
            )
        )

    async def _placeable(self, index: int) -> tuple[SequenceSpec, RouteRequest]:
        """The choice with this number for its current prompt, and its request to the router."""
        gateway, exchange, request = self._gateway, self._exchange, self._request
        prompt, number = divmod(index, request.n or 1)
        prepared = self._prompts[prompt]
        timeline = exchange.timeline
        sampling = replace(prepared.sampling, seed=(prepared.sampling.seed + number) % MAX_SEED)
        spec = SequenceSpec(
            request_id=sequence_id(exchange.request_id, index),
            token_ids=prepared.layout.token_ids,
            features=prepared.features,
            sampling=sampling,
            arrived=timeline.arrived,
            deadline=gateway.deadline(timeline.arrived, exchange.deadline),
            trace=exchange.trace,
            adapter=gateway.adapter_of(request.model),
            cache_salt=gateway.cache_salt(request.cache_salt, exchange.tenant),
            guidance=prepared.guidance,
        )
        route = RouteRequest(
            request_id=spec.request_id,
            num_tokens=len(spec.token_ids),
            max_tokens=sampling.max_tokens,
            companion_tokens=prepared.companion_tokens,
            features=tuple(
                FeatureNeed(f.feature_id, f.modality, f.work, f.num_tokens, max(map(sum, f.ranges)))
                for f in prepared.features
            ),
            encoders_first=index > 0,  # one prefill pod is enough to encode the media that all choices share
            prefix=await self._prefix(prompt, spec),
        )
        return spec, route

    async def _prefix(self, prompt: int, spec: SequenceSpec) -> Prefix:
        """The identities of a prompt's blocks, once for all of its choices. Those of a long prompt that pods have are hashed in a thread."""
        if (prefix := self._prefixes.get(prompt)) is None:
            is_long = len(spec.token_ids) > LONG_PROMPT_TOKENS
            hashed = partial(self._hashed, spec)
            prefix = self._prefixes[prompt] = await asyncio.to_thread(hashed) if is_long else hashed()
        return prefix

    def _hashed(self, spec: SequenceSpec) -> Prefix:
        index, spans = self._gateway.prefix_index, media_spans(spec.features)
        root = prompt_root(
            root_of(spec.adapter, spec.cache_salt),
            spec.token_ids,
            spans,
            bidirectional=self._gateway.frontend.bidirectional_prompt,
        )
        prefix = index.prefix_of(spec.token_ids, spans, root)
        index.hash_cached(prefix)
        return prefix

    async def _fall_back(
        self, index: int, fallback: Fallback[Prepared], feature_id: str
    ) -> tuple[SequenceSpec, RouteRequest] | None:
        """The choice with a prompt that has less of a medium that cannot be encoded; None if there is no such prompt.

        A stream that has already begun cannot report the change, so it keeps its prompt and ends with the failure.
        """
        gateway, exchange, request = self._gateway, self._exchange, self._request
        prepared = None if exchange.streaming else await fallback.without(feature_id)
        outcome = "failed" if prepared is None else "placed"
        gateway.metrics.fallbacks.labels(fallback.policy, outcome).inc()
        if prepared is None:
            return None
        self._prompts[index // (request.n or 1)] = prepared
        self._prefixes.pop(index // (request.n or 1), None)
        self._prompt_details = None
        for name in HEADERS:
            exchange.notes.pop(name, None)
        exchange.notes |= headers_of([prompt.layout for prompt in self._prompts])
        exchange.timeline.note_media(prepared.features, prepared.layout)
        if self._admission is not None and exchange.tenant is not None:
            gateway.resize_admission(self._admission, self._prompts, request.n or 1, exchange.tenant)
        return await self._placeable(index)

    @property
    def completion_tokens(self) -> int:
        """The tokens of all choices so far."""
        return sum(choice.completion_tokens for choice in self._streams)

    def answers(self) -> list[EndedAnswer]:
        """The length of each choice so far, and whether it ended by itself."""
        return [
            EndedAnswer(choice.completion_tokens, choice.finish_reason not in (None, "length"))
            for choice in self._streams
        ]

    async def release(self) -> None:
        """Free the sequences of all choices."""
        for choice in self._streams:
            await self._gateway.dispatcher.release(choice.sequence)

    async def stream(self) -> None:
        """Send the answers as server-sent events while they grow."""
        exchange, shape = self._exchange, self._shape
        head = self._head()
        is_open = False
        async for ready in self._progress():
            for event in () if is_open else shape.opening(head, self._usage()):
                await exchange.events(event)
            is_open = True
            await exchange.events(
                *(shape.chunk(head, part, self._usage) for part in ready) if ready else (shape.waiting,)
            )
        usage = await self._finish()
        timings = exchange.timeline.timings() if self._wants_timings() else None
        for event in shape.ending(head, usage, timings):
            await exchange.events(event)
        await exchange.send({"type": "http.response.body", "body": b""})

    async def whole(self) -> None:
        """Send the answers as one JSON object when all are complete."""
        exchange, shape = self._exchange, self._shape
        wholes = [shape.collector(choice.index) for choice in self._streams]
        async for ready in self._progress():
            for part in ready:
                wholes[part.index].add(part)
        usage = await self._finish()
        timings = exchange.timeline.timings() if self._wants_timings() else None
        await exchange.reply_in_pieces(shape.body(self._head(), wholes, usage, timings))

    def _head(self) -> dict[str, Any]:
        return {"id": self._exchange.request_id, "created": int(time.time()), "model": self._request.model}

    async def _progress(self) -> AsyncIterator[list[AnswerPart]]:
        """The new parts at each wake-up, until every choice has finished; an empty list as a keepalive when nothing comes."""
        patience = STREAM_OPENS_AFTER_SECONDS
        while True:
            self._news.clear()
            ready = [part for choice in self._streams if (part := choice.advance()) is not None]
            for choice in self._streams:
                if choice.finish_reason is not None:
                    await self._gateway.dispatcher.release(choice.sequence)
            if ready:
                yield ready
            if all(choice.finish_reason is not None for choice in self._streams):
                return
            open_choices = [choice for choice in self._streams if choice.finish_reason is None]
            if ready or any(c.sequence.ended or c.sequence.state.pending_tokens for c in open_choices):
                await asyncio.sleep(0)
                continue
            try:
                async with asyncio.timeout(None if self._may_fall_back() else patience):
                    await self._news.wait()
            except TimeoutError:
                patience = KEEPALIVE_SECONDS
                yield []

    def _may_fall_back(self) -> bool:
        """True while a medium may still prove impossible to encode; the headers of a stream must report that, so it does not open yet."""
        return any(
            choice.sequence.fall_back is not None and not choice.sequence.state.num_tokens
            for choice in self._streams
        )

    async def _finish(self) -> Usage:
        """Count the request's tokens, after waiting for the workers' last reports if the client asked for timings."""
        timeline = self._exchange.timeline
        if self._wants_timings():
            wait_ends = time.monotonic() + LATE_PHASES_SECONDS
            while time.monotonic() < wait_ends and not timeline.is_complete():
                await asyncio.sleep(0.01)
        timeline.finished = time.time()
        timeline.finish_reasons = [choice.finish_reason or "" for choice in self._streams]
        usage = self._usage()
        timeline.usage = usage.model_dump()
        count_tokens(self._gateway.metrics, timeline.usage)
        return usage

    def _usage(self) -> Usage:
        """The token counts so far. Each chunk of a stream may have them, so prompts are counted once."""
        if self._prompt_details is None:
            self._prompt_details = prompt_details([prepared.layout for prepared in self._prompts])
        return usage_of(
            self._prompt_details,
            self.completion_tokens,
            self._exchange.timeline.cached_tokens(range(0, len(self._streams), self._request.n or 1)),
            sum(choice.reasoning_tokens for choice in self._streams),
        )

    def _wants_timings(self) -> bool:
        header = self._exchange.headers.get("x-mmd-timings", "")
        return bool(self._request.timings) or header.lower() == "true"
