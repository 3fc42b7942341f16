"""Keeps the end of a prompt that is longer than its request allows. Independent of workers."""

from __future__ import annotations

from dataclasses import replace

from mmd_api.contract.errors import InvalidValueError
from mmd_workers.gateway.basics.api_errors import ApiError
from mmd_workers.gateway.content.chat_request import GenerationRequest
from mmd_workers.model.prompt import PromptLayout

ANSWER_TOKENS = 512
"""Room made for the answer if the request sets no limit."""


def prompt_tokens(request: GenerationRequest, limit: int) -> int:
    """Number of tokens of a prompt beside which there is room for the answer. `limit`: the length of the longest sequence."""
    return limit - min(request.asked_tokens or ANSWER_TOKENS, limit // 2)


def kept_tokens(request: GenerationRequest, limit: int) -> int | None:
    """Number of tokens of a prompt that are kept, from its end; None: all. `limit`: see `prompt_tokens`."""
    asked = request.truncate_prompt_tokens
    return prompt_tokens(request, limit) if asked == -1 else asked


def truncated(layout: PromptLayout, most: int | None) -> PromptLayout:
    """The last `most` tokens of a prompt; None: all.

    Raises:
        ApiError: a medium, or the marker before it, would be cut.
    """
    cut = 0 if most is None else len(layout.token_ids) - most
    if cut <= 0:
        return layout
    first = min((start for medium in layout.media for start, _ in medium.ranges), default=None)
    if first is not None and first <= cut:
        least = len(layout.token_ids) - first + 1
        fault = InvalidValueError(
            f"truncate_prompt_tokens: the last {most} tokens of the prompt would cut its media, and media are not divided; keep at least "
            f"{least} tokens, or send less text and fewer media"
        )
        raise ApiError(fault, param="truncate_prompt_tokens")
    media = [
        replace(medium, ranges=[(start - cut, length) for start, length in medium.ranges])
        for medium in layout.media
    ]
    return replace(layout, token_ids=layout.token_ids[cut:], media=media)
