"""POST /v1/responses, compatible with OpenAI's API except for stored state, and served as chats."""

from __future__ import annotations

from dataclasses import replace

from mmd_workers.gateway.answers.answer_shape import AnswerShape
from mmd_workers.gateway.answers.exchange import Exchange
from mmd_workers.gateway.api.generation import Translations
from mmd_workers.gateway.api.responses.responses_request import parse_responses_request
from mmd_workers.gateway.api.responses.responses_shape import ResponseFailure, ResponsesErrors, ResponsesShape
from mmd_workers.gateway.basics.media_hold import RequestReservation
from mmd_workers.gateway.content.translation import TranslatedRequest
from mmd_workers.gateway.intake.prepared import Prepared


class Responses(Translations):
    """POST /v1/responses."""

    prefix = "resp_"
    errors = ResponsesErrors()

    def _parse(self, body: object) -> TranslatedRequest:
        return parse_responses_request(body)

    def _shape(self, exchange: Exchange, request: TranslatedRequest, prepared: Prepared) -> ResponsesShape:
        sampling = prepared.sampling
        given = replace(request.given, temperature=sampling.temperature, top_p=sampling.top_p)
        shape = ResponsesShape(exchange.request_id, given)
        exchange.errors = ResponseFailure(shape)
        return shape

    async def _prepare(
        self, exchange: Exchange, request: TranslatedRequest, reservation: RequestReservation
    ) -> tuple[list[Prepared], AnswerShape, int]:
        prompts, shape, _ = await super()._prepare(exchange, request, reservation)
        return prompts, shape, request.given.num_characters
