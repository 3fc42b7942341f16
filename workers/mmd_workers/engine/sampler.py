"""From logits to tokens. The draw of output token i of a sequence depends on (seed, i) and its logits alone, wherever it runs."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch

from mmd_workers.engine.interface import SamplingParams


@dataclass(frozen=True, slots=True)
class Draw:
    """One row to sample: its parameters, the index of the output token, and what must never be sampled."""

    sampling: SamplingParams
    index: int
    suppress: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Sampled:
    """A token; `logprob` and `top_logprobs` are of the model's own distribution (suppressed ids excluded), natural log."""

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) from a counter-based generator: blake2b of (seed, index), 53 bits."""
    message = seed.to_bytes(16, "little", signed=True) + index.to_bytes(8, "little")
    return (int.from_bytes(hashlib.blake2b(message, digest_size=8).digest(), "little") >> 11) * 2.0**-53


def sample(logits: torch.Tensor, draws: Items[Draw]) -> list[Sampled | None]:
    """Sample float32 logits [n, vocab], one row for each draw. None for a row whose largest logit is not finite (broken weights).

    Temperature, then top-k, then top-p (nucleus: the smallest set of most likely tokens whose mass reaches p), then the inverse
    of the cumulative distribution at `uniform(seed, index)`, tokens in order of falling probability.
    """
    logits = _suppressed(logits, draws)
    best, tokens = logits.max(dim=-1)
    finite = torch.isfinite(best)
    drawn = [row for row, draw in enumerate(draws) if draw.sampling.temperature > 0]
    if drawn:
        # Broken rows are drawn from as zeros and discarded below: from NaN the draw would compute an index outside the row,
        # which on CUDA is an assertion that takes the device from every request.
        whole = len(drawn) == len(draws)
        rows, broken = (logits, ~finite) if whole else (logits[drawn], ~finite[drawn])
        tokens = tokens.clone()
        tokens[drawn] = choose(rows.masked_fill(broken[:, None], 0.0), [draws[row] for row in drawn])
    token_ids: list[int] = tokens.tolist()
    valid: list[bool] = finite.tolist()
    logprobs = _logprobs(logits, tokens, draws)
    return [
        Sampled(token_ids[row], *logprobs.get(row, (None, ()))) if valid[row] else None
        for row in range(len(draws))
    ]


def _suppressed(logits: torch.Tensor, draws: Items[Draw]) -> torch.Tensor:
    pairs = [
        (row, token)
        for row, draw in enumerate(draws)
        for token in {*draw.suppress, *draw.sampling.suppress_token_ids}
        if token < logits.shape[-1]
    ]
    if not pairs:
        return logits
    index = torch.tensor(pairs, device=logits.device)
    return logits.index_put((index[:, 0], index[:, 1]), logits.new_tensor(-torch.inf))


def choose(logits: torch.Tensor, draws: Items[Draw]) -> torch.Tensor:
    """Draw from finite logits [n, vocab], one row for each draw; token ids [n] on the device of the logits."""
    device = logits.device
    vocab = logits.shape[-1]

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=device)[:, None]

    temperature = column([draw.sampling.temperature for draw in draws])
    top_k = column([draw.sampling.top_k or vocab for draw in draws])
    top_p = column([draw.sampling.top_p for draw in draws])
    points = column([uniform(draw.sampling.seed, draw.index) for draw in draws])
    ordered, order = torch.sort(logits, dim=-1, descending=True, stable=True)
    ordered = (ordered.double() - ordered[:, :1].double()) / temperature
    ordered = ordered.masked_fill(torch.arange(vocab, device=device) >= top_k, -torch.inf)
    probabilities = torch.softmax(ordered, dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    outside = before >= top_p
    outside[:, 0] = False
    probabilities = probabilities.masked_fill(outside, 0.0)
    cumulative = probabilities.cumsum(dim=-1)
    target = points * cumulative[:, -1:]
    rank = torch.searchsorted(cumulative, target, right=True)
    last = (probabilities > 0).sum(dim=-1, keepdim=True) - 1
    return order.gather(-1, torch.minimum(rank, last))[:, 0]


def _logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, draws: Items[Draw]
) -> dict[int, tuple[float, tuple[tuple[int, float], ...]]]:
    wanted = [row for row, draw in enumerate(draws) if draw.sampling.logprobs is not None]
    if not wanted:
        return {}
    table = torch.log_softmax(logits[wanted], dim=-1)
    own: list[float] = table.gather(-1, tokens[wanted][:, None])[:, 0].tolist()
    most = max(draws[row].sampling.logprobs or 0 for row in wanted)
    values, ids = table.topk(min(most, table.shape[-1]), dim=-1)
    value_rows: list[list[float]] = values.tolist()
    id_rows: list[list[int]] = ids.tolist()
    return {
        row: (
            own[i],
            tuple(zip(id_rows[i], value_rows[i], strict=True))[: draws[row].sampling.logprobs],
        )
        for i, row in enumerate(wanted)
    }
