"""Refuses what exceeds a limit: characters, tokens and media of a request, each with the numbers and a remedy. Independent of workers.

The limits are those of the model and of the resource. Texts are counted before time or memory is spent on them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from mmd_api.contract.errors import (
    ContextLengthError,
    InvalidValueError,
    MmdError,
    TooManyMediaError,
    UnsupportedInputError,
    UnsupportedParameterError,
)
from mmd_api.pipeline import PipelineConfig
from mmd_workers.gateway.basics.api_errors import ApiError, refused
from mmd_workers.gateway.content.chat_request import GenerationRequest
from mmd_workers.gateway.content.completion_request import CompletionRequest
from mmd_workers.gateway.content.parts import MediaSource
from mmd_workers.media.choice import SamplingChoice
from mmd_workers.model.interfaces import Frontend
from mmd_workers.model.prompt import PromptLayout
from mmd_workers.wire.jobs import check_fits
from mmd_workers.wire.messages.message_parts import FeatureRef

MAX_TEXT_TOKENS = 131_072
"""Limit for all prompts of a text completion, and for tokenizing; a model that takes more raises it."""
MAX_PROMPT_LOGPROBS = 16_384  # log probabilities per prompt, which are sent in one message
MAX_CHARACTERS_PER_TOKEN = 16
"""Limit of a text's average. The longest token of a vocabulary may be 128 spaces, and encoding takes time and memory per character."""
MAX_RENDERED_CHARACTERS_PER_TOKEN = 4 * MAX_CHARACTERS_PER_TOKEN
"""Limit for templates that indent JSON, applied before it is known whether this one does."""
USUAL_CHARACTERS_PER_TOKEN = 4  # for an estimate in a message
INDENT = 4  # spaces per level of JSON in templates
SHORTEN = "shorten it, or raise spec.model.maxModelLen"
SEND_LESS = "send less text at once"


class RequestChecks:
    """Checks requests against the limits of one model and its resource. `policy`: the limits on media, replaced when they change."""

    def __init__(self, pipeline: PipelineConfig, frontend: Frontend) -> None:
        self.policy = pipeline.spec.gateway.media
        self._model_len = min(
            frontend.max_model_len, pipeline.spec.model.max_model_len or frontend.max_model_len
        )
        self._is_native = pipeline.spec.engine.type == "Native"
        self._has_adapters = bool(pipeline.spec.engine.adapters)
        self._frontend = frontend

    def limit(self, model_len: int) -> int:
        """The length of the longest sequence. `model_len`: the longest that the present pods can hold; 0: not known yet."""
        return min(self._model_len, model_len or self._model_len)

    def check_characters(self, characters: int, most_tokens: int, param: str, remedy: str) -> None:
        """Refuse a text that cannot fit, before spending time on tokenizing megabytes."""
        longest = self._frontend.longest_token_characters
        if characters > most_tokens * longest:
            count = f"at least {-(-characters // longest)}"
        elif characters > most_tokens * MAX_CHARACTERS_PER_TOKEN:
            count = f"about {characters // USUAL_CHARACTERS_PER_TOKEN}"
        else:
            return
        detail = f"the text has {characters} characters; {remedy}"
        raise ApiError(overflow(count, most_tokens, detail, of_context=remedy == SHORTEN), param=param)

    def check_indented(self, characters: int, most_tokens: int, param: str, remedy: str) -> None:
        """Refuse JSON that a template could expand far beyond what fits, before spending memory on rendering it."""
        most = most_tokens * MAX_RENDERED_CHARACTERS_PER_TOKEN
        if characters > most:
            detail = (
                f"the JSON of tools and of the arguments of tool calls has {characters} characters when indented, but at most {most} "
                f"may be rendered for the tokens that fit; nest it less deeply, or {remedy}"
            )
            count = f"about {characters // USUAL_CHARACTERS_PER_TOKEN}"
            raise ApiError(overflow(count, most_tokens, detail, of_context=remedy == SHORTEN), param=param)

    def counted(self, token_ids: list[int], most: int, param: str) -> list[int]:
        """Return token ids for tokenizing, after checking that there are at most `most`."""
        if len(token_ids) > most:
            detail = f"the maximum is that for tokenizing; {SEND_LESS}"
            raise ApiError(overflow(str(len(token_ids)), most, detail, of_context=False), param=param)
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

    def check_prompt_logprobs(self, request: GenerationRequest, param: str, layout: PromptLayout) -> None:
        """Check that the log probabilities of a prompt, if requested, are available, and fit into one message to the gateway.

        vLLM applies adapters only to the logits of sampled rows, and fails at others. `param`: the field of the prompt.
        """
        if request.num_prompt_logprobs is None:
            return
        likeliest = (
            request.num_computed_logprobs or 0
        )  # workers report as many beside each token, of prompt and answer
        is_echo = request.prompt_logprobs is None
        field, name = (
            ("logprobs", "echo with logprobs") if is_echo else ("prompt_logprobs", "prompt_logprobs")
        )
        beside = ""
        if self._has_adapters:
            beside = f"{name} is not supported beside spec.engine.adapters; omit one of them"
        elif layout.media:
            beside = f"{name} is not supported for prompts with media; omit it, or send text alone"
        if beside:
            raise ApiError(UnsupportedParameterError(beside), param=field)
        if not is_echo and likeliest > (request.prompt_logprobs or 0):
            field = "logprobs" if isinstance(request, CompletionRequest) else "top_logprobs"
            name += f" and {field}"
        num_tokens = len(layout.token_ids)
        if (values := num_tokens * (1 + likeliest)) > MAX_PROMPT_LOGPROBS:
            many = InvalidValueError(
                f"{param} has {num_tokens} tokens, which with {name} {likeliest} are {values} log probabilities, more than the limit of "
                f"{MAX_PROMPT_LOGPROBS}; send a shorter prompt or lower {field}"
            )
            raise ApiError(many, param=param)

    def room(
        self, layout: PromptLayout, sources: list[MediaSource], limit: int, param: str = "messages"
    ) -> int:
        """Number of tokens that may be generated after the prompt. `param`: the field with most of its text."""
        prompt = len(layout.token_ids)
        if prompt < limit:
            return limit - prompt
        text = prompt - sum(medium.num_tokens for medium in layout.media)
        remedy = SHORTEN
        if self.policy.video.too_long == "Reject" and any(m.modality == "video" for m in layout.media):
            remedy += ", or set spec.gateway.media.video.tooLong to FewerFrames"
        largest, tokens = "the text, most of it that of tools," if param == "tools" else "the text", text
        for source, medium in zip(sources, layout.media, strict=True):
            if medium.num_tokens > tokens:
                largest, tokens, param = source.param, medium.num_tokens, source.param
        too_long = overflow(
            str(prompt), limit - 1, f"the largest part is {largest} with {tokens} tokens; {remedy}"
        )
        raise ApiError(too_long, param=param)

    def check_number(self, sources: Sequence[MediaSource]) -> None:
        """Refuse too many media. Each page of a document counts as one."""
        most = self.policy.max_items_per_request
        if len(sources) > most:
            too_many = TooManyMediaError(
                f"the request has {len(sources)} media items, more than the limit of {most}; send fewer, or raise spec.gateway.media.maxItemsPerRequest"
            )
            raise ApiError(too_many, param=sources[most].param)

    def check_media(self, sources: Sequence[MediaSource]) -> None:
        """Refuse too many media, and modalities that the model does not take."""
        self.check_number(sources)
        takes = ", ".join(sorted(self._frontend.modalities)) or "text only"
        for source in sources:
            if source.medium not in self._frontend.modalities:
                unsupported = UnsupportedInputError(
                    f"{source.param}: this model does not accept {source.medium} (accepted: {takes}); remove the part or use another model"
                )
                raise ApiError(unsupported, param=source.param)

    def check_choice(self, choice: SamplingChoice, where: str) -> None:
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

    def check_sound(self, choice: SamplingChoice, param: str) -> None:
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


