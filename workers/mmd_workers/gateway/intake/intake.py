"""From a validated request to an exact prompt: media fetched, probed and held, placeholders laid out, limits checked.

Independent of workers. Only the sandbox opens media; here they are bytes.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, TypeVar

from mmd_api.contract.answers import Grammar
from mmd_api.contract.errors import (
    ContextLengthError,
    InvalidValueError,
    MmdError,
    OverloadedError,
    TooManyMediaError,
    UnsupportedInputError,
    UnsupportedParameterError,
)
from mmd_api.contract.sampling import Guidance, LogitRules
from mmd_api.pipeline import PipelineConfig
from mmd_workers.gateway.basics.api_errors import ApiError, refused
from mmd_workers.gateway.basics.body import MARK_BYTES
from mmd_workers.gateway.basics.media_hold import RequestReservation
from mmd_workers.gateway.constraints.call_parser import CallParser
from mmd_workers.gateway.constraints.reasoning_grammar import after_reasoning
from mmd_workers.gateway.constraints.reasoning_parser import ReasoningParser
from mmd_workers.gateway.content.chat_request import ChatRequest, GenerationRequest
from mmd_workers.gateway.content.completion_request import CompletionRequest, Prompt
from mmd_workers.gateway.content.conversation import Message, argument_marks, conversation
from mmd_workers.gateway.content.parts import MediaSource
from mmd_workers.gateway.content.response_format import GrammarCheck
from mmd_workers.gateway.content.tools import ToolUse
from mmd_workers.gateway.intake.fallback import Fallback, Policy
from mmd_workers.gateway.intake.file_media import FileMedia, expanded
from mmd_workers.gateway.intake.frame_search import FrameSearch, default_choice
from mmd_workers.gateway.intake.logit_rules import (
    bad_words,
    check_something_is_left,
    check_token_ids,
    check_works_with_drafts,
    logit_rules,
)
from mmd_workers.gateway.intake.media_tiers import MediaTiers
from mmd_workers.gateway.intake.prompt_content import PromptContent
from mmd_workers.gateway.intake.tenant_files import Files
from mmd_workers.gateway.placement.timeline import Timeline
from mmd_workers.media.amount import LEAST_FRAMES, MediaShare
from mmd_workers.media.choice import NO_CHOICE, SamplingChoice
from mmd_workers.media.identity import feature_id
from mmd_workers.media.medium import MediumInfo
from mmd_workers.media.sandbox import DecodePool
from mmd_workers.model.interfaces import Frontend
from mmd_workers.model.prompt import DegradedBy, PromptLayout
from mmd_workers.model.reasoning import Begin, Reasoning
from mmd_workers.model.tool_calls import FORMS, Spelling
from mmd_workers.observe.metrics import Metrics
from mmd_workers.wire.jobs import check_fits
from mmd_workers.wire.messages.message_parts import FeatureRef, Phase, Sampling
from mmd_workers.wire.stored_files import StoredFile

CONCURRENT_FETCHES = 8  # per request
PROBE_WAIT_SECONDS = 60.0  # for a place in the sandbox, in addition to the probe's own deadline
ANSWER_TOKENS = 512  # room made for the answer by omitting frames of videos, if the request sets no limit
FITTING_PERCENTS = (70, 50, 35, 25, 12, 6)
"""Percentages of a frame's pixels, tried in order if even the fewest frames do not fit."""
PROPORTIONAL_STEPS = 3
"""First steps of the search for the most frames that fit. Every step lays out the prompt."""
MAX_SEED = 2**63
MAX_TEXT_TOKENS = 131_072
"""Limit for all prompts of a text completion, and for tokenizing; a model that takes more raises it."""
MAX_PROMPT_LOGPROBS = 16_384  # log probabilities per prompt, which are sent in one message
MAX_CHARACTERS_PER_TOKEN = 16
"""Limit of a text's average. The longest token of a vocabulary may be 128 spaces, and encoding takes time and memory per character."""
LONG_TEXT_CHARACTERS = 16_384
ENCODING_BYTES = 600  # maximum memory per character until the tokenizer has the ids
RENDERING_BYTES = 16  # maximum memory per character while a template renders
MAX_RENDERED_CHARACTERS_PER_TOKEN = 4 * MAX_CHARACTERS_PER_TOKEN
"""Limit for templates that indent JSON, applied before it is known whether this one does."""
INDENT = 4  # spaces per level of JSON in templates
_SHORTEN = "shorten it, or raise spec.model.maxModelLen"
_LESS = "send less text at once"
_MEDIUM = re.compile(r"medium (\d+) ")
_PART = re.compile(r"messages\[\d+\](\.\w+(\[\d+\])?)+")

_Made = TypeVar("_Made")


@dataclass(frozen=True, slots=True)
class _Fit:
    """Tokens of a prompt: the most that fit, and the number that leaves room for an answer."""

    most: int
    wanted: int


_LayOut = Callable[[Sequence[SamplingChoice]], Awaitable[tuple[PromptLayout, Begin | None]]]


