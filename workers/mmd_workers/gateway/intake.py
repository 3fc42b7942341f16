"""From a validated request to an exact prompt: media fetched, probed and held, placeholders laid out, limits checked.

Knows no worker; nothing is decoded here.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from dataclasses import asdict, dataclass
from typing import Any

from mmd_api.pipeline import PipelineConfig
from mmd_workers.errors import BadMediaError, FetchError, MmdError, UnsupportedInputError
from mmd_workers.gateway.api import ApiError, ChatRequest, MediaSource, conversation
from mmd_workers.gateway.hold import Reservation
from mmd_workers.gateway.timeline import Timeline
from mmd_workers.media.fetch import fetch
from mmd_workers.media.identity import feature_id
from mmd_workers.media.probe import probe
from mmd_workers.media.types import MediumInfo, Modality
from mmd_workers.model.types import Frontend, PromptLayout
from mmd_workers.observe.metrics import Metrics
from mmd_workers.wire.messages import FeatureRef, Phase, Sampling

CONCURRENT_FETCHES = 8  # of one request
CONCURRENT_PROBES = 4  # of this process: probing takes a processor
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

    def __init__(self, pipeline: PipelineConfig, frontend: Frontend, metrics: Metrics) -> None:
        self._revision = pipeline.revision
        self._policy = pipeline.spec.gateway.media
        self._model_len = min(
            frontend.max_model_len, pipeline.spec.model.max_model_len or frontend.max_model_len
        )
        self._frontend = frontend
        self._metrics = metrics
        self._probes = asyncio.Semaphore(CONCURRENT_PROBES)

    async def prepare(
        self, request: ChatRequest, reservation: Reservation, timeline: Timeline, model_len: int
    ) -> Prepared:
        """Fetch, probe and hold the media in `reservation`; lay out the prompt; check limits.

        `model_len`: the longest sequence that the pods there are can hold; 0: not known yet.

        Raises:
            ApiError: names the part and the remedy.
        """
        messages, sources = conversation(request)
        self._check_media(sources)
        begun = time.time()
        infos = await self._bring(sources, reservation)
        fetched = time.time()
        try:
            layout = await asyncio.to_thread(self._frontend.layout, messages, infos)
        except MmdError as error:
            raise refused(error, _part_of(error.message)) from error
        timeline.add("gateway", [Phase("fetch", begun, fetched), Phase("layout", fetched, time.time())])
        limit = min(self._model_len, model_len or self._model_len)
        room = self._room(layout, sources, limit)
        features = [
            _feature(info, medium, self._revision) for info, medium in zip(infos, layout.media, strict=True)
        ]
        timeline.media = [
            {"modality": f.modality, "bytes": f.num_bytes, "tokens": f.num_tokens, "feature_id": f.feature_id}
            for f in features
        ]
        return Prepared(layout, features, _sampling(request, room))

    def _check_media(self, sources: list[MediaSource]) -> None:
        most = self._policy.max_items_per_request
        if len(sources) > most:
            raise ApiError(
                400,
                f"the request has {len(sources)} media and the limit is {most}: send fewer, or raise spec.gateway.media.maxItemsPerRequest",
                code="too_many_media",
                param=sources[most].param,
            )
        takes = ", ".join(sorted(self._frontend.modalities)) or "nothing but text"
        for source in sources:
            if source.modality not in self._frontend.modalities:
                raise ApiError(
                    400,
                    f"{source.param}: this model takes no {source.modality} (it takes {takes}): remove the part or ask another model",
                    code="unsupported_input",
                    param=source.param,
                )

    async def _bring(self, sources: list[MediaSource], reservation: Reservation) -> list[MediumInfo]:
        if not sources:
            reservation.shrink(0)
            return []
        in_body = [len(source.url) for source in sources if source.url[:5].lower() == "data:"]
        remote = [source for source in sources if source.url[:5].lower() != "data:"]
        reservation.shrink(2 * sum(in_body))
        await reservation.grow(sum(self._max_bytes(source.modality) for source in remote))
        slots = asyncio.Semaphore(CONCURRENT_FETCHES)

        async def bring(source: MediaSource) -> tuple[bytes, MediumInfo]:
            async with slots:
                try:
                    data = await fetch(source.url, self._policy, source.modality)
                    async with self._probes:
                        return data, await asyncio.to_thread(probe, data, source.modality, self._policy)
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

    def _max_bytes(self, modality: Modality) -> int:
        policy = self._policy
        return {
            "image": policy.image.max_bytes,
            "video": policy.video.max_bytes,
            "audio": policy.audio.max_bytes,
        }[modality]

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
        raise ApiError(
            400,
            f"the prompt has {prompt} tokens and at most {limit - 1} fit: {prompt - limit + 1} too many; the largest part is {largest} "
            f"with {tokens} tokens: shorten it, or raise spec.model.maxModelLen",
            code="context_length_exceeded",
            param="messages" if largest == "the text" else largest,
        )


def refused(error: MmdError, param: str | None) -> ApiError:
    """A fault in the client's input as a 400 that names the part; anything else keeps its own status."""
    if isinstance(error, (UnsupportedInputError, BadMediaError, FetchError)):
        message = (
            error.message if param is None or error.message.startswith(param) else f"{param}: {error.message}"
        )
        return ApiError(400, message, code=error.code, param=param)
    return api_error(error)


_STATUS = {
    "unsupported_input": 400,
    "bad_media": 400,
    "fetch_failed": 400,
    "too_large": 400,
    "overloaded": 503,
    "link_failed": 503,
    "peer_lost": 503,
    "deadline_exceeded": 504,
}


def api_error(error: MmdError) -> ApiError:
    """Any typed error in the shape clients know; those that a retry may help say when."""
    status = _STATUS.get(error.code, 500)
    return ApiError(
        status, error.message, code=error.code, retry_after_seconds=2.0 if status == 503 else None
    )


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
    )


def _sampling(request: ChatRequest, room: int) -> Sampling:
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
    )
