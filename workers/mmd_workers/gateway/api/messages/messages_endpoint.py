"""POST /v1/messages and /v1/messages/count_tokens, compatible with Anthropic's API and served as chats."""

from __future__ import annotations

from collections.abc import Awaitable

from pydantic_core import to_json

from mmd_workers.gateway.answers.exchange import Exchange
from mmd_workers.gateway.api.endpoint import JsonEndpoint
from mmd_workers.gateway.api.error_shapes import MessagesErrors
from mmd_workers.gateway.api.generation import Translations
from mmd_workers.gateway.api.messages.messages_request import (
    parse_count_tokens_request,
    parse_messages_request,
)
from mmd_workers.gateway.api.messages.messages_shape import MessagesShape
from mmd_workers.gateway.basics.media_hold import RequestReservation
from mmd_workers.gateway.content.translation import TranslatedRequest
from mmd_workers.gateway.intake.prepared import Prepared

ID_HEADER = "request-id"


class AnthropicMessages(Translations):
    """POST /v1/messages."""

    prefix = "msg_"
    errors = MessagesErrors()
    id_headers = (ID_HEADER,)

    def _parse(self, body: object) -> TranslatedRequest:
        return parse_messages_request(body)

    def _shape(self, _exchange: Exchange, request: TranslatedRequest, prepared: Prepared) -> MessagesShape:
        return MessagesShape(fills_context=prepared.sampling.max_tokens < (request.max_tokens or 0))


class CountTokens(JsonEndpoint[TranslatedRequest]):
    """POST /v1/messages/count_tokens."""

    prefix = "count_"
    counts = False
    errors = MessagesErrors()
    id_headers = (ID_HEADER,)

    def _parse(self, body: object) -> TranslatedRequest:
        return parse_count_tokens_request(body)

    async def _answer(
        self, exchange: Exchange, request: TranslatedRequest, reservation: RequestReservation
    ) -> None:
        gateway = self._gateway
        with request.names.in_faults():
            gateway.check_model(request.model, exchange.tenant)
            work: Awaitable[list[int]] = gateway.intake.token_ids(
                request.messages,
                reservation,
                exchange.timeline,
                gateway.model_len(),
                request.tool_use,
                request.reasons,
                continues=bool(request.continue_final_message),
            )
            token_ids = await self._in_time(exchange, work)
        await exchange.reply(200, to_json({"input_tokens": len(token_ids)}))
