"""POST /v1/responses, as OpenAI's API has it, but for what would have to be stored: chats in another shape."""

from __future__ import annotations

from mmd_workers.gateway.answer_shape import AnswerShape
from mmd_workers.gateway.completions import Translations
from mmd_workers.gateway.exchange import Exchange
from mmd_workers.gateway.hold import RequestReservation
from mmd_workers.gateway.intake import Prepared
from mmd_workers.gateway.responses_request import parse_responses_request
from mmd_workers.gateway.responses_shape import ResponseFailure, ResponsesErrors, ResponsesShape
from mmd_workers.gateway.translated import TranslatedRequest


class Responses(Translations):
    """POST /v1/responses."""

    prefix = "resp_"
    errors = ResponsesErrors()

    def _parse(self, body: object) -> TranslatedRequest:
        return parse_responses_request(body)

    def _shape(self, exchange: Exchange, request: TranslatedRequest, _prepared: Prepared) -> ResponsesShape:
        shape = ResponsesShape(exchange.request_id, request.given)
        exchange.errors = ResponseFailure(shape)
        return shape

    async def _prepare(
        self, exchange: Exchange, request: TranslatedRequest, reservation: RequestReservation
    ) -> tuple[list[Prepared], AnswerShape, int]:
        prompts, shape, _ = await super()._prepare(exchange, request, reservation)
        return prompts, shape, request.given.num_characters
