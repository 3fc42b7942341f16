"""OpenAI's text completions as a pydantic model: the body of /v1/completions. Independent of the network and the model."""

from __future__ import annotations

from typing import Annotated, cast

from pydantic import Discriminator, Field, Tag

from mmd_api.contract.errors import InvalidValueError
from mmd_workers.gateway.basics.api_errors import ApiError
from mmd_workers.gateway.basics.strict import NotServed, validated
from mmd_workers.gateway.content.chat_request import (
    MAX_LOGPROBS,
    OTHER_SERVERS,
    GenerationRequest,
    check_together,
)

MAX_PROMPTS = 64
MAX_ANSWERS = 64  # answers to all prompts
DEFAULT_MAX_TOKENS = 16  # the default of OpenAI and vLLM

TokenIds = list[Annotated[int, Field(ge=0, le=2**31 - 1)]]
Prompt = str | list[int]


def _prompt_kind(value: object) -> str | None:
    if isinstance(value, str):
        return "string"
    if not isinstance(value, list):
        return None
    first = value[0] if value else ""
    return "tokens" if isinstance(first, int) else "token lists" if isinstance(first, list) else "strings"


_SEVERAL = Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)
_IDS = Field(min_length=1, fail_fast=True)


class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions."""

    prompt: Annotated[
        Annotated[str, Tag("string")]
        | Annotated[list[str], _SEVERAL, Tag("strings")]
        | Annotated[TokenIds, _IDS, Tag("tokens")]
        | Annotated[list[Annotated[TokenIds, _IDS]], _SEVERAL, Tag("token lists")],
        Discriminator(
            _prompt_kind,
            custom_error_type="prompt_type",
            custom_error_message="prompt must be a string, a list of strings, a list of token ids or a list of such lists",
        ),
    ]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_special_tokens: bool | None = None

    @property
    def prompts(self) -> list[tuple[str, Prompt]]:
        """Each prompt, with its field."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [("prompt", prompt)]
        if isinstance(prompt[0], int):
            return [("prompt", prompt)]
        return [(f"prompt[{number}]", entry) for number, entry in enumerate(cast("list[Prompt]", prompt))]

    @property
    def asked_tokens(self) -> int:
        """Maximum tokens of an answer."""
        return self.max_tokens or DEFAULT_MAX_TOKENS

    @property
    def continues_prompt(self) -> bool:
        """Whether the answer is the next part of the prompt's text."""
        return True

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Number of likeliest tokens to report beside each token of the prompt; None: no log probabilities at all."""
        counts = (self.prompt_logprobs, self.logprobs if self.echo else None)
        return max((count for count in counts if count is not None), default=None)

    @property
    def num_logprobs(self) -> int | None:
        """Number of likeliest tokens to report beside each token; None: no log probabilities at all."""
        return self.logprobs


NOT_SERVED: NotServed = {
    **OTHER_SERVERS,
    "suffix": (("",), "the model continues a text and does not fill gaps; omit it"),
    "best_of": ((1,), "use n and select the best choice in the client"),
}

TAGS = frozenset({"string", "strings", "tokens", "token lists", "one", "list"})


def parse_completion_request(value: object) -> CompletionRequest:
    """Validate a decoded JSON body.

    Raises:
        InvalidTypeError: the body is not an object.
        ApiError: 400, names the first field at fault and the remedy.
    """
    request = validated(CompletionRequest, value, NOT_SERVED, TAGS)
    check_together(request)
    prompts, n = len(request.prompts), request.n or 1
    if prompts * n > MAX_ANSWERS:
        many = InvalidValueError(
            f"prompt: {prompts} prompts with n {n} are {prompts * n} answers, more than the limit of {MAX_ANSWERS}; send fewer prompts or lower n"
        )
        raise ApiError(many, param="prompt")
    return request
