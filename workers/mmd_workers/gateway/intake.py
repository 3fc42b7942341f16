"""From a validated request to an exact prompt: media fetched, probed and held, placeholders laid out, limits checked.

Independent of workers. Media are opened in the sandbox only; here they are bytes.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from dataclasses import asdict, dataclass
from typing import Any

from mmd_api.contract.answers import Grammar
from mmd_api.contract.errors import (
    ContextLengthError,
    MmdError,
    OverloadedError,
    TooManyMediaError,
    UnsupportedInputError,
)
from mmd_api.contract.pools import Modality
from mmd_api.pipeline import PipelineConfig
from mmd_workers.gateway.api_errors import ApiError, refused
from mmd_workers.gateway.chat_request import ChatRequest, conversation
from mmd_workers.gateway.hold import RequestReservation
from mmd_workers.gateway.parts import MediaSource
from mmd_workers.gateway.response_format import GrammarCheck
from mmd_workers.gateway.timeline import Timeline
from mmd_workers.media.fetch import fetch
from mmd_workers.media.identity import feature_id
from mmd_workers.media.medium import MediumInfo
from mmd_workers.media.sandbox import DecodePool
from mmd_workers.model.interfaces import Frontend
from mmd_workers.model.prompt import PromptLayout
from mmd_workers.observe.metrics import Metrics
from mmd_workers.wire.jobs import check_fits
from mmd_workers.wire.messages import FeatureRef, Phase, Sampling

CONCURRENT_FETCHES = 8  # of one request
PROBE_WAIT_SECONDS = 60.0  # for a place in the sandbox and the probe, on top of the probe's own deadline
MAX_SEED = 2**63
_PART = re.compile(r"messages\[\d+\]\.content\[\d+\](\.\w+)*")


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that may be placed: the exact prompt, its features, and how to sample."""

    layout: PromptLayout
    features: list[FeatureRef]
    sampling: Sampling


