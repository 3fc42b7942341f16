"""From a validated request to an exact prompt: media fetched, probed and held, placeholders laid out, limits checked.

Independent of workers. Media are opened in the sandbox only; here they are bytes.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
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
)
from mmd_api.contract.pools import Modality
from mmd_api.contract.sampling import LogitRules
from mmd_api.pipeline import PipelineConfig
from mmd_workers.gateway.api_errors import ApiError, refused
from mmd_workers.gateway.body import MARK_BYTES
from mmd_workers.gateway.call_parser import CallParser
from mmd_workers.gateway.chat_request import ChatRequest, GenerationRequest
from mmd_workers.gateway.completion_request import CompletionRequest, Prompt
from mmd_workers.gateway.conversation import Message, argument_marks, conversation
from mmd_workers.gateway.hold import RequestReservation
from mmd_workers.gateway.logit_rules import (
    bad_words,
    check_something_is_left,
    check_token_ids,
    check_works_with_drafts,
    logit_rules,
)
from mmd_workers.gateway.parts import MediaSource
from mmd_workers.gateway.response_format import GrammarCheck
from mmd_workers.gateway.timeline import Timeline
from mmd_workers.gateway.tools import ToolUse
from mmd_workers.media.fetch import fetch
from mmd_workers.media.identity import feature_id
from mmd_workers.media.medium import MediumInfo
from mmd_workers.media.sandbox import DecodePool
from mmd_workers.model.interfaces import Frontend
from mmd_workers.model.prompt import PromptLayout
from mmd_workers.model.tool_calls import FORMS, Spelling
from mmd_workers.observe.metrics import Metrics
from mmd_workers.wire.jobs import check_fits
from mmd_workers.wire.messages import FeatureRef, Phase, Sampling

CONCURRENT_FETCHES = 8  # of one request
PROBE_WAIT_SECONDS = 60.0  # for a place in the sandbox and the probe, on top of the probe's own deadline
MAX_SEED = 2**63
MAX_TEXT_TOKENS = 131_072
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
_PART = re.compile(r"messages\[\d+\](\.\w+(\[\d+\])?)+")

_Made = TypeVar("_Made")


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that may be placed: the exact prompt, its features, and how to sample. `new_parser`: reads the calls of tools in an answer;
    None where it can have none.
    """

    layout: PromptLayout
    features: list[FeatureRef]
    sampling: Sampling
    new_parser: Callable[[], CallParser] | None = None


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
        vllm = pipeline.spec.engine.decode
        self._drafts = vllm is not None and vllm.speculative is not None
        self._frontend = frontend
        self._metrics = metrics
        self._sandbox = sandbox
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
        grammar = await self._grammar(request, tools, spelling)
        limit = self.limit(model_len)
        layout, sources, infos = await self._lay_out(
            request.messages, tools, reservation, timeline, limit - 1, _SHORTEN
        )
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
        new_parser = None if tools is None or spelling is None else tools.parsers(spelling)
        return Prepared(layout, features, _sampling(request, rules, grammar, room), new_parser)

    async def _rules(self, request: GenerationRequest) -> LogitRules | None:
        """What the request changes of logits, checked against the vocabulary."""
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
        prepared: list[Prepared] = []
        total = 0
        for param, prompt in prompts:
            special_tokens = request.add_special_tokens is not False
            token_ids = await self.text_ids(param, prompt, special_tokens, reservation)
            total += len(token_ids)
            if total > most:
                too_many = ContextLengthError(
                    f"{param}: the prompts so far have {total} tokens, but at most {most} fit one request; send fewer prompts"
                )
                raise ApiError(too_many, param=param)
            layout = PromptLayout(token_ids, [])
            room = self._room(layout, [], limit, param)
            prepared.append(Prepared(layout, [], _sampling(request, rules, grammar, room)))
        timeline.add("gateway", [Phase("layout", begun, time.time())])
        return prepared

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
    ) -> list[int]:
        """The prompt of a conversation, which may be longer than what fits the model. `model_len`: see `prepare`.

        Raises:
            ApiError: names the part and the remedy.
        """
        most = max(self.limit(model_len), MAX_TEXT_TOKENS)
        if tools is not None:
            await self._spelling()
        layout, _, _ = await self._lay_out(messages, tools, reservation, timeline, most, _LESS)
        return self._counted(layout.token_ids, most, "messages")

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
    ) -> tuple[PromptLayout, list[MediaSource], list[MediumInfo]]:
        """Fetch, probe and hold the media, and lay out the prompt; a text that surely exceeds `most_tokens` is refused before, with this
        `remedy`."""
        marks, described = (0, []) if tools is None else (tools.marks, tools.for_template)
        await reservation.grow((argument_marks(messages) + marks) * MARK_BYTES)
        found, sources = conversation(messages)
        characters = sum(map(_characters_of, found)) + (0 if tools is None else tools.characters)
        self._check_characters(characters, most_tokens, "messages", remedy)
        self._check_media(sources)
        values = [*described, *_arguments_of(found)]
        indented = await asyncio.to_thread(lambda: sum(map(_indented_characters, values))) if values else 0
        param = "tools" if described else "messages"
        self._check_indented(indented, most_tokens, param, remedy)
        begun = time.time()
        infos = await self._bring(sources, reservation) if sources else []
        fetched = time.time()
        try:
            render = partial(self._frontend.render, found, infos, described)
            rendered = await self._encoded(render, characters + indented, reservation, RENDERING_BYTES)
            if rendered.num_characters > LONG_TEXT_CHARACTERS:  # of shorter ones the tokens are counted
                self._check_characters(rendered.num_characters, most_tokens, param, remedy)
            layout = await self._encoded(rendered.encode, rendered.num_characters, reservation)
        except MmdError as error:
            raise refused(error, _part_of(error.message)) from error
        timeline.add("gateway", [Phase("fetch", begun, fetched), Phase("layout", fetched, time.time())])
        return layout, sources, infos

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

    def _room(
        self, layout: PromptLayout, sources: list[MediaSource], limit: int, param: str = "messages"
    ) -> int:
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
        raise ApiError(too_long, param=param if largest == "the text" else largest)


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


def _sampling(
    request: GenerationRequest, rules: LogitRules | None, grammar: Grammar | None, room: int
) -> Sampling:
    """The seed is always set, so that a request that moves to another pod draws the same tokens."""
    max_tokens = min(request.asked_tokens or room, room)
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
    )
