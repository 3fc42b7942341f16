"""From a validated request to an exact prompt: media fetched, probed and held, placeholders laid out, limits checked.

Independent of workers. Media are opened in the sandbox only; here they are bytes.
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

CONCURRENT_FETCHES = 8  # of one request
PROBE_WAIT_SECONDS = 60.0  # for a place in the sandbox and the probe, on top of the probe's own deadline
ANSWER_TOKENS = 512  # for which frames of videos are left out, where the request names no number
FITTING_PERCENTS = (70, 50, 35, 25, 12, 6)
"""Of the pixels of a frame, which are tried one after the other where the least frames are too many."""
PROPORTIONAL_STEPS = 3  # of the search for so many frames as fit: every step lays the prompt out
MAX_SEED = 2**63
MAX_TEXT_TOKENS = 131_072
MAX_PROMPT_LOGPROBS = 16_384  # of one prompt, which come in one message
"""Of all prompts of a text completion, and of what is tokenized alone, where the model takes fewer."""
MAX_CHARACTERS_PER_TOKEN = 16
"""Of a text on average: a vocabulary's longest token may be 128 spaces, and every character takes time and memory to encode."""
LONG_TEXT_CHARACTERS = 16_384
ENCODING_BYTES = 600  # that the tokenizer takes for a character until it has its ids, at most
RENDERING_BYTES = 16  # that a template takes for a character, at most
MAX_RENDERED_CHARACTERS_PER_TOKEN = 4 * MAX_CHARACTERS_PER_TOKEN
"""Of what a template that indents JSON would write, before it is known whether this one does."""
INDENT = 4  # of JSON in templates
_SHORTEN = "shorten it, or raise spec.model.maxModelLen"
_LESS = "send less text at once"
_MEDIUM = re.compile(r"medium (\d+) ")
_PART = re.compile(r"messages\[\d+\](\.\w+(\[\d+\])?)+")

_Made = TypeVar("_Made")


@dataclass(frozen=True, slots=True)
class _Fit:
    """Tokens of a prompt: the most that fit, and so many that there is room for an answer."""

    most: int
    wanted: int


_LayOut = Callable[[Sequence[SamplingChoice]], Awaitable[tuple[PromptLayout, Begin | None]]]


