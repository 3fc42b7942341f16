"""OpenAI's chat completions as pydantic models, with faults named by field. Independent of the network.

Fields that this server does not serve are refused by name with a remedy, never ignored, unless they have the value that
means "off".
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from mmd_api.contract.answers import Grammar
from mmd_api.contract.errors import InvalidValueError
from mmd_workers.gateway.basics.api_errors import ApiError
from mmd_workers.gateway.basics.strict import DISCARD, Explained, Ignored, NotServed, Strict, validated
from mmd_workers.gateway.content.conversation import ROLES, Messages, check_continued
from mmd_workers.gateway.content.parts import ANSWER_PART_TYPES, ProcessorKwargs
from mmd_workers.gateway.content.response_format import ResponseFormat, StructuredOutputs
from mmd_workers.gateway.content.tools import CHOICE_TAGS, ToolChoice, Tools, ToolUse, tool_use
from mmd_workers.media.choice import NO_CHOICE, SamplingChoice

MAX_TOKEN_IDS = 1024  # limit of logit_bias and of allowed_token_ids
MAX_STOPS = 64
MAX_STOP_CHARACTERS = 1024  # characters of all stop strings
MAX_STOP_TOKEN_IDS = 128
MAX_BAD_WORDS = 128
MAX_BIAS = 100.0
MAX_GUIDANCE_SCALE = 100.0
MAX_LOGPROBS = 20  # likeliest tokens beside each token
MAX_DIGITS = 10  # digits in a token id

_NO_EFFECT = Ignored("it has no effect")


class StreamOptions(Strict):
    """`include_usage`: one more chunk at the end, with the token counts. `continuous_usage_stats`: each chunk has those so far, too."""

    include_usage: bool | None = None
    continuous_usage_stats: Annotated[
        bool | None, Explained("with `include_usage`, each chunk has the token counts of all answers so far")
    ] = None
    include_obfuscation: Annotated[bool | None, Ignored("chunks are never padded")] = None


def _short_together(stops: list[str]) -> list[str]:
    """Check that the strings can be looked for with each token of the answer."""
    characters = sum(map(len, stops))
    if characters > MAX_STOP_CHARACTERS:
        raise PydanticCustomError(
            "stops", f"has {characters} characters; use at most {MAX_STOP_CHARACTERS} in all strings"
        )
    return stops


Stop = Annotated[str, Field(min_length=1, max_length=256)]
Stops = Annotated[list[Stop], Field(max_length=MAX_STOPS, fail_fast=True), AfterValidator(_short_together)]


def _stop_kind(value: object) -> str | None:
    return "one" if isinstance(value, str) else "list" if isinstance(value, list) else None


def _biases(value: object) -> dict[int, float]:
    """Convert token ids and biases. Only the first fault is reported, because pydantic would create an error for each."""
    if not isinstance(value, dict):
        raise PydanticCustomError("logit_bias_type", "must be an object of token ids with their biases")
    if len(value) > MAX_TOKEN_IDS:
        raise PydanticCustomError("logit_bias", f"has {len(value)} tokens; use at most {MAX_TOKEN_IDS}")
    biases: dict[int, float] = {}
    for token, bias in value.items():
        if not (isinstance(token, str) and token.isascii() and token.isdigit() and len(token) <= MAX_DIGITS):
            raise PydanticCustomError(
                "logit_bias", f"{str(token)[:64]!r} is not a token id; use digits alone"
            )
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise PydanticCustomError("logit_bias_type", f"the bias of token {token} must be a number")
        if not -MAX_BIAS <= bias <= MAX_BIAS:
            raise PydanticCustomError(
                "logit_bias", f"the bias of token {token} must be from {-MAX_BIAS:.0f} to {MAX_BIAS:.0f}"
            )
        biases[int(token)] = float(bias)
    return biases


TokenId = Annotated[int, Field(ge=0)]
BadWord = Annotated[str, Field(min_length=1, max_length=128)]
ModelName = Annotated[str, Field(max_length=512)]
MaxTokens = Annotated[int, Field(ge=1)]
Temperature = Annotated[float, Field(ge=0, le=2)]
TopP = Annotated[float, Field(gt=0, le=1)]
TopK = Annotated[int, Field(ge=-1, le=2**31 - 1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


def _kept_tokens(value: int | None) -> int | None:
    if value is not None and value != -1 and value < 1:
        raise PydanticCustomError("kept_tokens", "must be at least 1, or -1 for as many tokens as fit")
    return value


CacheSalt = Annotated[str, Field(min_length=1, max_length=256)]
"""As in vLLM's API: prompts share the KV of a prefix only with prompts of the same salt."""

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""`none` turns reasoning off, if the model's template has a switch for it. All other values turn it on, and are equivalent."""


