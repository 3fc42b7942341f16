"""Checks whether a sequence fits into the context and the KV pool, and makes the errors for its client. Pure."""

from __future__ import annotations

from mmd_api.contract.errors import CapacityError, OverloadedError, PreemptedError


def blocks_for(tokens: int, block_tokens: int) -> int:
    """Return the number of blocks that hold this many tokens."""
    return -(-tokens // block_tokens)


def check_fits(
    prompt_tokens: int,
    max_tokens: int,
    *,
    max_model_len: int,
    blocks: int,
    block_tokens: int,
    companion_tokens: int = 0,
) -> None:
    """Check a prompt and up to `max_tokens` more, the end of the context permitting, against a pool of `blocks`.

    `companion_tokens`: length of the companion's prompt, which is followed by as many output tokens; 0: no companion.

    Raises:
        CapacityError: the sequence can never fit.
    """
    longest = max(prompt_tokens, companion_tokens)
    if longest >= max_model_len:
        what = "prompt" if longest == prompt_tokens else "negative prompt"
        raise CapacityError(
            f"the {what} has {longest} tokens, but the context length is {max_model_len}; shorten it by "
            f"{longest + 1 - max_model_len} tokens"
        )
    output_tokens = min(max_tokens, max_model_len - longest)
    lengths = [
        prompt_tokens + output_tokens,
        *([companion_tokens + output_tokens] if companion_tokens else []),
    ]
    total, needed = sum(lengths), sum(blocks_for(length, block_tokens) for length in lengths)
    if needed > blocks:
        raise CapacityError(
            f"{total} tokens of prompt and output need {needed} KV blocks, but the pool has {blocks}; lower max_tokens, or give the "
            "pool more memory"
        )


def check_spare(needed: int, growing: int, available: int, blocks: int) -> None:
    """Check that each growing sequence keeps a spare block, so that an admission does not preempt another one at once.

    Raises:
        OverloadedError: fewer than `needed` blocks and the spare ones are available now.
    """
    if growing and needed + growing > available:
        raise OverloadedError(
            f"{needed} KV blocks and {growing} spare ones are needed, {available} of {blocks} are available; try another decode worker, "
            "or give the pool more memory"
        )


def preempted(blocks: int, num_outputs: int) -> PreemptedError:
    """Return the error for a preempted sequence that cannot be computed again here."""
    return PreemptedError(
        f"the pool of {blocks} KV blocks is full, and this request is the newest; it continues on another pod after its "
        f"{num_outputs} tokens"
    )
