"""Texts and token ids: the prompts of a text completion, and texts to be tokenized. Independent of media and of workers."""

from __future__ import annotations

import time
from functools import partial

from mmd_api.contract.errors import InvalidValueError, UnsupportedInputError
from mmd_workers.gateway.basics.api_errors import ApiError
from mmd_workers.gateway.basics.media_hold import RequestReservation
from mmd_workers.gateway.content.completion_request import CompletionRequest, Prompt
from mmd_workers.gateway.intake.checks import MAX_TEXT_TOKENS, SEND_LESS, SHORTEN, RequestChecks, overflow
from mmd_workers.gateway.intake.prepared import Prepared
from mmd_workers.gateway.intake.sampling import (
    AnswerRules,
    beside_companion,
    guidance_of,
    sampling_of,
    unasked_tokens,
)
from mmd_workers.gateway.intake.text_threads import TextThreads
from mmd_workers.gateway.intake.truncation import kept_tokens, truncated
from mmd_workers.gateway.placement.timeline import Timeline
from mmd_workers.model.interfaces import Frontend
from mmd_workers.model.prompt import PromptLayout
from mmd_workers.wire.messages.message_parts import Phase


class Texts:
    """Prepares requests of one model whose prompts are texts or token ids."""

    def __init__(
        self, frontend: Frontend, checks: RequestChecks, answers: AnswerRules, threads: TextThreads
    ) -> None:
        self._frontend, self._checks = frontend, checks
        self._answers, self._threads = answers, threads

    async def prepare(
        self,
        request: CompletionRequest,
        reservation: RequestReservation,
        timeline: Timeline,
        model_len: int,
    ) -> list[Prepared]:
        """Lay out the prompts of a text completion, and check limits.

        `reservation`: has room for long prompts while they are encoded. `model_len`: see `Intake.prepare`.

        Raises:
            ApiError: names the prompt and the remedy.
        """
        self._answers.use_defaults(request)
        rules, grammar = await self._answers.rules(request), await self._answers.grammar(request)
        limit = self._checks.limit(model_len)
        prompts = request.prompts
        most = max(limit, MAX_TEXT_TOKENS)
        texts = [(param, prompt) for param, prompt in prompts if isinstance(prompt, str)]
        kept = kept_tokens(request, limit)
        for param, text in texts if kept is None else ():
            self._checks.check_characters(len(text), limit - 1, param, SHORTEN)
        self._checks.check_characters(sum(len(text) for _, text in texts), most, "prompt", SEND_LESS)
        started_at = time.time()
        negative = await self._negative_text(request, limit, reservation)
        prepared: list[Prepared] = []
        total = 0
        for param, prompt in prompts:
            special_tokens = request.add_special_tokens is not False
            token_ids = await self.text_ids(param, prompt, special_tokens, reservation)
            layout = truncated(PromptLayout(token_ids, []), kept)
            token_ids = layout.token_ids
            total += len(token_ids)
            room = self._checks.room(layout, [], limit, param)
            guidance = guidance_of(self._frontend, request, layout, limit, negative)
            total += 0 if guidance is None else len(guidance.token_ids)
            if total > most:
                detail = (
                    "these are the tokens of the prompts so far, negative ones included; send fewer prompts"
                )
                raise ApiError(overflow(str(total), most, detail, of_context=False), param=param)
            room = beside_companion(room, guidance, limit)
            self._checks.check_prompt_logprobs(request, param, layout)
            default_tokens = unasked_tokens(room, len(token_ids), guidance, limit)
            sampling = sampling_of(request, rules, grammar, room, default_tokens)
            prepared.append(Prepared(layout, [], sampling, guidance=guidance))
        timeline.add("gateway", [Phase("layout", started_at, time.time())])
        timeline.at_gateway = "placement"
        return prepared

    async def token_ids(
        self, prompt: str, special_tokens: bool, reservation: RequestReservation, model_len: int
    ) -> list[int]:
        """Token ids of a text, which may be longer than the model takes. `reservation`: see `prepare`; `model_len`: see `Intake.prepare`.

        Raises:
            ApiError: the text is too long.
        """
        max_tokens = max(self._checks.limit(model_len), MAX_TEXT_TOKENS)
        self._checks.check_characters(len(prompt), max_tokens, "prompt", SEND_LESS)
        encode = partial(self._frontend.encode, prompt, special_tokens=special_tokens)
        return self._checks.counted(
            await self._threads.encoded(encode, len(prompt), reservation), max_tokens, "prompt"
        )

    async def text_ids(
        self, param: str, prompt: Prompt, special_tokens: bool, reservation: RequestReservation
    ) -> list[int]:
        """Token ids of a text, or of ids as given. `special_tokens`: add those that the tokenizer puts around a text.

        Raises:
            ApiError: there are no tokens, or one does not exist or stands for a medium.
        """
        frontend = self._frontend
        if isinstance(prompt, str):
            encode = partial(frontend.encode, prompt, special_tokens=special_tokens)
            token_ids = await self._threads.encoded(encode, len(prompt), reservation)
        else:
            token_ids = prompt
        if not token_ids:
            raise ApiError(InvalidValueError(f"{param} is empty; send at least one token"), param=param)
        self._checks.check_ids(param, token_ids)
        if not frontend.placeholder_ids.isdisjoint(token_ids):
            (token,) = frontend.token_strings(
                [next(token_id for token_id in token_ids if token_id in frontend.placeholder_ids)]
            )
            medium = UnsupportedInputError(
                f"{param}: the token {token!r} stands for a medium, and this path takes text alone; send media to /v1/chat/completions"
            )
            raise ApiError(medium, param=param)
        return token_ids

    async def _negative_text(
        self, request: CompletionRequest, limit: int, reservation: RequestReservation
    ) -> list[int] | None:
        """Tokens of the negative prompt, encoded like a prompt; None if there is none, or it is not needed."""
        if not request.is_guided or (text := request.negative_prompt) is None:
            return None
        self._checks.check_characters(len(text), limit - 1, "negative_prompt", SHORTEN)
        special_tokens = request.add_special_tokens is not False
        encode = partial(self._frontend.encode, text, special_tokens=special_tokens)
        return await self._threads.encoded(encode, len(text), reservation)
