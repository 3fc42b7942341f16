"""Memory that answers take until they are sent: how much one may need, its share of the common budget. Independent of HTTP.

An answer is reserved at its full length before it is placed, so that one that has begun always has room to end.
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
"""Of each answer: text of 40,000 tokens, or of 600 tokens with 20 log probabilities each."""
BUDGET_DIVISOR = 4  # of the gateway's memory
SHARE_DIVISOR = 4  # of the budget: what one request may hold, so that no request takes what all need
STREAMED_TOKEN_BYTES = (
    16  # an id, in an array that copies itself to grow; the text of a stream is sent as it comes
)
TOKEN_BYTES = 48  # an id, its text, and the copies that are made of it at the end
RETURNED_ID_BYTES = 48
LOGPROBS_BYTES = 640  # of a token as it arrives, or as the JSON that it becomes
ECHO_BYTES = 16  # of a character, which takes up to four, and the copies that are made of it
ALTERNATIVE_BYTES = 160  # more for each of the likeliest tokens


@dataclass(frozen=True, slots=True)
class AnswerSize:
    """What decides how much memory a request's answers take."""

    n: int
    max_tokens: int
    logprobs: bool
    top_logprobs: int
    token_ids: bool
    stream: bool = False
    prompts: int = 0  # of text completions, which `n` counts the answers of; 0: a chat
    echo_characters: int = 0  # of the request, that the answers repeat
    echo_tokens: int = 0  # that those are, where log probabilities of them are wanted

    @property
    def num_bytes(self) -> int:
        """What all its answers take at most."""
        echo = ECHO_BYTES * self.echo_characters
        if self.stream and not self.logprobs:
            return self.n * self.max_tokens * STREAMED_TOKEN_BYTES + echo
        token = TOKEN_BYTES + RETURNED_ID_BYTES * self.token_ids
        if self.logprobs:
            token += LOGPROBS_BYTES + ALTERNATIVE_BYTES * self.top_logprobs
        return (self.n * self.max_tokens + self.echo_tokens) * token + echo

    @property
    def fields(self) -> list[str]:
        """Fields of the request that make it smaller, the most effective one first."""
        likeliest = "top_logprobs" if self.top_logprobs and not self.prompts else "logprobs"
        several = "prompt" if self.prompts > 1 else "n"
        return [
            *([likeliest] if self.logprobs else []),
            *([several] if self.n > 1 else []),
            *(["echo"] if self.echo_characters and self.prompts else []),
            "max_tokens",
        ]


class AnswerShare(Share):
    """The share of one request's answers."""

    async def reserve(self, size: AnswerSize) -> None:
        """Take room for answers of this size.

        Raises:
            ApiError: 503, there was none in time; 400, there can never be.
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
    """The budget for answers of a gateway with so much memory."""
    return Budget(
        memory_bytes // BUDGET_DIVISOR,
        allowance_bytes=ALLOWANCE_BYTES,
        share_divisor=SHARE_DIVISOR,
        may_pass=True,
    )
