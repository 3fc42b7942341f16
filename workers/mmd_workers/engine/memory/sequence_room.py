"""Whether a sequence has room in the context and the KV pool, and what its client is told where it has not. Pure."""

from __future__ import annotations

from mmd_api.contract.errors import CapacityError, OverloadedError, PreemptedError


def blocks_for(tokens: int, block_tokens: int) -> int:
    """Blocks that hold this many tokens."""
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
    """Check a prompt and up to `max_tokens` more, the end of the context permitting, against a pool of `blocks`. `companion_tokens`: of the
    companion's prompt, after which come as many; 0: there is none.

    Raises:
        CapacityError: it can never fit.
    """
    longest = max(prompt_tokens, companion_tokens)
    if longest >= max_model_len:
        what = "prompt" if longest == prompt_tokens else "negative prompt"
        raise CapacityError(
            f"the {what} has {longest} tokens, but the context length is {max_model_len}; shorten it by "
            f"{longest + 1 - max_model_len} tokens"
        )
    more = min(max_tokens, max_model_len - longest)
    lengths = [prompt_tokens + more, *([companion_tokens + more] if companion_tokens else [])]
    total, needed = sum(lengths), sum(blocks_for(length, block_tokens) for length in lengths)
    if needed > blocks:
        raise CapacityError(
            f"{total} tokens of prompt and output need {needed} KV blocks, but the pool has {blocks}; lower max_tokens, or give the "
            "pool more memory"
        )


def check_spare(needed: int, growing: int, available: int, blocks: int) -> None:
    """Leave a spare block to each sequence that grows, so that an admission does not preempt another one at once.

    Raises:
        OverloadedError: fewer than `needed` and the spare ones are available now.
    """
    if growing and needed + growing > available:
        raise OverloadedError(
            f"{needed} KV blocks and {growing} spare ones are needed, {available} of {blocks} are available; try another decode worker, "
            "or give the pool more memory"
        )


def preempted(blocks: int, num_outputs: int) -> PreemptedError:
    """A sequence that had to yield and cannot be computed again here."""
    return PreemptedError(
        f"the pool of {blocks} KV blocks is full, and this request is the newest; it continues on another pod after its "
        f"{num_outputs} tokens"
    )