@dataclass(frozen=True, slots=True)
class _LaidOut:
    """A prompt, its content and sources, and a function to lay out another. `begins`: the state of the reasoning at the prompt's end."""

    layout: PromptLayout
    content: PromptContent
    sources: list[MediaSource]
    begins: Begin | None
    again: Callable[[PromptContent], Awaitable[PromptLayout]]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that may be placed: the exact prompt, its features, and its sampling.

    `new_parser`: creates the parser of tool calls; None if the answer can have none. `new_reasoning`: creates the parser of reasoning.
    `fallback`: if given, a medium that cannot be encoded need not end the request.
    """

    layout: PromptLayout
    features: list[FeatureRef]
    sampling: Sampling
    new_parser: Callable[[], CallParser] | None = None
    new_reasoning: Callable[[], ReasoningParser] | None = None
    fallback: Fallback[Prepared] | None = None
    guidance: Guidance | None = None

    @property
    def companion_tokens(self) -> int:
        """Tokens of the companion's prompt; 0 if there is no companion."""
        return 0 if self.guidance is None else len(self.guidance.token_ids)


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
        self.policy = pipeline.spec.gateway.media
        self.tiers: MediaTiers | None = None  # tiers of media quality; None: quality is independent of load
        self._model_len = min(
            frontend.max_model_len, pipeline.spec.model.max_model_len or frontend.max_model_len
        )
        self._is_native = pipeline.spec.engine.type == "Native"
        self._has_adapters = bool(pipeline.spec.engine.adapters)
        vllm = pipeline.spec.engine.decode
        self._drafts = vllm is not None and vllm.speculative is not None
        self._frontend = frontend
        self._metrics = metrics
        self._sandbox = sandbox
        self._frame_search = FrameSearch(sandbox)
        self._files = files
        self._grammars = GrammarCheck(frontend.grammars)
        self._long_turn = asyncio.Lock()
        self._long_texts = ThreadPoolExecutor(1, "long-text")  # may still encode for a request that has ended

    async def prepare(
        self, request: ChatRequest, reservation: RequestReservation, timeline: Timeline, model_len: int
    ) -> Prepared:
        """Fetch, probe and hold the media in `reservation`, lay out the prompt, and check limits.

        `model_len`: the longest sequence that the present pods can hold; 0: not known yet.

        Raises:
            ApiError: names the part and the remedy.
        """
        rules, tools = await self._rules(request), request.tool_use
        spelling = None if tools is None else await self._spelling()
        reasoning = await self._reasoning()
        grammar, with_reasoning = await self._grammar(request, tools, spelling), None
        limit = self.limit(model_len)
        fit = None
        if self.policy.video.too_long == "FewerFrames":
            fit = _Fit(limit - 1, limit - min(request.asked_tokens or ANSWER_TOKENS, limit // 2))
        laid_out = await self._lay_out(
            request.messages,
            tools,
            reservation,
            timeline,
            limit - 1,
            _SHORTEN,
            request.reasons,
            request.choice,
            fit,
            self._share(timeline),
        )
        layout, sources, begins = laid_out.layout, laid_out.sources, laid_out.begins
        room = self._room(layout, sources, limit)
        negative = await self._negative_turn(request, limit, reservation)
        guidance = self._guidance(request, layout, limit, negative)
        room = _beside_companion(room, guidance, limit)
        if not sources:
            reservation.release()  # the text exists only as tokens now
        features = self._features(laid_out.content, layout)
        if self._has_encode_queue:
            await _check_jobs(features, sources)
        timeline.note_media(features, layout)
        self._count_tiers(features, timeline)
        new_parser = None if tools is None or spelling is None else tools.parsers(spelling)
        new_reasoning = None
        if grammar is not None and reasoning is not None:
            with_reasoning = await self._after_reasoning(grammar, request, reasoning, begins)
        if reasoning is not None and (grammar is None or with_reasoning is not None):
            new_reasoning = partial(
                ReasoningParser, reasoning, inside=begins == "inside", gap=not _is_exact(request)
            )
        default_tokens = _unasked_tokens(room, len(layout.token_ids), guidance, limit)
        sampling = _sampling(request, rules, with_reasoning or grammar, room, default_tokens)
        prepared = Prepared(layout, features, sampling, new_parser, new_reasoning, guidance=guidance)
        if not features or self.policy.failure_policy == "Fail":
            return prepared
        return replace(
            prepared, fallback=self._fallback(self.policy.failure_policy, laid_out, prepared, limit)
        )

    def _fallback(
        self, policy: Policy, laid_out: _LaidOut, first: Prepared, limit: int
    ) -> Fallback[Prepared]:
        """Build the fallback that lays out a request again if one of its media cannot be encoded.

        The answer may have no more tokens than `first` allows, because the gateway's memory is sized for these.
        """

        lay_out_again = laid_out.again  # without the sources, whose data URLs are no longer needed

        async def lay_out(content: PromptContent) -> tuple[Prepared, list[str]]:
            layout = await lay_out_again(content)
            layout = await asyncio.to_thread(self._reported, content, layout, "failure")
            layout = replace(layout, degraded_by=layout.degraded_by | first.layout.degraded_by)
            room = _beside_companion(limit - len(layout.token_ids), first.guidance, limit)
            if room < 1:
                raise ContextLengthError(
                    f"the prompt has {len(layout.token_ids)} tokens, but at most {limit - 1} fit; {_SHORTEN}"
                )
            max_tokens = min(first.sampling.max_tokens, room)
            min_tokens = min(first.sampling.min_tokens, max_tokens)
            features = self._features(content, layout)
            if self._has_encode_queue:
                for feature in features:
                    await check_fits(feature)
            sampling = replace(first.sampling, max_tokens=max_tokens, min_tokens=min_tokens)
            return replace(first, layout=layout, features=features, sampling=sampling), _ids_of(features)

        amounts = self._frontend.amounts
        return Fallback(policy, laid_out.content, _ids_of(first.features), amounts, lay_out)

    async def features_of(self, stored: StoredFile, reservation: RequestReservation) -> list[FeatureRef]:
        """The features of an uploaded file for a question that chooses no sampling. The file's bytes are held in `reservation`.

        Raises:
            ApiError: the model does not take the file, or the file exceeds a limit.
        """
        files = FileMedia(self._files, stored.tenant)
        source = MediaSource("file", "file", choice=default_choice(self.policy.video), file_id=stored.file_id)
        sources = await files.settled([source])
        self._check_media(sources)
        content = [{"type": sources[0].medium}, {"type": "text", "text": "?"}]
        question = [{"role": "user", "content": content}]
        messages, sources, infos = await self._media(question, sources, files, reservation)
        choices = [source.choice for source in sources]
        rendered = await asyncio.to_thread(self._frontend.render, messages, infos, [], None, choices)
        layout = await asyncio.to_thread(rendered.encode)
        return [
            _feature(info, medium, self._revision) for info, medium in zip(infos, layout.media, strict=True)
        ]

    async def _rules(self, request: GenerationRequest) -> LogitRules | None:
        """The request's changes of logits, checked against the vocabulary."""
        if request.is_guided and not self._is_native:
            unsupported = UnsupportedParameterError(
                "guidance_scale is not supported with spec.engine.type VLLM; omit it, or set spec.engine.type to Native"
            )
            raise ApiError(unsupported, param="guidance_scale")
        if self._drafts:
            check_works_with_drafts(request)
        check_token_ids(request, self._frontend.vocab_size)
        texts, words = request.bad_words, list[list[int]]()
        if texts:
            words = await asyncio.to_thread(bad_words, texts, self._frontend)
        rules = logit_rules(request, words)
        check_something_is_left(request, rules, self._frontend)
        return rules

    async def _grammar(
        self, request: GenerationRequest, tools: ToolUse | None = None, spelling: Spelling | None = None
    ) -> Grammar | None:
        """The grammar of the answer, after compiling it here. `spelling`: of calls of `tools`."""
        grammar, param = request.grammar() or (None, "")
        if grammar is not None:
            await self._grammars.check(grammar, param)
        if tools is not None and spelling is not None:
            grammar = tools.grammar(spelling, grammar)
            if grammar is not None:
                await self._grammars.check(grammar, "tools")
        return grammar

    async def _after_reasoning(
        self, grammar: Grammar, request: ChatRequest, reasoning: Reasoning, begins: Begin | None
    ) -> Grammar | None:
        """The grammar of the reasoning and the answer after it, after compiling it here.

        None if the answer begins at once: the prompt has closed the reasoning, the template has no reasoning, or a regular expression might
        match text that looks like reasoning.
        """
        _, param = request.grammar() or (None, "tools")
        is_exact = _is_exact(request)
        if not reasoning.in_template or begins == "after" or (begins == "before" and is_exact):
            return None
        with_reasoning = after_reasoning(
            grammar, reasoning, param, inside=begins == "inside", gap=not is_exact
        )
        await self._grammars.check(with_reasoning, param)
        return with_reasoning

    async def _reasoning(self) -> Reasoning | None:
        """The model's form of reasoning; None if unknown."""
        frontend = self._frontend
        return await asyncio.to_thread(lambda: frontend.reasoning)

    async def check_reasons(self, param: str) -> None:
        """Check that the model may reason before it answers.

        Raises:
            ApiError: the model has no known form of reasoning; names the field.
        """
        if await self._reasoning() is None:
            unsupported = UnsupportedInputError(
                f"{param}: this model's chat template and tokenizer have no markers of reasoning; omit it, or use another model"
            )
            raise ApiError(unsupported, param=param)

    async def _spelling(self) -> Spelling:
        """The model's form of tool calls.

        Raises:
            ApiError: the model was not made for tools, or writes calls in an unknown form.
        """
        frontend = self._frontend
        if not await asyncio.to_thread(lambda: frontend.renders_tools):
            unsupported = UnsupportedInputError(
                "tools: this model's chat template does not render tools; describe them in a system message and parse the answer, set "
                "tool_choice to 'none', or use another model"
            )
            raise ApiError(unsupported, param="tools")
        if (spelling := await asyncio.to_thread(lambda: frontend.call_spelling)) is None:
            unsupported = UnsupportedInputError(
                f"tools: this model's chat template writes calls in a form that is not known (known: {', '.join(FORMS)}); describe the tools in "
                "a system message and parse the answer, set tool_choice to 'none', or use another model"
            )
            raise ApiError(unsupported, param="tools")
        return spelling

    async def prepare_texts(
        self,
        request: CompletionRequest,
        reservation: RequestReservation,
        timeline: Timeline,
        model_len: int,
    ) -> list[Prepared]:
        """Lay out the prompts of a text completion, and check limits.

        `reservation`: has room for long prompts while they are encoded. `model_len`: see `prepare`.

        Raises:
            ApiError: names the prompt and the remedy.
        """
        rules, grammar = await self._rules(request), await self._grammar(request)
        limit = self.limit(model_len)
        prompts = request.prompts
        most = max(limit, MAX_TEXT_TOKENS)
        texts = [(param, prompt) for param, prompt in prompts if isinstance(prompt, str)]
        for param, text in texts:
            self._check_characters(len(text), limit - 1, param, _SHORTEN)
        self._check_characters(sum(len(text) for _, text in texts), most, "prompt", _LESS)
        started_at = time.time()
        negative = await self._negative_text(request, limit, reservation)
        prepared: list[Prepared] = []
        total = 0
        for param, prompt in prompts:
            special_tokens = request.add_special_tokens is not False
            token_ids = await self.text_ids(param, prompt, special_tokens, reservation)
            total += len(token_ids)
            layout = PromptLayout(token_ids, [])
            room = self._room(layout, [], limit, param)
            guidance = self._guidance(request, layout, limit, negative)
            total += 0 if guidance is None else len(guidance.token_ids)
            if total > most:
                too_many = ContextLengthError(
                    f"{param}: the prompts so far, negative ones included, have {total} tokens, but at most {most} fit one request; send fewer prompts"
                )
                raise ApiError(too_many, param=param)
            room = _beside_companion(room, guidance, limit)
            if request.prompt_logprobs:
                self._check_prompt_logprobs(param, len(token_ids), request.num_logprobs or 0)
            default_tokens = _unasked_tokens(room, len(token_ids), guidance, limit)
            sampling = _sampling(request, rules, grammar, room, default_tokens)
            prepared.append(Prepared(layout, [], sampling, guidance=guidance))
        timeline.add("gateway", [Phase("layout", started_at, time.time())])
        timeline.at_gateway = "placement"
        return prepared

    def _guidance(
        self, request: GenerationRequest, layout: PromptLayout, limit: int, negative: list[int] | None
    ) -> Guidance | None:
        """The companion of a prompt, with the `negative` tokens or, as in `generate`, the prompt's last token.

        Raises:
            ApiError: the companion's prompt is empty or too long.
        """
        if not request.is_guided:
            return None
        token_ids = layout.token_ids[-1:] if negative is None else negative
        fault: MmdError | None = None
        if not token_ids or not self._frontend.placeholder_ids.isdisjoint(token_ids):
            fault = InvalidValueError(
                "negative_prompt must be a text of at least one token, none of which stands for a medium; where it is omitted, the prompt's last "
                "token is used, which must not stand for a medium either"
            )
        elif len(token_ids) >= limit:
            fault = ContextLengthError(
                f"negative_prompt has {len(token_ids)} tokens, but at most {limit - 1} fit; {_SHORTEN}"
            )
        if fault is not None:
            raise ApiError(fault, param="negative_prompt")
        assert request.guidance_scale is not None
        return Guidance(request.guidance_scale, token_ids)

    async def _negative_turn(
        self, request: ChatRequest, limit: int, reservation: RequestReservation
    ) -> list[int] | None:
        """Tokens of a conversation with the negative prompt as its only message; None if there is none, or it is not needed."""
        if not request.is_guided or (text := request.negative_prompt) is None:
            return None
        self._check_characters(len(text), limit - 1, "negative_prompt", _SHORTEN)
        messages = [{"role": "user", "content": [{"type": "text", "text": text}]}]
        render = partial(self._frontend.render, messages, [], [], request.reasons)
        try:
            rendered = await self._encoded(render, len(text), reservation, RENDERING_BYTES)
            layout = await self._encoded(rendered.encode, rendered.num_characters, reservation)
        except MmdError as error:
            raise refused(error, "negative_prompt") from error
        return layout.token_ids

    async def _negative_text(
        self, request: CompletionRequest, limit: int, reservation: RequestReservation
    ) -> list[int] | None:
        """Tokens of the negative prompt, encoded like a prompt; None if there is none, or it is not needed."""
        if not request.is_guided or (text := request.negative_prompt) is None:
            return None
        self._check_characters(len(text), limit - 1, "negative_prompt", _SHORTEN)
        special_tokens = request.add_special_tokens is not False
        encode = partial(self._frontend.encode, text, special_tokens=special_tokens)
        return await self._encoded(encode, len(text), reservation)

    def _check_prompt_logprobs(self, param: str, num_tokens: int, likeliest: int) -> None:
        """Check that the log probabilities of a prompt are available, and fit into one message to the gateway.

        vLLM applies adapters only to the logits of sampled rows, and fails at others.
        """
        if self._has_adapters:
            unsupported = UnsupportedParameterError(
                "echo with logprobs is not supported beside spec.engine.adapters; omit one of them"
            )
            raise ApiError(unsupported, param="logprobs")
        if (values := num_tokens * (1 + likeliest)) > MAX_PROMPT_LOGPROBS:
            many = InvalidValueError(
                f"{param} has {num_tokens} tokens, which with echo and logprobs {likeliest} are {values} log probabilities, more than the limit of "
                f"{MAX_PROMPT_LOGPROBS}; send a shorter prompt or lower logprobs"
            )
            raise ApiError(many, param=param)

    async def text_ids(
        self, param: str, prompt: Prompt, special_tokens: bool, reservation: RequestReservation
    ) -> list[int]:
        """Token ids of a text, or of ids as given. `special_tokens`: add those that the tokenizer puts around a text.

        Raises:
            ApiError: there are no tokens, or one does not exist or stands for a medium.
        """
        frontend = self._frontend
        if isinstance(prompt, str):
            encode = partial(frontend.encode, prompt, special_tokens=special_tokens)
            token_ids = await self._encoded(encode, len(prompt), reservation)
        else:
            token_ids = prompt
        if not token_ids:
            raise ApiError(InvalidValueError(f"{param} is empty; send at least one token"), param=param)
        self.check_ids(param, token_ids)
        if not frontend.placeholder_ids.isdisjoint(token_ids):
            (token,) = frontend.token_strings(
                [next(token_id for token_id in token_ids if token_id in frontend.placeholder_ids)]
            )
            medium = UnsupportedInputError(
                f"{param}: the token {token!r} stands for a medium, and this path takes text alone; send media to /v1/chat/completions"
            )
            raise ApiError(medium, param=param)
        return token_ids

    def check_ids(self, param: str, token_ids: Sequence[int]) -> None:
        """Check that the model has these tokens.

        Raises:
            ApiError: names the first token that the model does not have.
        """
        size = self._frontend.vocab_size
        if max(token_ids, default=0) >= size:
            at, token_id = next((at, value) for at, value in enumerate(token_ids) if value >= size)
            unknown = InvalidValueError(
                f"{param}[{at}]: this model has no token {token_id}; use 0 to {size - 1}"
            )
            raise ApiError(unknown, param=f"{param}[{at}]")

    async def token_ids(
        self,
        messages: Sequence[Message],
        reservation: RequestReservation,
        timeline: Timeline,
        model_len: int,
        tools: ToolUse | None = None,
        reasons: bool | None = None,
        choice: SamplingChoice = NO_CHOICE,
    ) -> list[int]:
        """The prompt of a conversation, which may be longer than the model takes.

        `model_len`: see `prepare`. `reasons`: see `Frontend.render`. `choice`: sampling of media whose parts choose none.

        Raises:
            ApiError: names the part and the remedy.
        """
        max_tokens = max(self.limit(model_len), MAX_TEXT_TOKENS)
        if tools is not None:
            await self._spelling()
        laid_out = await self._lay_out(
            messages, tools, reservation, timeline, max_tokens, _LESS, reasons, choice
        )
        return self._counted(laid_out.layout.token_ids, max_tokens, "messages")

    async def token_ids_of_text(
        self, prompt: str, special_tokens: bool, reservation: RequestReservation, model_len: int
    ) -> list[int]:
        """Token ids of a text, which may be longer than the model takes. `reservation`: see `prepare_texts`; `model_len`: see `prepare`.

        Raises:
            ApiError: the text is too long.
        """
        max_tokens = max(self.limit(model_len), MAX_TEXT_TOKENS)
        self._check_characters(len(prompt), max_tokens, "prompt", _LESS)
        encode = partial(self._frontend.encode, prompt, special_tokens=special_tokens)
        return self._counted(await self._encoded(encode, len(prompt), reservation), max_tokens, "prompt")

    def _counted(self, token_ids: list[int], most: int, param: str) -> list[int]:
        if len(token_ids) > most:
            too_long = ContextLengthError(
                f"{param}: {len(token_ids)} tokens are more than the limit of {most} for tokenizing; {_LESS}"
            )
            raise ApiError(too_long, param=param)
        return token_ids

    def limit(self, model_len: int) -> int:
        """The length of the longest sequence. `model_len`: the longest that the present pods can hold; 0: not known yet."""
        return min(self._model_len, model_len or self._model_len)

    async def _lay_out(
        self,
        messages: Sequence[Message],
        tools: ToolUse | None,
        reservation: RequestReservation,
        timeline: Timeline,
        most_tokens: int,
        remedy: str,
        reasons: bool | None,
        choice: SamplingChoice,
        fit: _Fit | None = None,
        share: MediaShare | None = None,
    ) -> _LaidOut:
        """Fetch, probe and hold the media, and lay out the prompt.

        A text that surely exceeds `most_tokens` is refused first, with this `remedy`. `fit`: if given, frames of videos are omitted to make room.
        `share`: the share of each medium that load permits; None: all.
        """
        marks, descriptions = (0, []) if tools is None else (tools.marks, tools.for_template)
        await reservation.grow((argument_marks(messages) + marks) * MARK_BYTES)
        turns, sources = conversation(messages)
        characters = sum(map(_characters_of, turns)) + (0 if tools is None else tools.characters)
        self._check_characters(characters, most_tokens, "messages", remedy)
        thoughts = sum(len(turn.get("reasoning_content", "")) for turn in turns)
        _check_thoughts(thoughts, most_tokens)
        self._check_number(sources)
        files = FileMedia(self._files, timeline.tenant)
        sources = await files.settled(sources)
        self._check_media(sources)
        self._check_choice(choice, "mm_processor_kwargs")
        self._check_sound(choice, "mm_processor_kwargs.use_audio_in_video")
        for source in sources:
            self._check_choice(source.choice, source.part)
        default = default_choice(self.policy.video)
        sources = [
            replace(source, choice=source.choice.or_else(choice).or_else(default)) for source in sources
        ]
        values = [*descriptions, *_arguments_of(turns)]
        indented = await asyncio.to_thread(lambda: sum(map(_indented_characters, values))) if values else 0
        param = "tools" if descriptions else "messages"
        self._check_indented(indented, most_tokens, param, remedy)
        started_at, timeline.at_gateway = time.time(), "fetch"
        turns, sources, infos = await self._media(turns, sources, files, reservation)
        choices = [source.choice for source in sources]
        fetched_at, timeline.at_gateway = time.time(), "layout"

        async def lay_out(content: PromptContent) -> tuple[PromptLayout, Begin | None]:
            messages, infos, choices = content.messages, content.infos, content.choices
            render = partial(self._frontend.render, messages, infos, descriptions, reasons, choices)
            num_characters = characters + indented + thoughts
            rendered = await self._encoded(render, num_characters, reservation, RENDERING_BYTES)
            if rendered.num_characters > LONG_TEXT_CHARACTERS:  # shorter texts are checked by their tokens
                self._check_characters(rendered.num_characters, most_tokens, param, remedy)
            layout = await self._encoded(rendered.encode, rendered.num_characters, reservation)
            return layout, rendered.reasoning_begins

        async def lay_out_with(choices: Sequence[SamplingChoice]) -> tuple[PromptLayout, Begin | None]:
            return await lay_out(replace(content, choices=choices))

        async def lay_out_again(content: PromptContent) -> PromptLayout:
            return (await lay_out(content))[0]

        content = PromptContent(turns, infos, choices, choices)
        try:
            if infos and share is not None:
                content = await asyncio.to_thread(self._with_share, content, share)
            has_less = content.choices != content.asked
            layout, begins = await lay_out_with(content.choices)
            if fit is not None and len(layout.token_ids) > fit.most:
                layout, content = await self._fitting(layout, content, fit, lay_out_with)
            if has_less:
                layout = await asyncio.to_thread(self._reported, content, layout, "load")
        except MmdError as error:
            raise refused(error, _field_of(error.message, sources)) from error
        timeline.add(
            "gateway", [Phase("fetch", started_at, fetched_at), Phase("layout", fetched_at, time.time())]
        )
        timeline.at_gateway = "placement"
        return _LaidOut(layout, content.sampled_as(layout), sources, begins, lay_out_again)

    async def _fitting(
        self, layout: PromptLayout, content: PromptContent, fit: _Fit, lay_out: _LayOut
    ) -> tuple[PromptLayout, PromptContent]:
        """The prompt with fewer frames of its videos, or the given prompt if no reduction makes it fit.

        If the prompt does not fit with the fewest frames, these also get fewer pixels: the largest of `FITTING_PERCENTS` that fits.
        """
        layout = await _with_fewer_frames(layout, content.choices, fit, lay_out)
        if len(layout.token_ids) <= fit.most:
            return layout, content
        if not any(info.modality == "video" for info in content.infos):
            return layout, content
        amounts, choices = (
            await asyncio.to_thread(self._frontend.amounts, content.infos, content.choices),
            content.choices,
        )
        for percent in FITTING_PERCENTS:
            share, previous = MediaShare(pixels_percent=percent, frames_percent=0), choices
            choices = [
                share.of(choice, amount) if amount.pixels and amount.frames else choice
                for choice, amount in zip(content.choices, amounts, strict=True)
            ]
            if choices == previous:
                continue
            candidate, _ = await lay_out(choices)
            if len(candidate.token_ids) <= fit.most:
                content = replace(content, choices=choices)
                return await asyncio.to_thread(self._reported, content, candidate, "context"), content
        return layout, content

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

    def _with_share(self, content: PromptContent, share: MediaShare) -> PromptContent:
        amounts = self._frontend.amounts(content.infos, content.choices)
        choices = [share.of(*pair) for pair in zip(content.choices, amounts, strict=True)]
        return replace(content, choices=choices)

    def _reported(self, content: PromptContent, layout: PromptLayout, by: DegradedBy) -> PromptLayout:
        requested, used = (
            self._frontend.amounts(content.infos, choices) for choices in (content.asked, content.choices)
        )
        return content.reported(layout, requested, used, by)

    def _features(self, content: PromptContent, layout: PromptLayout) -> list[FeatureRef]:
        pairs = zip(content.infos, layout.media, strict=True)
        return [_feature(info, medium, self._revision) for info, medium in pairs]

    async def _encoded(
        self,
        encode: Callable[[], _Made],
        characters: int,
        reservation: RequestReservation,
        character_bytes: int = ENCODING_BYTES,
    ) -> _Made:
        """Call `encode`, for a text of so many characters, in a thread.

        Long texts are encoded one at a time, so that short ones never wait for them. Their memory is counted, up to half of what the request may
        still hold. While they wait for their turn, they hold only their present memory.
        """
        if characters <= LONG_TEXT_CHARACTERS:
            return await asyncio.to_thread(encode)
        async with self._long_turn:
            initial_bytes = reservation.num_bytes
            await reservation.grow(min(characters * character_bytes, reservation.room_bytes // 2))
            try:
                return await asyncio.get_running_loop().run_in_executor(self._long_texts, encode)
            finally:
                reservation.shrink(initial_bytes)

    def _check_characters(self, characters: int, most_tokens: int, param: str, remedy: str) -> None:
        """Refuse a text that cannot fit, before spending time on tokenizing megabytes."""
        longest = self._frontend.longest_token_characters
        if characters > most_tokens * longest:
            fault = f"at least {-(-characters // longest)} tokens, but at most {most_tokens} fit"
        elif characters > most_tokens * MAX_CHARACTERS_PER_TOKEN:
            fault = f"more than {MAX_CHARACTERS_PER_TOKEN} for each of the {most_tokens} tokens that fit"
        else:
            return
        raise ApiError(
            ContextLengthError(f"the text has {characters} characters: {fault}; {remedy}"), param=param
        )

    def _check_indented(self, characters: int, most_tokens: int, param: str, remedy: str) -> None:
        """Refuse JSON that a template could expand far beyond what fits, before spending memory on rendering it."""
        most = most_tokens * MAX_RENDERED_CHARACTERS_PER_TOKEN
        if characters > most:
            fault = ContextLengthError(
                f"{param}: the JSON of tools and of the arguments of tool calls has {characters} characters when indented, but at most {most} "
                f"may be rendered for the {most_tokens} tokens that fit; nest it less deeply, or {remedy}"
            )
            raise ApiError(fault, param=param)

    def _check_number(self, sources: Sequence[MediaSource]) -> None:
        """Refuse too many media. Each page of a document counts as one."""
        most = self.policy.max_items_per_request
        if len(sources) > most:
            too_many = TooManyMediaError(
                f"the request has {len(sources)} media items, more than the limit of {most}; send fewer, or raise spec.gateway.media.maxItemsPerRequest"
            )
            raise ApiError(too_many, param=sources[most].param)

    def _check_media(self, sources: Sequence[MediaSource]) -> None:
        self._check_number(sources)
        takes = ", ".join(sorted(self._frontend.modalities)) or "text only"
        for source in sources:
            if source.medium not in self._frontend.modalities:
                unsupported = UnsupportedInputError(
                    f"{source.param}: this model does not accept {source.medium} (accepted: {takes}); remove the part or use another model"
                )
                raise ApiError(unsupported, param=source.param)

    def _check_choice(self, choice: SamplingChoice, where: str) -> None:
        """Refuse values above the limits of the resource. `where`: path of the object with the fields."""
        video = self.policy.video
        per_second = video.frames_per_second_milli / 1000
        if choice.fps is not None and choice.fps > per_second:
            param = f"{where}.fps"
            too_fast = InvalidValueError(
                f"{param}: {choice.fps:g} frames a second are more than the limit of {per_second:g}; request fewer, or raise "
                "spec.gateway.media.video.framesPerSecondMilli"
            )
            raise ApiError(too_fast, param=param)
        if choice.num_frames is not None and choice.num_frames > video.max_frames:
            param = f"{where}.num_frames"
            too_many = InvalidValueError(
                f"{param}: {choice.num_frames} frames are more than the limit of {video.max_frames}; request fewer, or raise "
                "spec.gateway.media.video.maxFrames"
            )
            raise ApiError(too_many, param=param)
        if choice.timestamps is not None and len(choice.timestamps) > video.max_frames:
            param = f"{where}.timestamps"
            too_many = InvalidValueError(
                f"{param}: {len(choice.timestamps)} frames are more than the limit of {video.max_frames}; request fewer, or raise "
                "spec.gateway.media.video.maxFrames"
            )
            raise ApiError(too_many, param=param)
        for name, pixels in (("min_pixels", choice.min_pixels), ("max_pixels", choice.max_pixels)):
            if pixels is not None and pixels > self.policy.image.max_pixels:
                too_large = InvalidValueError(
                    f"{where}.{name}: {pixels} are more than the limit of {self.policy.image.max_pixels}; request fewer, or raise "
                    "spec.gateway.media.image.maxPixels"
                )
                raise ApiError(too_large, param=f"{where}.{name}")

    def _check_sound(self, choice: SamplingChoice, param: str) -> None:
        """Refuse videos with their sound if the model or the engine does not take sound."""
        if not choice.with_sound:
            return
        if not self._frontend.takes_sound_of_videos:
            fault = "this model takes no video with its own sound; omit it, or use another model, such as a thinker of Qwen2.5-Omni or Qwen3-Omni"
        elif not self._is_native:
            fault = "spec.engine.type VLLM gets no video with its own sound; omit it, or set spec.engine.type to Native"
        else:
            return
        raise ApiError(UnsupportedInputError(f"{param}: {fault}"), param=param)

    async def _media(
        self,
        messages: list[dict[str, Any]],
        sources: Sequence[MediaSource],
        files: FileMedia,
        reservation: RequestReservation,
    ) -> tuple[list[dict[str, Any]], list[MediaSource], list[MediumInfo]]:
        """Fetch, probe and hold the media, with one entry for each page of a document. Choices are resolved to frames."""
        if not sources:
            return messages, [], []
        fetched = await self._bring(sources, files, reservation)
        resolved = [
            replace(source, choice=choice) for source, (_, choice) in zip(sources, fetched, strict=True)
        ]
        messages, all_sources, infos = expanded(messages, resolved, [infos for infos, _ in fetched])
        self._check_number(all_sources)
        return messages, all_sources, infos

    async def _bring(
        self, sources: Sequence[MediaSource], files: FileMedia, reservation: RequestReservation
    ) -> list[tuple[list[MediumInfo], SamplingChoice]]:
        """Fetch and probe each source, and return its facts with its choice, resolved to frames.

        A document has facts for each page, a video also for its sound, if it has any and the request asks for it.
        """
        body_characters = sum(len(source.url) for source in sources if source.url[:5].lower() == "data:")
        await reservation.resize(2 * body_characters)
        slots = asyncio.Semaphore(CONCURRENT_FETCHES)

        async def bring(source: MediaSource) -> tuple[bytes, list[MediumInfo], SamplingChoice]:
            async with slots:
                try:
                    data = await files.bytes_of(source, self.policy, reservation.grow)
                    infos = await self._probe(data, source)
                    seconds = PROBE_WAIT_SECONDS + self.policy.decode_timeout_seconds
                    search = self._frame_search.resolved(data, infos[0], source.choice, source, seconds)
                    return data, infos, await search
                except MmdError as error:
                    raise refused(error, source.param) from error

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(bring(source)) for source in sources]
        except ExceptionGroup as faults:
            raise _first(faults) from faults
        results: list[tuple[list[MediumInfo], SamplingChoice]] = []
        distinct_bytes = {id(data): len(data) for data, _, _ in (task.result() for task in tasks)}
        for data, infos, choice in (task.result() for task in tasks):
            reservation.put(infos[0].digest, data)
            self._metrics.fetch_bytes.labels(infos[0].modality).inc(infos[0].num_bytes)
            results.append((infos, choice))
        reservation.shrink(sum(distinct_bytes.values()))
        return results

    async def _probe(self, data: bytes, source: MediaSource) -> list[MediumInfo]:
        """The facts of a medium, of each page of a document, or of a video and its sound."""
        seconds = PROBE_WAIT_SECONDS + self.policy.decode_timeout_seconds
        try:
            async with asyncio.timeout(seconds):
                if source.kind == "document":
                    return await self._sandbox.probe_pages(data, source.pages, self.policy)
                if source.pages:
                    raise InvalidValueError(
                        f"the file is of kind {source.kind}, which has no pages; omit pages"
                    )
                info = await self._sandbox.probe(data, source.medium, self.policy)
                if not (source.choice.with_sound and info.has_sound):
                    return [info]
                return [info, await self._sandbox.probe(data, "audio", self.policy, of_video=True)]
        except TimeoutError as error:
            raise OverloadedError(
                f"no decode process became available for this {source.kind} within {seconds:.0f} s; retry later"
            ) from error

    def _room(
        self, layout: PromptLayout, sources: list[MediaSource], limit: int, param: str = "messages"
    ) -> int:
        """Number of tokens that may be generated after the prompt."""
        prompt = len(layout.token_ids)
        if prompt < limit:
            return limit - prompt
        text = prompt - sum(medium.num_tokens for medium in layout.media)
        remedy = _SHORTEN
        if self.policy.video.too_long == "Reject" and any(m.modality == "video" for m in layout.media):
            remedy += ", or set spec.gateway.media.video.tooLong to FewerFrames"
        largest, tokens = "the text", text
        for source, medium in zip(sources, layout.media, strict=True):
            if medium.num_tokens > tokens:
                largest, tokens = source.param, medium.num_tokens
        too_long = ContextLengthError(
            f"the prompt has {prompt} tokens, but at most {limit - 1} fit: {prompt - limit + 1} too many; the largest part is {largest} "
            f"with {tokens} tokens; {remedy}"
        )
        raise ApiError(too_long, param=param if largest == "the text" else largest)


async def _with_fewer_frames(
    layout: PromptLayout,
    choices: Sequence[SamplingChoice],
    fit: _Fit,
    lay_out: _LayOut,
) -> PromptLayout:
    """The prompt with the largest share of each video's frames that fits, or the given prompt if even the smallest share does not fit.

    Tokens are nearly proportional to frames. So the first steps interpolate, and the others halve the remaining interval.
    """
    frames = [len(medium.sampling.frame_indices) for medium in layout.media]
    longest = max(frames, default=0)
    if longest <= LEAST_FRAMES:
        return layout

    async def with_share(of_longest: int) -> PromptLayout:
        shares = [max(min(LEAST_FRAMES, count), count * of_longest // longest) for count in frames]
        limited = [replace(choice, max_frames=share) for choice, share in zip(choices, shares, strict=True)]
        return (await lay_out(limited))[0]

    best = await with_share(LEAST_FRAMES)
    if len(best.token_ids) > fit.most:
        return layout
    low, low_tokens = LEAST_FRAMES, len(best.token_ids)
    high, high_tokens = longest, len(layout.token_ids)  # too many tokens
    for number in itertools.count():
        if high - low <= 1 or low_tokens > fit.wanted:
            break
        middle = (low + high) // 2
        if number < PROPORTIONAL_STEPS:
            expected = low + (high - low) * (fit.wanted - low_tokens) // (high_tokens - low_tokens)
            middle = min(high - 1, max(low + 1, expected))
        candidate = await with_share(middle)
        if len(candidate.token_ids) <= fit.wanted:
            best, low, low_tokens = candidate, middle, len(candidate.token_ids)
        else:
            high, high_tokens = middle, len(candidate.token_ids)
    media = [
        replace(medium, omitted_frames=count - len(medium.sampling.frame_indices))
        for medium, count in zip(best.media, frames, strict=True)
    ]
    return replace(best, media=media, degraded_by=frozenset({"context"}))


def _check_thoughts(characters: int, most_tokens: int) -> None:
    """Refuse returned reasoning that is too long to be searched and rendered.

    Templates omit most of it, so it may be longer than the model takes.
    """
    most = max(most_tokens, MAX_TEXT_TOKENS) * MAX_CHARACTERS_PER_TOKEN
    if characters > most:
        too_long = ContextLengthError(
            f"messages: the reasoning of all messages has {characters} characters, more than the limit of {most}; leave out that of earlier messages"
        )
        raise ApiError(too_long, param="messages")


def _characters_of(message: dict[str, Any]) -> int:
    """Count the characters of a message's text and of texts in the arguments of its tool calls."""
    content = sum(len(part.get("text", "")) for part in message["content"])
    return content + sum(_characters(call["function"]["arguments"]) for call in message.get("tool_calls", ()))


def _characters(value: Any) -> int:
    """Count the characters of all texts in a JSON value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_characters, value.values()))
    return sum(map(_characters, value)) if isinstance(value, list) else 0


def _arguments_of(messages: Sequence[dict[str, Any]]) -> list[Any]:
    """The arguments of all tool calls in these messages."""
    return [call["function"]["arguments"] for message in messages for call in message.get("tool_calls", ())]


def _indented_characters(value: Any) -> int:
    """Count the characters of a value as JSON with each of its values indented on its own line, as some templates write it."""
    return len(json.dumps(value, ensure_ascii=False)) + _indentation(value, 0)


def _indentation(value: Any, depth: int) -> int:
    """Count the white space that indenting adds to a value at this depth."""
    if not isinstance(value, dict | list) or not value:
        return 0
    inner = value.values() if isinstance(value, dict) else value
    own_characters = len(value) * (INDENT * (depth + 1) + 1) + INDENT * depth + 1
    return own_characters + sum(
        _indentation(item, depth + 1) for item in inner if isinstance(item, dict | list)
    )


def _field_of(message: str, sources: Sequence[MediaSource]) -> str:
    """The path of the field that an error of the frontend is about."""
    if medium := _MEDIUM.match(message):
        return sources[int(medium[1])].param
    part = _PART.match(message)
    return part.group() if part else "messages"


def _first(faults: BaseExceptionGroup[Any]) -> BaseException:
    first: BaseException = faults.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first


def _feature(info: MediumInfo, medium: Any, revision: str) -> FeatureRef:
    sampling = asdict(medium.sampling)
    size = sampling.pop("size")
    if not sampling["nominal_indices"]:
        del sampling["nominal_indices"]
    if medium.sampling.pooled_frames == 1:
        del sampling["pooled_frames"]
    if not info.page:
        del sampling["page"]
    if not info.of_video:
        del sampling["of_video"]
    settings = {**sampling, "modality": info.modality} | ({"size": size} if size else {})
    return FeatureRef(
        feature_id=feature_id(info.digest, revision, settings),
        digest=info.digest,
        modality=medium.modality,
        num_bytes=info.num_bytes,
        num_tokens=medium.num_tokens,
        ranges=[list(span) for span in medium.ranges],
        geometry=medium.geometry,
        sampling=sampling,
        work=medium.work,
        host_bytes=medium.host_bytes,
        size=size,
    )


def _ids_of(features: Sequence[FeatureRef]) -> list[str]:
    return [feature.feature_id for feature in features]


async def _check_jobs(features: list[FeatureRef], sources: list[MediaSource]) -> None:
    """Refuse a medium whose encode job is too large for the queue: the prefill pod that publishes it could not name the field."""
    for feature, source in zip(features, sources, strict=True):
        try:
            await check_fits(feature)
        except MmdError as error:
            raise refused(error, source.param) from error


def _is_exact(request: ChatRequest) -> bool:
    """True if every character of the answer must match, white space and markers included: a regular expression or a choice."""
    grammar, _ = request.grammar() or (None, "")
    return grammar is not None and grammar.type == "regex"


def _unasked_tokens(room: int, prompt_tokens: int, guidance: Guidance | None, limit: int) -> int:
    """Maximum tokens of an answer for which the client has set no limit.

    Every pod's KV pool holds one whole context, which a guided answer shares with its companion.
    """
    if guidance is None:
        return room
    return max(1, min(room, (limit - prompt_tokens - len(guidance.token_ids)) // 2))


def _beside_companion(room: int, guidance: Guidance | None, limit: int) -> int:
    """Number of tokens that may be generated after a prompt and its companion's. `room`: without the companion."""
    return room if guidance is None else min(room, limit - len(guidance.token_ids))


def _sampling(
    request: GenerationRequest,
    rules: LogitRules | None,
    grammar: Grammar | None,
    room: int,
    default_tokens: int,
) -> Sampling:
    """The sampling of a request. `room`: maximum tokens of the answer; `default_tokens`: their number if the request sets no limit.

    The seed is always set, so that a request that moves to another pod draws the same tokens.
    """
    max_tokens = min(request.asked_tokens or default_tokens, room)
    return Sampling(
        max_tokens=max_tokens,
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        top_k=max(0, request.top_k or 0),
        seed=secrets.randbelow(MAX_SEED) if request.seed is None else request.seed % MAX_SEED,
        logprobs=request.num_logprobs,
        ignore_eos=bool(request.ignore_eos),
        min_p=request.min_p or 0.0,
        min_tokens=min(request.min_tokens or 0, max_tokens),
        stop_token_ids=sorted(set(request.stop_token_ids or ())),
        rules=rules,
        grammar=grammar,
        prompt_logprobs=request.prompt_logprobs,
    )