class GenerationRequest(Strict):
    """What requests for an answer have in common."""

    model: ModelName
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: MaxTokens | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    logit_bias: Annotated[dict[int, float], BeforeValidator(_biases)] | None = None
    allowed_token_ids: (
        Annotated[list[TokenId], Field(min_length=1, max_length=MAX_TOKEN_IDS, fail_fast=True)] | None
    ) = None
    bad_words: Annotated[list[BadWord], Field(max_length=MAX_BAD_WORDS, fail_fast=True)] | None = None
    stop: (
        Annotated[
            Annotated[Stop, Tag("one")] | Annotated[Stops, Tag("list")],
            Discriminator(
                _stop_kind,
                custom_error_type="stop_type",
                custom_error_message="stop must be a string or a list of strings",
            ),
        ]
        | None
    ) = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)] | None = (
        None
    )
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    n: Annotated[int, Field(ge=1, le=16)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: Annotated[
        bool | None, Explained("`false`: special tokens of the answer are a part of its text")
    ] = None
    include_stop_str_in_output: Annotated[
        bool | None, Explained("`true`: the stop string or token that ends the answer is a part of its text")
    ] = None
    spaces_between_special_tokens: Annotated[
        bool | None, Ignored("the tokenizer decides which tokens have spaces between them")
    ] = None
    return_token_ids: bool | None = None
    timings: bool | None = None
    user: Annotated[str | None, Field(max_length=1024), _NO_EFFECT] = None
    metadata: Annotated[dict[str, Any] | None, DISCARD, _NO_EFFECT] = None
    service_tier: Annotated[
        Literal["auto", "default", "flex", "priority", "scale"] | None, Ignored("there is one tier")
    ] = None
    request_id: Annotated[
        str | None, Field(max_length=256), Ignored("send the header x-client-request-id")
    ] = None
    cache_salt: CacheSalt | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    prompt_logprobs: Annotated[
        Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None,
        Explained("number of likeliest tokens beside each token of the prompt; not in a stream"),
    ] = None
    truncate_prompt_tokens: Annotated[
        int | None,
        AfterValidator(_kept_tokens),
        Explained(
            "the prompt's last tokens are kept, as many as this; `-1`: as many as fit beside the answer"
        ),
    ] = None
    guidance_scale: Annotated[float, Field(ge=1, le=MAX_GUIDANCE_SCALE)] | None = None
    negative_prompt: str | None = None

    @property
    def is_guided(self) -> bool:
        """True if a companion runs beside each answer."""
        return self.guidance_scale is not None and self.guidance_scale != 1

    @property
    def stops(self) -> list[str]:
        """The stop strings as a list."""
        return [self.stop] if isinstance(self.stop, str) else (self.stop or [])

    @property
    def asked_tokens(self) -> int | None:
        """Maximum tokens of an answer; None: as many as fit."""
        return self.max_tokens

    @property
    def wants_usage(self) -> bool:
        """True if a stream ends with the token counts."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def wants_continuous_usage(self) -> bool:
        """True if each chunk of a stream has the token counts so far."""
        return (
            self.wants_usage
            and self.stream_options is not None
            and bool(self.stream_options.continuous_usage_stats)
        )

    def grammar(self) -> tuple[Grammar, str] | None:
        """The grammar of the answer, and the field that sets it; None if the answer is free.

        Raises:
            ApiError: two fields contradict each other.
        """
        form = self.response_format.grammar() if self.response_format is not None else None
        if self.structured_outputs is not None:
            if form is not None:
                both = InvalidValueError("set response_format or structured_outputs, not both")
                raise ApiError(both, param="structured_outputs")
            form = self.structured_outputs.as_grammar()
        if (field := form[1] if form is not None else self.calls_field) is not None:
            for name in ("ignore_eos", "min_tokens", "allowed_token_ids", "bad_words"):
                if getattr(self, name):
                    contradiction = InvalidValueError(
                        f"{name}: {field} decides which tokens may come and where the answer ends; omit one of them"
                    )
                    raise ApiError(contradiction, param=name)
        return form

    @property
    def tool_use(self) -> ToolUse | None:
        """The tools that the answer may call; None if there are none.

        Raises:
            ApiError: fields contradict each other.
        """
        return None

    @property
    def calls_field(self) -> str | None:
        """The field that makes tool calls match a grammar; None if they need not match any."""
        return None if (use := self.tool_use) is None else use.field

    @property
    def num_logprobs(self) -> int | None:
        """Number of likeliest tokens to report beside each token of the answer; None: no log probabilities at all."""
        return None

    @property
    def continues_prompt(self) -> bool:
        """Whether the answer is the next part of the prompt's text."""
        return False

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Number of likeliest tokens to report beside each token of the prompt; None: no log probabilities at all."""
        return self.prompt_logprobs

    @property
    def num_computed_logprobs(self) -> int | None:
        """Number of likeliest tokens that workers report beside each token, those of the prompt included."""
        counts = (self.num_logprobs, self.num_prompt_logprobs)
        return max((count for count in counts if count is not None), default=None)


class TemplateSwitches(Strict):
    """The switches of chat templates for reasoning, as vLLM's server takes them. Both names are for any template."""

    enable_thinking: bool | None = None
    thinking: bool | None = None

    @property
    def reasons(self) -> bool | None:
        """True if the answer begins with reasoning; None: the default of the model's template."""
        return self.thinking if self.enable_thinking is None else self.enable_thinking


class ChatRequest(GenerationRequest):
    """Body of POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    store: Annotated[bool | None, Ignored("no chat is stored")] = None
    safety_identifier: Annotated[str | None, Field(max_length=1024), _NO_EFFECT] = None
    prompt_cache_key: Annotated[str | None, Field(max_length=1024), _NO_EFFECT] = None
    prompt_cache_retention: Annotated[Literal["in_memory", "24h"] | None, _NO_EFFECT] = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: Annotated[bool | None, Explained("`false` only with `continue_final_message`")] = (
        None
    )
    continue_final_message: Annotated[
        bool | None, Explained("`true`: the answer continues the last message, which is the assistant's")
    ] = None
    prediction: Annotated[
        dict[str, Any] | None, DISCARD, Ignored("a hint for speed: the answer is the same without it")
    ] = None
    reasoning_effort: ReasoningEffort | None = None
    include_reasoning: Annotated[Literal[True] | None, Ignored("reasoning is always shown")] = None
    chat_template_kwargs: TemplateSwitches | None = None
    mm_processor_kwargs: ProcessorKwargs | None = None
    verbosity: Annotated[
        Literal["low", "medium", "high"] | None, Ignored("a hint: request the length in the prompt")
    ] = None

    @property
    def continues_prompt(self) -> bool:
        """Whether the answer is the next part of the prompt's text."""
        return bool(self.continue_final_message)

    @property
    def asked_tokens(self) -> int | None:
        """Maximum tokens of an answer; None: as many as fit."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def choice(self) -> SamplingChoice:
        """The sampling of media whose parts choose none."""
        return NO_CHOICE if self.mm_processor_kwargs is None else self.mm_processor_kwargs.choice

    @property
    def reasons(self) -> bool | None:
        """True if the answer begins with reasoning; None: the default of the model's template."""
        if self.reasoning_effort is not None:
            return self.reasoning_effort != "none"
        switches = self.chat_template_kwargs
        return None if switches is None else switches.reasons

    @property
    def tool_use(self) -> ToolUse | None:
        """The tools that the answer may call; None if there are none.

        Raises:
            ApiError: fields contradict each other.
        """
        return tool_use(self.tools, self.tool_choice, self.parallel_tool_calls)

    @property
    def num_logprobs(self) -> int | None:
        """Number of likeliest tokens to report beside each token; None: no log probabilities at all."""
        return (self.top_logprobs or 0) if self.logprobs else None


OTHER_SERVERS: NotServed = {
    "use_beam_search": ((False,), "omit it, or use n and select the best choice in the client"),
    "length_penalty": ((1,), "it is for beam search; omit it"),
    "early_stopping": ((False,), "it is for beam search; omit it"),
    "return_tokens_as_token_ids": ((False,), "use return_token_ids"),
    "logits_processors": (([],), "use logit_bias, bad_words or allowed_token_ids"),
    "priority": ((0,), "the operator sets the priority of a tenant; omit it"),
}
"""Fields of vLLM's API, most of which its clients send with the value that means "off"."""

NOT_SERVED: NotServed = {
    **OTHER_SERVERS,
    "add_special_tokens": ((False,), "the chat template writes them; omit it"),
    "documents": (([],), "put them into messages"),
    "chat_template": ((), "the model's own template is used; omit it"),
    "functions": (([],), "use tools"),
    "function_call": (("none", "auto"), "use tool_choice"),
    "modalities": ((["text"],), "output is text only; use ['text'] or omit it"),
    "audio": ((), "output is text only; omit it"),
    "web_search_options": ((), "omit it"),
    "media_io_kwargs": (({},), "use mm_processor_kwargs"),
    "best_of": ((1,), "use n and select the best choice in the client"),
    "echo": ((False,), "omit it"),
}


TAGS = frozenset({"text", "parts", "one", "list", *CHOICE_TAGS, *ANSWER_PART_TYPES, *ROLES})


def parse_chat_request(value: object) -> ChatRequest:
    """Validate a decoded JSON body.

    Raises:
        InvalidTypeError: the body is not an object.
        ApiError: 400, names the first field at fault and the remedy.
    """
    request = validated(ChatRequest, value, NOT_SERVED, TAGS)
    if request.max_tokens is not None and request.max_completion_tokens is not None:
        both = InvalidValueError("set max_tokens or max_completion_tokens, not both")
        raise ApiError(both, param="max_completion_tokens")
    if request.top_logprobs and not request.logprobs:
        raise ApiError(InvalidValueError("top_logprobs requires logprobs: true"), param="top_logprobs")
    check_together(request)
    check_continued(request.messages, request.add_generation_prompt, request.continue_final_message)
    if request.continue_final_message and request.negative_prompt is not None:
        both = InvalidValueError("set negative_prompt or continue_final_message, not both")
        raise ApiError(both, param="negative_prompt")
    _ = request.tool_use
    return request


def check_together(request: GenerationRequest) -> None:
    """Check fields that depend on one another.

    Raises:
        ApiError: names the field to change.
    """
    most = request.asked_tokens
    if most is not None and (request.min_tokens or 0) > most:
        above = InvalidValueError(f"min_tokens must be at most max_tokens, which is {most}")
        raise ApiError(above, param="min_tokens")
    if request.negative_prompt is not None and request.guidance_scale is None:
        alone = InvalidValueError("negative_prompt requires guidance_scale; set it, or omit negative_prompt")
        raise ApiError(alone, param="negative_prompt")
    if request.prompt_logprobs is not None and request.stream:
        streamed = InvalidValueError(
            "prompt_logprobs are not sent in a stream; omit stream or prompt_logprobs"
        )
        raise ApiError(streamed, param="prompt_logprobs")
    if request.stream_options is not None and not request.stream:
        raise ApiError(InvalidValueError("stream_options requires stream: true"), param="stream_options")