class Intake:
    """Prepares requests of one model."""

    def __init__(
        self, pipeline: PipelineConfig, frontend: Frontend, sandbox: DecodePool, metrics: Metrics
    ) -> None:
        self._revision = pipeline.revision
        self._has_encode_queue = pipeline.spec.encoder is not None
        self.policy = pipeline.spec.gateway.media
        self._model_len = min(
            frontend.max_model_len, pipeline.spec.model.max_model_len or frontend.max_model_len
        )
        self._frontend = frontend
        self._metrics = metrics
        self._sandbox = sandbox
        self._grammars = GrammarCheck(frontend.grammars)

    async def prepare(
        self, request: ChatRequest, reservation: RequestReservation, timeline: Timeline, model_len: int
    ) -> Prepared:
        """Fetch, probe and hold the media in `reservation`; lay out the prompt; check limits.

        `model_len`: the longest sequence that the present pods can hold; 0: not known yet.

        Raises:
            ApiError: names the part and the remedy.
        """
        messages, sources = conversation(request)
        limit = min(self._model_len, model_len or self._model_len)
        self._check_text(messages, limit)
        self._check_media(sources)
        grammar = None
        if (wanted := request.grammar()) is not None:
            grammar, param = wanted
            await self._grammars.check(grammar, param)
        begun = time.time()
        if sources:
            infos = await self._bring(sources, reservation)
        else:
            infos = []
        fetched = time.time()
        try:
            layout = await asyncio.to_thread(self._frontend.layout, messages, infos)
        except MmdError as error:
            raise refused(error, _part_of(error.message)) from error
        timeline.add("gateway", [Phase("fetch", begun, fetched), Phase("layout", fetched, time.time())])
        if not sources:
            reservation.release()  # the text is a list of tokens now
        room = self._room(layout, sources, limit)
        features = [
            _feature(info, medium, self._revision) for info, medium in zip(infos, layout.media, strict=True)
        ]
        if self._has_encode_queue:
            await _check_jobs(features, sources)
        timeline.media = [
            {"modality": f.modality, "bytes": f.num_bytes, "tokens": f.num_tokens, "feature_id": f.feature_id}
            for f in features
        ]
        return Prepared(layout, features, _sampling(request, room, grammar))

    def _check_text(self, messages: list[dict[str, Any]], limit: int) -> None:
        """Refuse a text that cannot fit before spending time on tokenizing megabytes."""
        longest = self._frontend.longest_token_characters
        characters = sum(len(part.get("text", "")) for message in messages for part in message["content"])
        if characters > (limit - 1) * longest:
            too_long = ContextLengthError(
                f"the text has {characters} characters: at least {-(-characters // longest)} tokens, but at most {limit - 1} fit; "
                "shorten it, or raise spec.model.maxModelLen"
            )
            raise ApiError(too_long, param="messages")

    def _check_media(self, sources: list[MediaSource]) -> None:
        most = self.policy.max_items_per_request
        if len(sources) > most:
            too_many = TooManyMediaError(
                f"the request has {len(sources)} media items, more than the limit of {most}; send fewer, or raise spec.gateway.media.maxItemsPerRequest"
            )
            raise ApiError(too_many, param=sources[most].param)
        takes = ", ".join(sorted(self._frontend.modalities)) or "text only"
        for source in sources:
            if source.modality not in self._frontend.modalities:
                unsupported = UnsupportedInputError(
                    f"{source.param}: this model does not accept {source.modality} (accepted: {takes}); remove the part or use another model"
                )
                raise ApiError(unsupported, param=source.param)

    async def _bring(self, sources: list[MediaSource], reservation: RequestReservation) -> list[MediumInfo]:
        in_body = sum(len(source.url) for source in sources if source.url[:5].lower() == "data:")
        await reservation.resize(2 * in_body)
        slots = asyncio.Semaphore(CONCURRENT_FETCHES)

        async def bring(source: MediaSource) -> tuple[bytes, MediumInfo]:
            async with slots:
                try:
                    data = await fetch(source.url, self.policy, source.modality, reservation.grow)
                    return data, await self._probe(data, source.modality)
                except MmdError as error:
                    raise refused(error, source.param) from error

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(bring(source)) for source in sources]
        except ExceptionGroup as faults:
            raise _first(faults) from faults
        infos: list[MediumInfo] = []
        for data, info in (task.result() for task in tasks):
            reservation.put(info.digest, data)
            self._metrics.fetch_bytes.labels(info.modality).inc(info.num_bytes)
            infos.append(info)
        reservation.shrink(sum(info.num_bytes for info in infos))
        return infos

    async def _probe(self, data: bytes, modality: Modality) -> MediumInfo:
        seconds = PROBE_WAIT_SECONDS + self.policy.decode_timeout_seconds
        try:
            async with asyncio.timeout(seconds):
                return await self._sandbox.probe(data, modality, self.policy)
        except TimeoutError as error:
            raise OverloadedError(
                f"no decode process became available for this {modality} within {seconds:.0f} s; retry later"
            ) from error

    def _room(self, layout: PromptLayout, sources: list[MediaSource], limit: int) -> int:
        """Tokens that may be generated after the prompt."""
        prompt = len(layout.token_ids)
        if prompt < limit:
            return limit - prompt
        text = prompt - sum(medium.num_tokens for medium in layout.media)
        largest, tokens = "the text", text
        for source, medium in zip(sources, layout.media, strict=True):
            if medium.num_tokens > tokens:
                largest, tokens = source.param, medium.num_tokens
        too_long = ContextLengthError(
            f"the prompt has {prompt} tokens, but at most {limit - 1} fit: {prompt - limit + 1} too many; the largest part is {largest} "
            f"with {tokens} tokens; shorten it, or raise spec.model.maxModelLen"
        )
        raise ApiError(too_long, param="messages" if largest == "the text" else largest)


def _part_of(message: str) -> str:
    found = _PART.match(message)
    return found.group() if found else "messages"


def _first(faults: BaseExceptionGroup[Any]) -> BaseException:
    first: BaseException = faults.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first


def _feature(info: MediumInfo, medium: Any, revision: str) -> FeatureRef:
    sampling = asdict(medium.sampling)
    return FeatureRef(
        feature_id=feature_id(info.digest, revision, {**sampling, "modality": info.modality}),
        digest=info.digest,
        modality=medium.modality,
        num_bytes=info.num_bytes,
        num_tokens=medium.num_tokens,
        ranges=[list(span) for span in medium.ranges],
        geometry=medium.geometry,
        sampling=sampling,
        work=medium.work,
        host_bytes=medium.host_bytes,
    )


async def _check_jobs(features: list[FeatureRef], sources: list[MediaSource]) -> None:
    """Refuse a medium whose encode job does not fit the queue: the prefill pod that publishes it could not name the field."""
    for feature, source in zip(features, sources, strict=True):
        try:
            await check_fits(feature)
        except MmdError as error:
            raise refused(error, source.param) from error


def _sampling(request: ChatRequest, room: int, grammar: Grammar | None) -> Sampling:
    """The seed is always set, so that a request that moves to another pod draws the same tokens."""
    asked = request.max_completion_tokens or request.max_tokens or room
    return Sampling(
        max_tokens=min(asked, room),
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        top_k=max(0, request.top_k or 0),
        seed=secrets.randbelow(MAX_SEED) if request.seed is None else request.seed % MAX_SEED,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        ignore_eos=bool(request.ignore_eos),
        grammar=grammar,
    )
