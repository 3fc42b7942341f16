"""POST /tokenize and /detokenize, compatible with vLLM's server: a prompt as token ids, and token ids as text."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated

from pydantic import BaseModel, Field
from pydantic_core import to_json

from mmd_api.contract.errors import InvalidValueError, MissingParameterError
from mmd_workers.gateway.answers.exchange import Exchange
from mmd_workers.gateway.api.endpoint import JsonEndpoint
from mmd_workers.gateway.basics.api_errors import ApiError
from mmd_workers.gateway.basics.media_hold import RequestReservation
from mmd_workers.gateway.basics.strict import Explained, NotServed, Strict, validated
from mmd_workers.gateway.content.chat_request import TAGS
from mmd_workers.gateway.content.completion_request import TokenIds
from mmd_workers.gateway.content.conversation import Messages, check_continued
from mmd_workers.gateway.content.parts import ProcessorKwargs
from mmd_workers.gateway.content.tools import Tools, tool_use
from mmd_workers.media.choice import NO_CHOICE

IN_THREAD_TOKENS = 4096  # from this number on, a thread converts tokens to text and JSON
BYTES_PER_TOKEN = 64  # an id, its text, and the JSON of both


class TokenizeRequest(Strict):
    """Body of POST /tokenize: a prompt as text, or messages."""

    model: Annotated[str, Field(max_length=512)] | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: Annotated[bool | None, Explained("`false` only with `continue_final_message`")] = (
        None
    )
    continue_final_message: Annotated[
        bool | None, Explained("`true`: the prompt ends with the last message, which is the assistant's")
    ] = None
    mm_processor_kwargs: ProcessorKwargs | None = None


class DetokenizeRequest(Strict):
    """Body of POST /detokenize."""

    model: Annotated[str, Field(max_length=512)] | None = None
    tokens: Annotated[TokenIds, Field(fail_fast=True)]


class Tokens(BaseModel):
    """Response of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class TokenText(BaseModel):
    """Response of /detokenize."""

    prompt: str


TOKENIZE_NOT_SERVED: NotServed = {
    "chat_template": ((), "the model's own template is used; omit it"),
    "chat_template_kwargs": (({},), "omit it"),
}
DETOKENIZE_NOT_SERVED: NotServed = {}


def parse_tokenize_request(value: object) -> TokenizeRequest:
    """Validate a decoded JSON body.

    Raises:
        InvalidTypeError: the body is not an object.
        ApiError: 400, naming the first invalid field and the remedy.
    """
    request = validated(TokenizeRequest, value, TOKENIZE_NOT_SERVED, TAGS)
    if request.prompt is None and request.messages is None:
        raise ApiError(MissingParameterError("prompt is missing; send prompt or messages"), param="prompt")
    if request.prompt is not None and request.messages is not None:
        raise ApiError(InvalidValueError("set prompt or messages, not both"), param="messages")
    if request.tools and request.messages is None:
        raise ApiError(InvalidValueError("tools: a text has no place for them; send messages"), param="tools")
    if request.messages is not None and request.add_special_tokens:
        fault = InvalidValueError(
            "add_special_tokens: the chat template decides which special tokens messages get; omit it"
        )
        raise ApiError(fault, param="add_special_tokens")
    if request.prompt is not None and request.continue_final_message:
        fault = InvalidValueError("continue_final_message: a text has no last message; send messages")
        raise ApiError(fault, param="continue_final_message")
    if request.messages is not None:
        check_continued(request.messages, request.add_generation_prompt, request.continue_final_message)
    return request


def parse_detokenize_request(value: object) -> DetokenizeRequest:
    """Validate a decoded JSON body; raises as `parse_tokenize_request` does."""
    return validated(DetokenizeRequest, value, DETOKENIZE_NOT_SERVED, TAGS)


async def _reply(exchange: Exchange, response: Callable[[], bytes], num_tokens: int) -> None:
    """Send the body that `response` returns, computed in a thread if there are many tokens."""
    is_long = num_tokens >= IN_THREAD_TOKENS
    await exchange.reply_in_pieces([await asyncio.to_thread(response) if is_long else response()])


class Tokenize(JsonEndpoint[TokenizeRequest]):
    """POST /tokenize."""

    prefix = "tok-"
    counts = False

    def _parse(self, body: object) -> TokenizeRequest:
        return parse_tokenize_request(body)

    async def _answer(
        self, exchange: Exchange, request: TokenizeRequest, reservation: RequestReservation
    ) -> None:
        gateway = self._gateway
        if request.model is not None:
            gateway.check_model(request.model, exchange.tenant)
        model_len, intake = gateway.model_len(), gateway.intake
        if request.messages is not None:
            tools = tool_use(request.tools, None, None)
            kwargs = request.mm_processor_kwargs
            choice = NO_CHOICE if kwargs is None else kwargs.choice
            work = intake.token_ids(
                request.messages,
                reservation,
                exchange.timeline,
                model_len,
                tools,
                choice=choice,
                continues=bool(request.continue_final_message),
            )
        else:
            work = intake.token_ids_of_text(
                request.prompt or "", request.add_special_tokens is not False, reservation, model_len
            )
        token_ids = await self._in_time(exchange, work)
        await reservation.grow(BYTES_PER_TOKEN * len(token_ids))

        def response() -> bytes:
            strings = gateway.frontend.token_strings(token_ids) if request.return_token_strs else None
            limit = intake.limit(model_len)
            return to_json(
                Tokens(count=len(token_ids), max_model_len=limit, tokens=token_ids, token_strs=strings)
            )

        await _reply(exchange, response, len(token_ids))


class Detokenize(JsonEndpoint[DetokenizeRequest]):
    """POST /detokenize."""

    prefix = "detok-"
    counts = False

    def _parse(self, body: object) -> DetokenizeRequest:
        return parse_detokenize_request(body)

    async def _answer(
        self, exchange: Exchange, request: DetokenizeRequest, reservation: RequestReservation
    ) -> None:
        gateway, token_ids = self._gateway, request.tokens
        if request.model is not None:
            gateway.check_model(request.model, exchange.tenant)
        gateway.intake.check_ids("tokens", token_ids)
        await reservation.grow(BYTES_PER_TOKEN * len(token_ids))

        def response() -> bytes:
            return to_json(TokenText(prompt=gateway.frontend.decode(token_ids, special_tokens=True)))

        await _reply(exchange, response, len(token_ids))
