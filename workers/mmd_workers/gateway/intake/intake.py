"""From a validated request to an exact prompt: joins checks, media, layout and sampling. Independent of workers.

Texts are prepared by `texts`, conversations laid out by `chats`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from mmd_api.pipeline import PipelineConfig
from mmd_api.spec.media import MediaPolicy
from mmd_workers.gateway.basics.media_hold import RequestReservation
from mmd_workers.gateway.content.chat_request import ChatRequest
from mmd_workers.gateway.content.completion_request import CompletionRequest
from mmd_workers.gateway.content.conversation import Message
from mmd_workers.gateway.content.parts import MediaSource
from mmd_workers.gateway.content.tools import ToolUse
from mmd_workers.gateway.intake.chats import ChatLayout, LaidOut
from mmd_workers.gateway.intake.checks import (
    MAX_TEXT_TOKENS,
    SEND_LESS,
    SHORTEN,
    RequestChecks,
    check_jobs,
    overflow,
)
from mmd_workers.gateway.intake.fallback import Fallback, Policy
from mmd_workers.gateway.intake.file_media import FileMedia
from mmd_workers.gateway.intake.fitting import Fit, reported
from mmd_workers.gateway.intake.frame_search import default_choice
from mmd_workers.gateway.intake.media_fetcher import MediaFetcher
from mmd_workers.gateway.intake.media_tiers import MediaTiers
from mmd_workers.gateway.intake.prepared import Prepared, feature_refs, ids_of
from mmd_workers.gateway.intake.prompt_content import PromptContent
from mmd_workers.gateway.intake.sampling import (
    AnswerRules,
    beside_companion,
    guidance_of,
    matches_exactly,
    sampling_of,
    unasked_tokens,
)
from mmd_workers.gateway.intake.tenant_files import Files
from mmd_workers.gateway.intake.text_threads import TextThreads
from mmd_workers.gateway.intake.texts import Texts
from mmd_workers.gateway.intake.truncation import kept_tokens, prompt_tokens
from mmd_workers.gateway.output.reasoning_parser import ReasoningParser
from mmd_workers.gateway.placement.timeline import Timeline
from mmd_workers.media.choice import NO_CHOICE, SamplingChoice
from mmd_workers.media.reduction import MediaShare
from mmd_workers.media.sandbox import DecodePool
from mmd_workers.model.interfaces import Frontend
from mmd_workers.observe.metrics import Metrics
from mmd_workers.wire.jobs import check_fits
from mmd_workers.wire.messages.message_parts import FeatureRef
from mmd_workers.wire.stored_files import StoredFile


class Intake:
    """Prepares requests of one model."""

    def __init__(
        self,
        pipeline: PipelineConfig,
        frontend: Frontend,
        sandbox: DecodePool,
        metrics: Metrics,
        files: Files | None = None,
    ) -> None:
        self._revision = pipeline.revision
        self._has_encode_queue = pipeline.spec.encoder is not None
        self.tiers: MediaTiers | None = None  # tiers of media quality; None: quality is independent of load
        self._frontend = frontend
        self._metrics = metrics
        self._files = files
        self._checks = RequestChecks(pipeline, frontend)
        self._answers = AnswerRules(pipeline, frontend)
        self._fetcher = MediaFetcher(sandbox, self._checks, metrics)
        threads = TextThreads()
        self._texts = Texts(frontend, self._checks, self._answers, threads)
        self._chats = ChatLayout(frontend, self._checks, self._fetcher, threads, files)

    @property
    def policy(self) -> MediaPolicy:
        """The limits on media. They may be replaced at any time, and requests read them as they go."""
        return self._checks.policy

    @policy.setter
    def policy(self, policy: MediaPolicy) -> None:
        self._checks.policy = policy

    async def prepare(
        self, request: ChatRequest, reservation: RequestReservation, timeline: Timeline, model_len: int
    ) -> Prepared:
        """Fetch, probe and hold the media in `reservation`, lay out the prompt, and check limits.

        `model_len`: the longest sequence that the present pods can hold; 0: not known yet.

        Raises:
            ApiError: names the part and the remedy.
        """
        self._answers.use_defaults(request)
        rules, tools = await self._answers.rules(request), request.tool_use
        spelling = None if tools is None else await self._answers.spelling()
        reasoning = await self._answers.reasoning()
        grammar, with_reasoning = await self._answers.grammar(request, tools, spelling), None
        limit = self.limit(model_len)
        fit = None
        if self.policy.video.too_long == "FewerFrames":
            fit = Fit(limit - 1, prompt_tokens(request, limit))
        kept = kept_tokens(request, limit)
        laid_out = await self._chats.lay_out(
            request.messages,
            tools,
            reservation,
            timeline,
            limit - 1 if kept is None else max(limit, MAX_TEXT_TOKENS),
            SHORTEN if kept is None else SEND_LESS,
            request.reasons,
            request.choice,
            fit,
            self._share(timeline),
            kept,
            continues=bool(request.continue_final_message),
        )
        layout, sources, begins = laid_out.layout, laid_out.sources, laid_out.begins
        room = self._checks.room(layout, sources, limit, laid_out.text_param)
        self._checks.check_prompt_logprobs(request, "messages", layout)
        negative = await self._chats.negative_turn(request, limit, reservation)
        guidance = guidance_of(self._frontend, request, layout, limit, negative)
        room = beside_companion(room, guidance, limit)
        if not sources:
            reservation.release()  # the text exists only as tokens now
        features = feature_refs(laid_out.content.infos, layout, self._revision)
        if self._has_encode_queue:
            await check_jobs(features, sources)
        timeline.note_media(features, layout)
        self._count_tiers(features, timeline)
        new_parser = None if tools is None or spelling is None else tools.parsers(spelling)
        new_reasoning = None
        if grammar is not None and reasoning is not None:
            with_reasoning = await self._answers.grammar_after_reasoning(grammar, request, reasoning, begins)
        if reasoning is not None and (grammar is None or with_reasoning is not None):
            new_reasoning = partial(
                ReasoningParser, reasoning, inside=begins == "inside", gap=not matches_exactly(request)
            )
        default_tokens = unasked_tokens(room, len(layout.token_ids), guidance, limit)
        sampling = sampling_of(request, rules, with_reasoning or grammar, room, default_tokens)
        prepared = Prepared(layout, features, sampling, new_parser, new_reasoning, guidance=guidance)
        if not features or self.policy.failure_policy == "Fail":
            return prepared
        return replace(
            prepared, fallback=self._fallback(self.policy.failure_policy, laid_out, prepared, limit)
        )

    async def prepare_texts(
        self,
        request: CompletionRequest,
        reservation: RequestReservation,
        timeline: Timeline,
        model_len: int,
    ) -> list[Prepared]:
        """Lay out the prompts of a text completion: see `Texts.prepare`."""
        return await self._texts.prepare(request, reservation, timeline, model_len)

    async def features_of(self, stored: StoredFile, reservation: RequestReservation) -> list[FeatureRef]:
        """The features of an uploaded file for a question that chooses no sampling. The file's bytes are held in `reservation`.

        Raises:
            ApiError: the model does not take the file, or the file exceeds a limit.
        """
        files = FileMedia(self._files, stored.tenant)
        source = MediaSource("file", "file", choice=default_choice(self.policy.video), file_id=stored.file_id)
        sources = await files.settled([source])
        self._checks.check_media(sources)
        content = [{"type": sources[0].medium}, {"type": "text", "text": "?"}]
        question = [{"role": "user", "content": content}]
        messages, sources, infos = await self._fetcher.fetch(question, sources, files, reservation)
        choices = [source.choice for source in sources]
        rendered = await asyncio.to_thread(self._frontend.render, messages, infos, [], None, choices)
        layout = await asyncio.to_thread(rendered.encode)
        return feature_refs(infos, layout, self._revision)

    async def token_ids(
        self,
        messages: Sequence[Message],
        reservation: RequestReservation,
        timeline: Timeline,
        model_len: int,
        tools: ToolUse | None = None,
        reasons: bool | None = None,
        choice: SamplingChoice = NO_CHOICE,
        *,
        continues: bool = False,
    ) -> list[int]:
        """The prompt of a conversation, which may be longer than the model takes.

        `model_len`: see `prepare`. `reasons`, `continues`: see `Frontend.render`. `choice`: sampling of media whose parts choose none.

        Raises:
            ApiError: names the part and the remedy.
        """
        max_tokens = max(self._checks.limit(model_len), MAX_TEXT_TOKENS)
        if tools is not None:
            await self._answers.spelling()
        laid_out = await self._chats.lay_out(
            messages,
            tools,
            reservation,
            timeline,
            max_tokens,
            SEND_LESS,
            reasons,
            choice,
            continues=continues,
        )
        return self._checks.counted(laid_out.layout.token_ids, max_tokens, laid_out.text_param)

    async def token_ids_of_text(
        self, prompt: str, special_tokens: bool, reservation: RequestReservation, model_len: int
    ) -> list[int]:
        """Token ids of a text: see `Texts.token_ids`."""
        return await self._texts.token_ids(prompt, special_tokens, reservation, model_len)

    def check_ids(self, param: str, token_ids: Sequence[int]) -> None:
        """Check that the model has these tokens: see `RequestChecks.check_ids`."""
        self._checks.check_ids(param, token_ids)

    def limit(self, model_len: int) -> int:
        """The length of the longest sequence: see `RequestChecks.limit`."""
        return self._checks.limit(model_len)

    def _fallback(self, policy: Policy, laid_out: LaidOut, first: Prepared, limit: int) -> Fallback[Prepared]:
        """Build the fallback that lays out a request again if one of its media cannot be encoded.

        The answer may have no more tokens than `first` allows, because the gateway's memory is sized for these.
        """

        lay_out_again = laid_out.again  # without the sources, whose data URLs are no longer needed

        async def lay_out(content: PromptContent) -> tuple[Prepared, list[str]]:
            layout = await lay_out_again(content)
            layout = await asyncio.to_thread(reported, self._frontend, content, layout, "failure")
            layout = replace(layout, degraded_by=layout.degraded_by | first.layout.degraded_by)
            room = beside_companion(limit - len(layout.token_ids), first.guidance, limit)
            if room < 1:
                raise overflow(str(len(layout.token_ids)), limit - 1, SHORTEN)
            max_tokens = min(first.sampling.max_tokens, room)
            min_tokens = min(first.sampling.min_tokens, max_tokens)
            features = feature_refs(content.infos, layout, self._revision)
            if self._has_encode_queue:
                for feature in features:
                    await check_fits(feature)
            sampling = replace(first.sampling, max_tokens=max_tokens, min_tokens=min_tokens)
            return replace(first, layout=layout, features=features, sampling=sampling), ids_of(features)

        amounts = self._frontend.amounts
        return Fallback(policy, laid_out.content, ids_of(first.features), amounts, lay_out)

    def _share(self, timeline: Timeline) -> MediaShare | None:
        """The share of each medium that load permits for a new request; None: all."""
        if self.tiers is None or (tier := self.tiers.tier) is None:
            return None
        timeline.media_tier = self.tiers.number
        return MediaShare(tier.pixels_percent, tier.frames_percent, tier.max_frames)

    def _count_tiers(self, features: Sequence[FeatureRef], timeline: Timeline) -> None:
        """Count media by their tier, if tiers are in use."""
        if self.tiers is not None:
            for feature in features:
                self._metrics.tiered_media.labels(feature.modality, str(timeline.media_tier)).inc()