def overflow(count: str, most_tokens: int, detail: str, *, of_context: bool = True) -> ContextLengthError:
    """The error for a prompt of `count` tokens of which `most_tokens` fit, in the words by which agents notice that they must shorten it.

    Those of Anthropic's API look for the first sentence, those of OpenAI's for the second one. `of_context`: the limit is the model's context,
    without a token for the answer.
    """
    context = f". This model's maximum context length is {most_tokens + 1} tokens" if of_context else ""
    return ContextLengthError(
        f"prompt is too long: {count} tokens > {most_tokens} maximum{context}; {detail}"
    )


def check_thoughts(characters: int, most_tokens: int, remedy: str) -> None:
    """Refuse returned reasoning that is too long to be searched and rendered.

    Templates omit most of it, so it may be longer than the model takes. `remedy`: see `check_characters`.
    """
    most = max(most_tokens, MAX_TEXT_TOKENS) * MAX_CHARACTERS_PER_TOKEN
    if characters > most:
        count = f"about {characters // USUAL_CHARACTERS_PER_TOKEN}"
        detail = f"the reasoning of all messages has {characters} characters, more than the limit of {most}; leave out that of earlier messages"
        too_long = overflow(count, most_tokens, detail, of_context=remedy == SHORTEN)
        raise ApiError(too_long, param="messages")


async def check_jobs(features: list[FeatureRef], sources: list[MediaSource]) -> None:
    """Refuse a medium whose encode job is too large for the queue: the prefill pod that publishes it could not name the field."""
    for feature, source in zip(features, sources, strict=True):
        try:
            await check_fits(feature)
        except MmdError as error:
            raise refused(error, source.param) from error


def characters_of(message: dict[str, Any]) -> int:
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


def arguments_of(messages: Sequence[dict[str, Any]]) -> list[Any]:
    """The arguments of all tool calls in these messages."""
    return [call["function"]["arguments"] for message in messages for call in message.get("tool_calls", ())]


def indented_characters(value: Any) -> int:
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
