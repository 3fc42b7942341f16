"""Log probabilities of a prompt in the form of vLLM's server. Independent of HTTP and workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pydantic import BaseModel
from pydantic_core import to_json

from mmd_workers.gateway.answers.answer_part import ScoredToken


class PromptToken(BaseModel):
    """A token of a prompt, or one that might have been there. `rank`: from 1; null if it is not among the likeliest."""

    logprob: float
    rank: int | None
    decoded_token: str


LEAST_LOGPROB = -9999.0
"""Stands for the logarithm of 0, which JSON does not have, as on vLLM's server."""
BEGIN, END = b'"prompt_logprobs":[', b"]"
EMPTY = BEGIN + END
"""The list in JSON before its entries are put in. Text in JSON never contains this, because quotes within a string are escaped."""


def entries(prompt: Sequence[ScoredToken], likeliest: int) -> bytes:
    """The JSON of the entries, one for each token: null for the first one, for others objects by token id.

    An object has the prompt's own token and the `likeliest` ones. The rank of a token that is not among these is null.
    """
    return b",".join(to_json(None if one.logprob is None else dict(_entry(one, likeliest))) for one in prompt)


def _entry(scored: ScoredToken, likeliest: int) -> Iterator[tuple[int, PromptToken]]:
    shown = scored.likeliest[:likeliest]
    ranks = {candidate.token_id: rank for rank, candidate in enumerate(shown, 1)}
    assert scored.logprob is not None
    yield scored.token_id, _token(scored.logprob, ranks.get(scored.token_id), scored.token.text)
    for candidate in shown:
        if candidate.token_id != scored.token_id:
            rank = ranks[candidate.token_id]
            yield candidate.token_id, _token(candidate.logprob, rank, candidate.token.text)


def _token(logprob: float, rank: int | None, text: str) -> PromptToken:
    return PromptToken(logprob=max(logprob, LEAST_LOGPROB), rank=rank, decoded_token=text)
