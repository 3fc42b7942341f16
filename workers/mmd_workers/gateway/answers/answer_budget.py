"""The memory of answers until they are sent: the size of a request's answers and their share of the common budget. Independent of HTTP.

An answer is reserved at its full length before it is placed, so an answer that has begun always has room to finish.
"""

from __future__ import annotations

from dataclasses import dataclass

from mmd_api.contract.errors import CapacityError, OverloadedError
from mmd_workers.gateway.basics.api_errors import ApiError
from mmd_workers.gateway.basics.media_hold import (
    RETRY_AFTER_SECONDS,
    Budget,
    NoRoomError,
    Share,
    TooLargeError,
)

ALLOWANCE_BYTES = 2 << 20
"""Each answer's allowance: text of 40,000 tokens, or 600 tokens with 20 log probabilities each."""
BUDGET_DIVISOR = 4  # the budget is the gateway's memory divided by this
SHARE_DIVISOR = 4  # one request may hold the budget divided by this, so that it cannot starve the others
STREAMED_TOKEN_BYTES = 16  # an id, in an array that copies itself to grow; the text is sent as it comes
TOKEN_BYTES = 48  # an id, its text, and the copies made of both at the end
RETURNED_ID_BYTES = 48
TOKEN_LOGPROBS_BYTES = 640  # as the log probability arrives, or as its JSON
ECHO_CHARACTER_BYTES = 16  # up to four for the character, and the copies made of it
ALTERNATIVE_BYTES = 160  # added for each of the likeliest tokens


@dataclass(frozen=True, slots=True)
class AnswerSize:
    """Determines how much memory the answers to a request take.

    `prompts`: number of prompts of a text completion, whose answers `n` counts together; 0 for a chat. `echo_characters`: characters of the
    request that its answers repeat. `echo_tokens`: tokens of these, if their log probabilities are requested.
    """

    n: int
    max_tokens: int
    logprobs: bool
    top_logprobs: int
    token_ids: bool
    stream: bool = False
    prompts: int = 0
    echo_characters: int = 0
    echo_tokens: int = 0

    @property
    def num_bytes(self) -> int:
        """The most bytes that all answers take."""
        echo = ECHO_CHARACTER_BYTES * self.echo_characters
        if self.stream and not self.logprobs:
            return self.n * self.max_tokens * STREAMED_TOKEN_BYTES + echo
        token = TOKEN_BYTES + RETURNED_ID_BYTES * self.token_ids
        if self.logprobs:
            token += TOKEN_LOGPROBS_BYTES + ALTERNATIVE_BYTES * self.top_logprobs
        return (self.n * self.max_tokens + self.echo_tokens) * token + echo

    @property
    def fields(self) -> list[str]:
        """Fields of the request that reduce this size, the most effective first."""
        logprobs_field = "top_logprobs" if self.top_logprobs and not self.prompts else "logprobs"
        count_field = "prompt" if self.prompts > 1 else "n"
        return [
            *([logprobs_field] if self.logprobs else []),
            *([count_field] if self.n > 1 else []),
            *(["echo"] if self.echo_characters and self.prompts else []),
            "max_tokens",
        ]


class AnswerShare(Share):
    """One request's share of the answer budget."""

    async def reserve(self, size: AnswerSize) -> None:
        """Reserve room for answers of this size.

        Raises:
            ApiError: 503 if there was no room in time; 400 if there can never be.
        """
        fields, budget, share = size.fields, self._budget.budget_bytes, self._budget.share_bytes
        lower = " or ".join([", ".join(fields[:-1]), fields[-1]] if len(fields) > 1 else fields)
        need = (
            f"{size.n} answers of up to {size.max_tokens} tokens"
            if size.n > 1
            else f"an answer of up to {size.max_tokens} tokens"
        )
        if size.logprobs:
            need += f" with {size.top_logprobs} top_logprobs"
        need += f" may need {size.num_bytes} bytes"
        try:
            await self.grow(size.num_bytes)
        except TooLargeError as error:
            too_large = CapacityError(
                f"{need}, but one request may use {share + self._budget.allowance_bytes} bytes; lower {lower}, or raise "
                "spec.gateway.resources.memory"
            )
            raise ApiError(too_large, param=fields[0]) from error
        except NoRoomError as error:
            overloaded = OverloadedError(
                f"{need}, but other requests are using the gateway's {budget} bytes for answers; retry, lower {lower}, "
                "or raise spec.gateway.resources.memory",
                retry_after_seconds=RETRY_AFTER_SECONDS,
            )
            raise ApiError(overloaded, param=fields[0]) from error


def answer_budget(memory_bytes: int) -> Budget:
    """The answer budget of a gateway with this much memory."""
    return Budget(
        memory_bytes // BUDGET_DIVISOR,
        allowance_bytes=ALLOWANCE_BYTES,
        share_divisor=SHARE_DIVISOR,
        may_pass=True,
    )