@dataclass(frozen=True, slots=True)
class _LaidOut:
    """A prompt, what it was made from, and how to lay out another. `begins`: where the reasoning is at its end."""

    layout: PromptLayout
    content: PromptContent
    sources: list[MediaSource]
    begins: Begin | None
    again: Callable[[PromptContent], Awaitable[PromptLayout]]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that may be placed: the exact prompt, its features, and how to sample. `new_parser`: reads the calls of tools in an answer;
    None where it can have none; `new_reasoning`: its reasoning. `fallback`: where a medium that cannot be encoded need not end the request.
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
        """Of its companion's prompt; 0: it has none."""
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
        self.tiers: MediaTiers | None = None  # of quality under load; None: load changes nothing
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
        self._long_texts = ThreadPoolExecutor(1, "long-text")  # which may still encode for one that has gone

    async def prepare(
        self, request: ChatRequest, reservation: RequestReservation, timeline: Timeline, model_len: int
    ) -> Prepared:
        """Fetch, probe and hold the media in `reservation`; lay out the prompt; check limits.

        `model_len`: the longest sequence that the present pods can hold; 0: not known yet.

        Raises:
            ApiError: names the part and the remedy.
        """
        rules, tools = await self._rules(request), request.tool_use
        spelling = None if tools is None else await self._spelling()
        reasoning = await self._reasoning()
        grammar, after = await self._grammar(request, tools, spelling), None
        limit = self.limit(model_len)
        fit = None
        if self.policy.video.too_long == "FewerFrames":
            fit = _Fit(limit - 1, limit - min(request.asked_tokens or ANSWER_TOKENS, limit // 2))
        laid = await self._lay_out(
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
        layout, sources, begins = laid.layout, laid.sources, laid.begins
        room = self._room(layout, sources, limit)
        negative = await self._negative_turn(request, limit, reservation)
        guidance = self._guidance(request, layout, limit, negative)
        room = _beside_companion(room, guidance, limit)
        if not sources:
            reservation.release()  # the text is a list of tokens now
        features = self._features(laid.content, layout)
        if self._has_encode_queue:
            await _check_jobs(features, sources)
        timeline.note_media(features, layout)
        self._count_tiers(features, timeline)
        new_parser = None if tools is None or spelling is None else tools.parsers(spelling)
        new_reasoning = None
        if grammar is not None and reasoning is not None:
            after = await self._after_reasoning(grammar, request, reasoning, begins)
        if reasoning is not None and (grammar is None or after is not None):
            new_reasoning = partial(
                ReasoningParser, reasoning, inside=begins == "inside", gap=not _is_exact(request)
            )
        unasked = _unasked_tokens(room, len(layout.token_ids), guidance, limit)
        sampling = _sampling(request, rules, after or grammar, room, unasked)
        prepared = Prepared(layout, features, sampling, new_parser, new_reasoning, guidance=guidance)
        if not features or self.policy.failure_policy == "Fail":
            return prepared
        return replace(prepared, fallback=self._fallback(self.policy.failure_policy, laid, prepared, limit))

    def _fallback(self, policy: Policy, laid: _LaidOut, first: Prepared, limit: int) -> Fallback[Prepared]:
        """Lays out a request again when one of its media cannot be encoded. The answer has no more tokens than `first` allows: the gateway has
        memory for so many."""

        again = laid.again  # and not the sources, whose data URLs nothing needs any more

        async def lay_out(content: PromptContent) -> tuple[Prepared, list[str]]:
            layout = await again(content)
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
        return Fallback(policy, laid.content, _ids_of(first.features), amounts, lay_out)

    async def features_of(self, stored: StoredFile, reservation: RequestReservation) -> list[FeatureRef]:
        """The features of an uploaded file as a question gets them that chooses nothing; its bytes are held in `reservation`.

        Raises:
            ApiError: the model does not take it, or it exceeds a limit.
        """
        files = FileMedia(self._files, stored.tenant)
        source = MediaSource("file", "file", choice=default_choice(self.policy.video), file_id=stored.file_id)
        sources = await files.settled([source])
        self._check_media(sources)
        content = [{"type": sources[0].medium}, {"type": "text", "text": "?"}]
        asked = [{"role": "user", "content": content}]
        found, sources, infos = await self._media(asked, sources, files, reservation)
        choices = [one.choice for one in sources]
        rendered = await asyncio.to_thread(self._frontend.render, found, infos, [], None, choices)
        layout = await asyncio.to_thread(rendered.encode)
        return [
            _feature(info, medium, self._revision) for info, medium in zip(infos, layout.media, strict=True)
        ]

    async def _rules(self, request: GenerationRequest) -> LogitRules | None:
        """What the request changes of logits, checked against the vocabulary."""
        if request.is_guided and not self._is_native:
            unsupported = UnsupportedParameterError(
                "guidance_scale is not supported with spec.engine.type VLLM; omit it, or set spec.engine.type to Native"
            )
            raise ApiError(unsupported, param="guidance_scale")
        if self._drafts:
            check_works_with_drafts(request)
        check_token_ids(request, self._frontend.vocab_size)
        asked, words = request.bad_words, list[list[int]]()
        if asked:
            words = await asyncio.to_thread(bad_words, asked, self._frontend)
        rules = logit_rules(request, words)
        check_something_is_left(request, rules, self._frontend)
        return rules

    async def _grammar(
        self, request: GenerationRequest, tools: ToolUse | None = None, spelling: Spelling | None = None
    ) -> Grammar | None:
        """What the answer must match, once it has been compiled here. `spelling`: of calls of `tools`."""
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
        """What the reasoning and the answer after it must match, once it has been compiled here. None: the answer begins at once, since the
        prompt has closed the reasoning, the template does not know of it, or a regular expression might match what looks like it."""
        _, param = request.grammar() or (None, "tools")
        exact = _is_exact(request)
        if not reasoning.in_template or begins == "after" or (begins == "before" and exact):
            return None
        after = after_reasoning(grammar, reasoning, param, inside=begins == "inside", gap=not exact)
        await self._grammars.check(after, param)
        return after

    async def _reasoning(self) -> Reasoning | None:
        """How the model reasons before it answers."""
        frontend = self._frontend
        return await asyncio.to_thread(lambda: frontend.reasoning)

    async def check_reasons(self, param: str) -> None:
        """Check that the model may reason before it answers.

        Raises:
            ApiError: it has no form of it that is known; names the field.
        """
        if await self._reasoning() is None:
            unsupported = UnsupportedInputError(
                f"{param}: this model's chat template and tokenizer have no markers of reasoning; omit it, or use another model"
            )
            raise ApiError(unsupported, param=param)

    async def _spelling(self) -> Spelling:
        """How the model writes calls of tools.

        Raises:
            ApiError: it has not been made for tools, or writes calls as no form that is known.
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
        """Lay out the prompts of a text completion; check limits. `reservation` has room for long ones while they are encoded.
        `model_len`: see `prepare`.

        Raises:
            ApiError: names the prompt and the remedy.
        """
        rules, grammar = await self._rules(request), await self._grammar(request)
        limit = self.limit(model_len)
        prompts = request.prompts
        most = max(limit, MAX_TEXT_TOKENS)
        texts = [(param, one) for param, one in prompts if isinstance(one, str)]
        for param, text in texts:
            self._check_characters(len(text), limit - 1, param, _SHORTEN)
        self._check_characters(sum(len(text) for _, text in texts), most, "prompt", _LESS)
        begun = time.time()
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
            unasked = _unasked_tokens(room, len(token_ids), guidance, limit)
            sampling = _sampling(request, rules, grammar, room, unasked)
            prepared.append(Prepared(layout, [], sampling, guidance=guidance))
        timeline.add("gateway", [Phase("layout", begun, time.time())])
        timeline.at_gateway = "placement"
        return prepared

    def _guidance(
        self, request: GenerationRequest, layout: PromptLayout, limit: int, negative: list[int] | None
    ) -> Guidance | None:
        """The companion of a prompt: the tokens of its `negative` prompt or, where it has none, the prompt's last one, as `generate` has it.

        Raises:
            ApiError: the companion has no prompt, or too long a one.
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
        """Tokens of a conversation that has the negative prompt for its only message. None: there is none, or nothing needs it."""
        if not request.is_guided or (text := request.negative_prompt) is None:
            return None
        self._check_characters(len(text), limit - 1, "negative_prompt", _SHORTEN)
        asked = [{"role": "user", "content": [{"type": "text", "text": text}]}]
        render = partial(self._frontend.render, asked, [], [], request.reasons)
        try:
            rendered = await self._encoded(render, len(text), reservation, RENDERING_BYTES)
            layout = await self._encoded(rendered.encode, rendered.num_characters, reservation)
        except MmdError as error:
            raise refused(error, "negative_prompt") from error
        return layout.token_ids

    async def _negative_text(
        self, request: CompletionRequest, limit: int, reservation: RequestReservation
    ) -> list[int] | None:
        """Tokens of the negative prompt as if it were the prompt. None: there is none, or nothing needs it."""
        if not request.is_guided or (text := request.negative_prompt) is None:
            return None
        self._check_characters(len(text), limit - 1, "negative_prompt", _SHORTEN)
        special_tokens = request.add_special_tokens is not False
        encode = partial(self._frontend.encode, text, special_tokens=special_tokens)
        return await self._encoded(encode, len(text), reservation)

    def _check_prompt_logprobs(self, param: str, num_tokens: int, likeliest: int) -> None:
        """Check that the log probabilities of a prompt can be had, and reach the gateway in one message. vLLM applies adapters to the logits of
        sampled rows alone, and fails at others."""
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
        """Token ids of a text or of ids as given. `special_tokens`: a text gets those that the tokenizer puts around it.

        Raises:
            ApiError: there are none, or one that does not exist or stands for a medium.
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
                [next(one for one in token_ids if one in frontend.placeholder_ids)]
            )
            medium = UnsupportedInputError(
                f"{param}: the token {token!r} stands for a medium, and this path takes text alone; send media to /v1/chat/completions"
            )
            raise ApiError(medium, param=param)
        return token_ids

    def check_ids(self, param: str, token_ids: Sequence[int]) -> None:
        """Check that the model has these tokens.

        Raises:
            ApiError: names the first one that it has not.
        """
        size = self._frontend.vocab_size
        if max(token_ids, default=0) >= size:
            at, token_id = next((at, one) for at, one in enumerate(token_ids) if one >= size)
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
        """The prompt of a conversation, which may be longer than what fits the model. `model_len`: see `prepare`; `reasons`: `Frontend.render`;
        `choice`: of how media are sampled whose parts do not say so.

        Raises:
            ApiError: names the part and the remedy.
        """
        most = max(self.limit(model_len), MAX_TEXT_TOKENS)
        if tools is not None:
            await self._spelling()
        laid = await self._lay_out(messages, tools, reservation, timeline, most, _LESS, reasons, choice)
        return self._counted(laid.layout.token_ids, most, "messages")

    async def token_ids_of_text(
        self, prompt: str, special_tokens: bool, reservation: RequestReservation, model_len: int
    ) -> list[int]:
        """Token ids of a text, of which there may be more than what fits the model. `reservation`: see `prepare_texts`; `model_len`: see
        `prepare`.

        Raises:
            ApiError: the text is too long.
        """
        most = max(self.limit(model_len), MAX_TEXT_TOKENS)
        self._check_characters(len(prompt), most, "prompt", _LESS)
        encode = partial(self._frontend.encode, prompt, special_tokens=special_tokens)
        return self._counted(await self._encoded(encode, len(prompt), reservation), most, "prompt")

    def _counted(self, token_ids: list[int], most: int, param: str) -> list[int]:
        if len(token_ids) > most:
            too_long = ContextLengthError(
                f"{param}: {len(token_ids)} tokens are more than the limit of {most} for tokenizing; {_LESS}"
            )
            raise ApiError(too_long, param=param)
        return token_ids

    def limit(self, model_len: int) -> int:
        """The longest sequence. `model_len`: what the present pods can hold; 0: not known yet."""
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
        """Fetch, probe and hold the media, and lay out the prompt; a text that surely exceeds `most_tokens` is refused before, with this `remedy`.
        `fit`: videos have fewer frames where they leave no room; None: they never have. `share`: what load leaves of each medium; None: all."""
        marks, described = (0, []) if tools is None else (tools.marks, tools.for_template)
        await reservation.grow((argument_marks(messages) + marks) * MARK_BYTES)
        found, sources = conversation(messages)
        characters = sum(map(_characters_of, found)) + (0 if tools is None else tools.characters)
        self._check_characters(characters, most_tokens, "messages", remedy)
        thoughts = sum(len(turn.get("reasoning_content", "")) for turn in found)
        _check_thoughts(thoughts, most_tokens)
        self._check_number(sources)
        files = FileMedia(self._files, timeline.tenant)
        sources = await files.settled(sources)
        self._check_media(sources)
        self._check_choice(choice, "mm_processor_kwargs")
        self._check_sound(choice, "mm_processor_kwargs.use_audio_in_video")
        for source in sources:
            self._check_choice(source.choice, source.part)
        usual = default_choice(self.policy.video)
        sources = [replace(one, choice=one.choice.or_else(choice).or_else(usual)) for one in sources]
        values = [*described, *_arguments_of(found)]
        indented = await asyncio.to_thread(lambda: sum(map(_indented_characters, values))) if values else 0
        param = "tools" if described else "messages"
        self._check_indented(indented, most_tokens, param, remedy)
        begun, timeline.at_gateway = time.time(), "fetch"
        found, sources, infos = await self._media(found, sources, files, reservation)
        choices = [source.choice for source in sources]
        fetched, timeline.at_gateway = time.time(), "layout"

        async def laid(content: PromptContent) -> tuple[PromptLayout, Begin | None]:
            messages, infos, choices = content.messages, content.infos, content.choices
            render = partial(self._frontend.render, messages, infos, described, reasons, choices)
            written = characters + indented + thoughts
            rendered = await self._encoded(render, written, reservation, RENDERING_BYTES)
            if rendered.num_characters > LONG_TEXT_CHARACTERS:  # of shorter ones the tokens are counted
                self._check_characters(rendered.num_characters, most_tokens, param, remedy)
            layout = await self._encoded(rendered.encode, rendered.num_characters, reservation)
            return layout, rendered.reasoning_begins

        async def laid_out(choices: Sequence[SamplingChoice]) -> tuple[PromptLayout, Begin | None]:
            return await laid(replace(content, choices=choices))

        async def again(content: PromptContent) -> PromptLayout:
            return (await laid(content))[0]

        content = PromptContent(found, infos, choices, choices)
        try:
            if infos and share is not None:
                content = await asyncio.to_thread(self._with_share, content, share)
            has_less = content.choices != content.asked
            layout, begins = await laid_out(content.choices)
            if fit is not None and len(layout.token_ids) > fit.most:
                layout, content = await self._fitting(layout, content, fit, laid_out)
            if has_less:
                layout = await asyncio.to_thread(self._reported, content, layout, "load")
        except MmdError as error:
            raise refused(error, _field_of(error.message, sources)) from error
        timeline.add("gateway", [Phase("fetch", begun, fetched), Phase("layout", fetched, time.time())])
        timeline.at_gateway = "placement"
        return _LaidOut(layout, content.sampled_as(layout), sources, begins, again)

    async def _fitting(
        self, layout: PromptLayout, content: PromptContent, fit: _Fit, laid_out: _LayOut
    ) -> tuple[PromptLayout, PromptContent]:
        """The prompt with fewer frames of its videos, or where it would not fit with the least of them, with the most of `FITTING_PERCENTS` of the
        pixels of these. The one given where it does not fit so either."""
        layout = await _with_fewer_frames(layout, content.choices, fit, laid_out)
        if len(layout.token_ids) <= fit.most:
            return layout, content
        if not any(info.modality == "video" for info in content.infos):
            return layout, content
        amounts, choices = (
            await asyncio.to_thread(self._frontend.amounts, content.infos, content.choices),
            content.choices,
        )
        for percent in FITTING_PERCENTS:
            share, before = MediaShare(pixels_percent=percent, frames_percent=0), choices
            choices = [
                share.of(choice, amount) if amount.pixels and amount.frames else choice
                for choice, amount in zip(content.choices, amounts, strict=True)
            ]
            if choices == before:
                continue
            tried, _ = await laid_out(choices)
            if len(tried.token_ids) <= fit.most:
                content = replace(content, choices=choices)
                return await asyncio.to_thread(self._reported, content, tried, "context"), content
        return layout, content

    def _share(self, timeline: Timeline) -> MediaShare | None:
        """What load leaves of each medium of a request that comes now."""
        if self.tiers is None or (tier := self.tiers.tier) is None:
            return None
        timeline.media_tier = self.tiers.number
        return MediaShare(tier.pixels_percent, tier.frames_percent, tier.max_frames)

    def _count_tiers(self, features: Sequence[FeatureRef], timeline: Timeline) -> None:
        """Count media by their tier, where there are tiers."""
        if self.tiers is not None:
            for feature in features:
                self._metrics.tiered_media.labels(feature.modality, str(timeline.media_tier)).inc()

    def _with_share(self, content: PromptContent, share: MediaShare) -> PromptContent:
        amounts = self._frontend.amounts(content.infos, content.choices)
        choices = [share.of(*one) for one in zip(content.choices, amounts, strict=True)]
        return replace(content, choices=choices)

    def _reported(self, content: PromptContent, layout: PromptLayout, by: DegradedBy) -> PromptLayout:
        asked, taken = (
            self._frontend.amounts(content.infos, one) for one in (content.asked, content.choices)
        )
        return content.reported(layout, asked, taken, by)

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
        """What `encode` makes of so many characters, in a thread. Long texts are encoded one at a time, so that others never wait for them, and
        their memory is counted, up to half of what the request may still hold: others wait for their turn with what they hold."""
        if characters <= LONG_TEXT_CHARACTERS:
            return await asyncio.to_thread(encode)
        async with self._long_turn:
            before = reservation.num_bytes
            await reservation.grow(min(characters * character_bytes, reservation.room_bytes // 2))
            try:
                return await asyncio.get_running_loop().run_in_executor(self._long_texts, encode)
            finally:
                reservation.shrink(before)

    def _check_characters(self, characters: int, most_tokens: int, param: str, remedy: str) -> None:
        """Refuse a text that cannot fit before spending time on tokenizing megabytes."""
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
        """Refuse JSON that a template could turn into far more text than fits before spending memory on rendering it."""
        most = most_tokens * MAX_RENDERED_CHARACTERS_PER_TOKEN
        if characters > most:
            fault = ContextLengthError(
                f"{param}: the JSON of tools and of the arguments of tool calls has {characters} characters when indented, but at most {most} "
                f"may be rendered for the {most_tokens} tokens that fit; nest it less deeply, or {remedy}"
            )
            raise ApiError(fault, param=param)

    def _check_number(self, sources: Sequence[MediaSource]) -> None:
        """Refuse too many media; each page of a document is one."""
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
        """Refuse more than the resource allows. `where`: the object with the fields."""
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
        """Refuse videos with their sound where the model or the engine takes none."""
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
        """Fetch, probe and hold the media. Of a document each page is one; choices have the frames that they mean."""
        if not sources:
            return messages, [], []
        brought = await self._bring(sources, files, reservation)
        resolved = [replace(one, choice=found) for one, (_, found) in zip(sources, brought, strict=True)]
        messages, all_sources, infos = expanded(messages, resolved, [infos for infos, _ in brought])
        self._check_number(all_sources)
        return messages, all_sources, infos

    async def _bring(
        self, sources: Sequence[MediaSource], files: FileMedia, reservation: RequestReservation
    ) -> list[tuple[list[MediumInfo], SamplingChoice]]:
        """The facts of each source, of a document one for each page, of a video those of its sound too, where it has and is to have one; and its choice
        with the frames that this means."""
        in_body = sum(len(source.url) for source in sources if source.url[:5].lower() == "data:")
        await reservation.resize(2 * in_body)
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
        brought: list[tuple[list[MediumInfo], SamplingChoice]] = []
        distinct = {id(data): len(data) for data, _, _ in (task.result() for task in tasks)}
        for data, infos, choice in (task.result() for task in tasks):
            reservation.put(infos[0].digest, data)
            self._metrics.fetch_bytes.labels(infos[0].modality).inc(infos[0].num_bytes)
            brought.append((infos, choice))
        reservation.shrink(sum(distinct.values()))
        return brought

    async def _probe(self, data: bytes, source: MediaSource) -> list[MediumInfo]:
        """The facts of a medium, or of each page of a document, or of a video and its sound."""
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
        """Tokens that may be generated after the prompt."""
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
    laid_out: _LayOut,
) -> PromptLayout:
    """The prompt with the largest share of the frames of each video with which it fits. The one given where it would not fit with the least of
    each. Tokens are nearly proportional to frames, so the first steps go where that leads, and the others halve what is left.
    """
    frames = [len(medium.sampling.frame_indices) for medium in layout.media]
    longest = max(frames, default=0)
    if longest <= LEAST_FRAMES:
        return layout

    async def with_share(of_longest: int) -> PromptLayout:
        shares = [max(min(LEAST_FRAMES, count), count * of_longest // longest) for count in frames]
        fewer = [replace(choice, max_frames=share) for choice, share in zip(choices, shares, strict=True)]
        return (await laid_out(fewer))[0]

    found = await with_share(LEAST_FRAMES)
    if len(found.token_ids) > fit.most:
        return layout
    low, least = LEAST_FRAMES, len(found.token_ids)
    high, most = longest, len(layout.token_ids)  # too many
    for number in itertools.count():
        if high - low <= 1 or least > fit.wanted:
            break
        middle = (low + high) // 2
        if number < PROPORTIONAL_STEPS:
            expected = low + (high - low) * (fit.wanted - least) // (most - least)
            middle = min(high - 1, max(low + 1, expected))
        tried = await with_share(middle)
        if len(tried.token_ids) <= fit.wanted:
            found, low, least = tried, middle, len(tried.token_ids)
        else:
            high, most = middle, len(tried.token_ids)
    media = [
        replace(medium, omitted_frames=count - len(medium.sampling.frame_indices))
        for medium, count in zip(found.media, frames, strict=True)
    ]
    return replace(found, media=media, degraded_by=frozenset({"context"}))


def _check_thoughts(characters: int, most_tokens: int) -> None:
    """Refuse reasoning that is sent back and is too long to be searched and rendered. Templates leave most of it out, so that more of it than fits
    the model is no fault."""
    most = max(most_tokens, MAX_TEXT_TOKENS) * MAX_CHARACTERS_PER_TOKEN
    if characters > most:
        too_long = ContextLengthError(
            f"messages: the reasoning of all messages has {characters} characters, more than the limit of {most}; leave out that of earlier messages"
        )
        raise ApiError(too_long, param="messages")


def _characters_of(message: dict[str, Any]) -> int:
    """Of a message's text and of the texts in the arguments of its tool calls."""
    content = sum(len(part.get("text", "")) for part in message["content"])
    return content + sum(_characters(call["function"]["arguments"]) for call in message.get("tool_calls", ()))


def _characters(value: Any) -> int:
    """Of all texts in a JSON value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_characters, value.values()))
    return sum(map(_characters, value)) if isinstance(value, list) else 0


def _arguments_of(messages: Sequence[dict[str, Any]]) -> list[Any]:
    """Of all tool calls in these messages."""
    return [call["function"]["arguments"] for message in messages for call in message.get("tool_calls", ())]


def _indented_characters(value: Any) -> int:
    """Of a value as JSON with each of its values on an indented line of its own, as some templates write it."""
    return len(json.dumps(value, ensure_ascii=False)) + _indentation(value, 0)


def _indentation(value: Any, depth: int) -> int:
    """White space that indenting adds to a value at this depth."""
    if not isinstance(value, dict | list) or not value:
        return 0
    inner = value.values() if isinstance(value, dict) else value
    own = len(value) * (INDENT * (depth + 1) + 1) + INDENT * depth + 1
    return own + sum(_indentation(one, depth + 1) for one in inner if isinstance(one, dict | list))


def _field_of(message: str, sources: Sequence[MediaSource]) -> str:
    """The field that an error of the frontend is about."""
    if medium := _MEDIUM.match(message):
        return sources[int(medium[1])].param
    found = _PART.match(message)
    return found.group() if found else "messages"


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
    """Refuse a medium whose encode job does not fit the queue: the prefill pod that publishes it could not name the field."""
    for feature, source in zip(features, sources, strict=True):
        try:
            await check_fits(feature)
        except MmdError as error:
            raise refused(error, source.param) from error


def _is_exact(request: ChatRequest) -> bool:
    """Whether each character of the answer must match, white space and markers too: a regular expression or a choice."""
    grammar, _ = request.grammar() or (None, "")
    return grammar is not None and grammar.type == "regex"


def _unasked_tokens(room: int, prompt_tokens: int, guidance: Guidance | None, limit: int) -> int:
    """Tokens of an answer for which the client has set no limit. Every pod's KV pool holds one whole context, which a guided answer shares with its
    companion's."""
    if guidance is None:
        return room
    return max(1, min(room, (limit - prompt_tokens - len(guidance.token_ids)) // 2))


def _beside_companion(room: int, guidance: Guidance | None, limit: int) -> int:
    """Tokens that may be generated after a prompt and its companion's, with so much room after the prompt."""
    return room if guidance is None else min(room, limit - len(guidance.token_ids))


def _sampling(
    request: GenerationRequest, rules: LogitRules | None, grammar: Grammar | None, room: int, unasked: int
) -> Sampling:
    """`room`: for the answer; `unasked`: its tokens where the request sets no limit. The seed is always set, so that a request that moves to another
    pod draws the same tokens."""
    max_tokens = min(request.asked_tokens or unasked, room)
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
