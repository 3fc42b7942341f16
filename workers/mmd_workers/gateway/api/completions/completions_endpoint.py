"""POST /v1/completions, as OpenAI's API has it."""

from __future__ import annotations

import asyncio

from mmd_workers.gateway.answers.answer_shape import AnswerShape
from mmd_workers.gateway.answers.exchange import Exchange
from mmd_workers.gateway.api.completions.text_shape import TextShape
from mmd_workers.gateway.api.generation import Generation
from mmd_workers.gateway.basics.media_hold import RequestReservation
from mmd_workers.gateway.content.completion_request import CompletionRequest, parse_completion_request
from mmd_workers.gateway.intake.prepared import Prepared


class TextCompletions(Generation[CompletionRequest]):
    """POST /v1/completions."""

    prefix = "cmpl-"

    def _parse(self, body: object) -> CompletionRequest:
        return parse_completion_request(body)

    async def _prepare(
        self, exchange: Exchange, request: CompletionRequest, reservation: RequestReservation
    ) -> tuple[list[Prepared], AnswerShape, int]:
        gateway = self._gateway
        prompts = await gateway.intake.prepare_texts(
            request, reservation, exchange.timeline, gateway.model_len()
        )
        echo: list[str] = []
        if request.echo:
            for (_, prompt), prepared in zip(request.prompts, prompts, strict=True):
                if isinstance(prompt, str) and request.truncate_prompt_tokens is None:
                    text = prompt
                else:
                    text = await self._text(prepared)
                echo += [text] * (request.n or 1)
        request.prompt = ""  # a list of tokens now
        reservation.release()
        shape = TextShape(
            logprobs=request.num_logprobs,
            token_ids=bool(request.return_token_ids),
            usage=request.wants_usage,
            continuous=request.wants_continuous_usage,
            echo=echo,
            prompt_logprobs=request.prompt_logprobs,
        )
        return prompts, shape, sum(map(len, echo))

    async def _text(self, prepared: Prepared) -> str:
        return await asyncio.to_thread(
            self._gateway.frontend.decode, prepared.layout.token_ids, special_tokens=True
        )
