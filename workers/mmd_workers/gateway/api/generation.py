"""The life of a request that the model answers, in any API: prepared, given room for its answers, admitted, placed, answered."""

from __future__ import annotations

import asyncio
import hashlib
import time
from abc import abstractmethod
from typing import TypeVar

from mmd_api.contract.errors import DeadlineError
from mmd_workers.gateway.answers.answer_budget import AnswerShare, AnswerSize
from mmd_workers.gateway.answers.answer_shape import AnswerShape
from mmd_workers.gateway.answers.exchange import Exchange
from mmd_workers.gateway.api.choices import Choices
from mmd_workers.gateway.api.endpoint import JsonEndpoint, failures_answered
from mmd_workers.gateway.basics.media_hold import RequestReservation
from mmd_workers.gateway.content.chat_request import ChatRequest, GenerationRequest
from mmd_workers.gateway.content.completion_request import CompletionRequest
from mmd_workers.gateway.content.translation import TranslatedRequest
from mmd_workers.gateway.idempotency.repeats import keyed_request
from mmd_workers.gateway.intake.omissions import headers_of
from mmd_workers.gateway.intake.prepared import Prepared

_Request = TypeVar("_Request", bound=GenerationRequest)
_Chat = TypeVar("_Chat", bound=ChatRequest)


class Generation(JsonEndpoint[_Request]):
    """Serves a path whose requests the model answers. A request with an idempotency key may repeat another."""

    async def _respond(self, exchange: Exchange, reservation: RequestReservation) -> None:
        tenant = exchange.tenant.name if exchange.tenant else ""
        keyed = keyed_request(exchange.headers, tenant, self.prefix)
        if keyed is None:
            await super()._respond(exchange, reservation)
            return
        self._set_deadline(exchange)
        digest = hashlib.sha256()
        request = await self._read(exchange, reservation, digest.update)

        repeats, deadline = self._gateway.repeats, self._deadline(exchange)
        answer = repeats.find(keyed, digest.digest())
        if answer is not None:
            del request
            reservation.release()
            await repeats.repeat(exchange, keyed, answer, deadline)
            return

        if not keyed.resumes:
            self._check_model(exchange, request)  # before other gateways learn of its key

        unanswered = [request]
        del request

        async def make(maker: Exchange) -> bool:
            async with failures_answered(maker):
                await self._answer(maker, unanswered.pop(), reservation)
                return True
            return False

        def not_needed() -> None:
            unanswered.clear()
            reservation.release()

        await repeats.first(exchange, keyed, digest.digest(), deadline, make, not_needed)

    def _check_model(self, exchange: Exchange, request: _Request) -> None:
        exchange.timeline.model = request.model
        self._gateway.check_model(request.model, exchange.tenant)

    @abstractmethod
    async def _prepare(
        self, exchange: Exchange, request: _Request, reservation: RequestReservation
    ) -> tuple[list[Prepared], AnswerShape, int]:
        """Prepare the prompts, the shape of the answers, and the number of prompt characters they repeat; free what the request no longer needs."""

    async def _answer(self, exchange: Exchange, request: _Request, reservation: RequestReservation) -> None:
        gateway = self._gateway
        self._check_model(exchange, request)
        prompts, shape, echo = await self._in_time(exchange, self._prepare(exchange, request, reservation))
        exchange.notes |= headers_of([prepared.layout for prepared in prompts])
        share = AnswerShare(gateway.answers)
        size = AnswerSize(
            n=len(prompts) * (request.n or 1),
            max_tokens=max(prepared.sampling.max_tokens for prepared in prompts),
            logprobs=request.num_computed_logprobs is not None,
            top_logprobs=request.num_computed_logprobs or 0,
            token_ids=bool(request.return_token_ids),
            stream=bool(request.stream) and not shape.keeps_text,
            prompts=len(prompts) if isinstance(request, CompletionRequest) else 0,
            echo_characters=echo,
            echo_tokens=(request.n or 1)
            * sum(len(prepared.layout.token_ids) for prepared in prompts)
            * (request.num_prompt_logprobs is not None),
        )
        deadline = self._deadline(exchange)
        try:
            # Before admission: otherwise its room in the pools would stay empty while the request waits for memory.
            await _reserve(share, size, deadline)
            admission = gateway.ask_for_admission(
                exchange.tenant, prompts, request.n or 1, reservation.num_bytes, deadline, exchange.timeline
            )
            choices = Choices(gateway, exchange, request, prompts, shape, admission)
            try:
                for index in range(size.n):
                    await choices.open(index)
                    await asyncio.sleep(0)
                if request.stream:
                    await choices.stream()
                else:
                    await choices.whole()
            finally:
                if admission is not None:
                    admission.release(choices.answers())
                await choices.release()
        finally:
            share.release()


class Conversations(Generation[_Chat]):
    """Serves a path whose requests are conversations, in any API."""

    @abstractmethod
    def _shape(self, exchange: Exchange, request: _Chat, prepared: Prepared) -> AnswerShape:
        """The shape of the answers."""

    async def _prepare(
        self, exchange: Exchange, request: _Chat, reservation: RequestReservation
    ) -> tuple[list[Prepared], AnswerShape, int]:
        gateway = self._gateway
        prepared = await gateway.intake.prepare(request, reservation, exchange.timeline, gateway.model_len())
        request.messages.clear()  # their data URLs are no longer needed, nor counted in the reservation
        request.tools = request.tool_choice = None
        return [prepared], self._shape(exchange, request, prepared), 0


class Translations(Conversations[TranslatedRequest]):
    """Serves a path whose requests are translated into chats; errors name the original fields."""

    async def _answer(
        self, exchange: Exchange, request: TranslatedRequest, reservation: RequestReservation
    ) -> None:
        with request.names.in_faults():
            await super()._answer(exchange, request, reservation)


async def _reserve(share: AnswerShare, size: AnswerSize, deadline: float) -> None:
    """Reserve room for all answers at full length, before any pod begins to generate them.

    Raises:
        DeadlineError: there was no room before the deadline.
    """
    try:
        async with asyncio.timeout(max(0.0, deadline - time.time())):
            await share.reserve(size)
    except TimeoutError as error:
        raise DeadlineError(
            "the gateway had no memory for the answer before the request deadline; retry, request fewer tokens or log "
            "probabilities, or raise x-request-timeout or spec.gateway.resources.memory"
        ) from error
