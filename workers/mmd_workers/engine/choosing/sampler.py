"""From logits to tokens. The draw of output token i of a sequence depends on (seed, i) and its logits alone, wherever it runs."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch

from mmd_workers.engine.choosing.logit_rules import RuleState, apply_rules
from mmd_workers.engine.choosing.masks import Masks
from mmd_workers.engine.interface import Logprob, SamplingParams


@dataclass(frozen=True, slots=True)
class Draw:
    """One row to sample: its parameters, the index of the output token, what must never be sampled, and the rules as of this token."""

    sampling: SamplingParams
    index: int
    suppress: tuple[int, ...] = ()
    rules: RuleState | None = None


@dataclass(frozen=True, slots=True)
class Sampled:
    """A token; `logprob` and `top_logprobs` are of the model's own distribution (suppressed ids excluded), natural log: before grammars, rules
    and temperature, as vLLM has them, and after guidance."""

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) from a counter-based generator: blake2b of (seed, index), 53 bits."""
    message = seed.to_bytes(16, "little", signed=True) + index.to_bytes(8, "little")
    return (int.from_bytes(hashlib.blake2b(message, digest_size=8).digest(), "little") >> 11) * 2.0**-53


def sample(logits: torch.Tensor, draws: Items[Draw], masks: Masks | None = None) -> list[Sampled | None]:
    """Sample float32 logits [n, vocab], one row for each draw; they are overwritten. None for a row whose largest logit is not finite
    (broken weights), or of which `masks` allow nothing.

    Rules, then temperature, then min-p (tokens at least `min_p` times as likely as the likeliest) and top-k, then top-p (nucleus: the
    smallest set of most likely tokens whose mass reaches p), then the inverse of the cumulative distribution at
    `uniform(seed, index)`: tokens in order of falling probability where one of the three cuts, else in order of their ids, which
    needs no sorting. What is returned comes from the device in one copy.
    """
    tokens, logprobs = compute(logits, draws, masks)
    if logprobs is None:
        token_ids: list[int] = tokens.tolist()
        return [Sampled(token) if token >= 0 else None for token in token_ids]
    return _with_logprobs(tokens, logprobs, draws)


def compute(
    logits: torch.Tensor, draws: Items[Draw], masks: Masks | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What `sample` does on the device: tokens [n], -1 for none; and for each row that wants log probabilities its token, that token's, the
    most likely ones' and their ids (float64 [wanted, 2 + 2 * most]; None: no row does).
    """
    _suppress(logits, draws)
    wanted = [row for row, draw in enumerate(draws) if draw.sampling.logprobs is not None]
    changed = masks is not None or any(draw.rules is not None for draw in draws)
    own = logits[wanted] if wanted and changed else None
    if masks is not None:
        masks.apply(logits)
    tokens = pick(logits, draws)
    if not wanted:
        return tokens, None
    return tokens, _logprobs(logits[wanted] if own is None else own, tokens, draws, wanted)


def pick(logits: torch.Tensor, draws: Items[Draw]) -> torch.Tensor:
    """Token ids [n] on the device of the float32 logits [n, vocab], which the rules change in place; -1 for a row whose largest logit is
    not finite."""
    if ruled := [(row, draw.rules) for row, draw in enumerate(draws) if draw.rules is not None]:
        apply_rules(logits, ruled)
    best, tokens = logits.max(dim=-1)
    finite = torch.isfinite(best)
    drawn = [row for row, draw in enumerate(draws) if draw.sampling.temperature > 0]
    if drawn:
        # Broken rows are drawn from as zeros and discarded below: from NaN the draw would compute an index outside the row,
        # which on CUDA is an assertion that takes the device from every request.
        every = len(drawn) == len(draws)
        rows = (
            logits.masked_fill(~finite[:, None], 0.0)
            if every
            else logits[drawn].masked_fill_(~finite[drawn][:, None], 0.0)
        )
        tokens[drawn] = choose(rows, [draws[row] for row in drawn])
        del rows
    return torch.where(finite, tokens, -1)


def _suppress(logits: torch.Tensor, draws: Items[Draw]) -> None:
    rows_of: dict[tuple[int, ...], list[int]] = {}
    for row, draw in enumerate(draws):
        rows_of.setdefault(draw.suppress + draw.sampling.suppress_token_ids, []).append(row)
    for tokens, rows in rows_of.items():
        ids = _token_ids(tokens, logits.shape[-1], logits.device)
        if not len(ids):
            continue
        if len(rows) == len(draws):
            logits.index_fill_(1, ids, -torch.inf)
        else:
            logits[torch.tensor(rows, device=logits.device)[:, None], ids] = -torch.inf


@functools.lru_cache(maxsize=64)
def _token_ids(tokens: tuple[int, ...], vocab: int, device: torch.device) -> torch.Tensor:
    """Those of `tokens` that are in the vocabulary, on the device: requests of a model suppress the same ones at every step."""
    return torch.tensor(
        sorted({token for token in tokens if token < vocab}), dtype=torch.int64, device=device
    )


def choose(logits: torch.Tensor, draws: Items[Draw]) -> torch.Tensor:
    """Draw from finite logits [n, vocab], one row for each draw; token ids [n] on the device of the logits."""
    device = logits.device

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=device)[:, None]

    temperature = column([draw.sampling.temperature for draw in draws])
    points = column([uniform(draw.sampling.seed, draw.index) for draw in draws])
    cut = [row for row, draw in enumerate(draws) if _cuts(draw.sampling)]
    if not cut:
        return _invert(_probabilities(logits, temperature), points)
    top_k = column([draws[row].sampling.top_k or logits.shape[-1] for row in cut])
    top_p = column([draws[row].sampling.top_p for row in cut])
    least = [draws[row].sampling.min_p for row in cut]
    min_p = column(least) if any(least) else None
    if len(cut) == len(draws):
        return _choose_cut(logits, temperature, points, top_k, top_p, min_p)
    inside = set(cut)
    rows = torch.tensor(cut, device=device)
    whole = torch.tensor([row for row in range(len(draws)) if row not in inside], device=device)
    tokens = torch.empty(len(draws), dtype=torch.int64, device=device)
    tokens[whole] = _invert(_probabilities(logits[whole], temperature[whole]), points[whole])
    tokens[rows] = _choose_cut(logits[rows], temperature[rows], points[rows], top_k, top_p, min_p)
    return tokens


def _cuts(sampling: SamplingParams) -> bool:
    return bool(sampling.top_k or sampling.min_p) or sampling.top_p < 1


def _choose_cut(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    points: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor | None,
) -> torch.Tensor:
    ordered, order = torch.sort(logits, dim=-1, descending=True, stable=True)
    ranks = torch.arange(logits.shape[-1], device=logits.device)
    probabilities = _probabilities(ordered.masked_fill(ranks >= top_k, -torch.inf), temperature)
    if min_p is not None:
        probabilities.masked_fill_(probabilities < min_p * probabilities[:, :1], 0.0)
    cumulative = probabilities.cumsum(dim=-1)
    if min_p is not None:  # what is left is the whole; the other rows' mass stays 1, not their rounded sum
        top_p = torch.where(min_p > 0, top_p * cumulative[:, -1:], top_p)
    outside = cumulative - probabilities >= top_p
    outside[:, 0] = False
    rank = _invert(probabilities.masked_fill(outside, 0.0), points)
    return order.gather(-1, rank[:, None])[:, 0]


def _probabilities(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """In float64."""
    scaled = logits.double()
    return torch.softmax((scaled - scaled.amax(dim=-1, keepdim=True)) / temperature, dim=-1)


def _invert(probabilities: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """The index at which the cumulative distribution of each row passes its point in [0, 1); never one of probability 0."""
    cumulative = probabilities.cumsum(dim=-1)
    total = cumulative[:, -1:].contiguous()
    target = torch.minimum(points * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target, right=True)[:, 0]


def logprobs_of(logits: torch.Tensor, tokens: Items[int], count: int) -> list[Logprob]:
    """Natural-log probabilities of given tokens by float32 logits [n, vocab], one row for each, and of the `count` likeliest ones."""
    chosen = torch.tensor(tokens, dtype=torch.int64, device=logits.device)[:, None]
    table = torch.log_softmax(logits, dim=-1)
    values, ids = table.topk(min(count, table.shape[-1]), dim=-1)
    packed = torch.cat([table.gather(-1, chosen).double(), values.double(), ids.double()], dim=1)
    rows: list[list[float]] = packed.tolist()
    width = values.shape[1]
    return [(row[0], tuple(zip(map(int, row[1 + width :]), row[1 : 1 + width], strict=True))) for row in rows]


def _logprobs(
    rows: torch.Tensor, tokens: torch.Tensor, draws: Items[Draw], wanted: list[int]
) -> torch.Tensor:
    """Of the `wanted` rows, whose logits are `rows`; in float64, in which ids and log probabilities are exact."""
    table = torch.log_softmax(rows, dim=-1)
    own = table.gather(-1, tokens[wanted].clamp(min=0)[:, None])
    count = min(max(draws[row].sampling.logprobs or 0 for row in wanted), table.shape[-1])
    values, ids = table.topk(count, dim=-1)
    return torch.cat([tokens[wanted][:, None].double(), own.double(), values.double(), ids.double()], dim=1)


def _with_logprobs(tokens: torch.Tensor, logprobs: torch.Tensor, draws: Items[Draw]) -> list[Sampled | None]:
    """Copied from the device at once."""
    wanted = [row for row, draw in enumerate(draws) if draw.sampling.logprobs is not None]
    count = (logprobs.shape[1] - 2) // 2
    flat: list[float] = torch.cat([tokens.double(), logprobs.flatten()]).tolist()
    sampled = [Sampled(int(token)) if token >= 0 else None for token in flat[: len(draws)]]
    width = 2 + 2 * count
    for number, row in enumerate(wanted):
        start = len(draws) + number * width
        token, logprob, *top = flat[start : start + width]
        if token >= 0:
            pairs = zip(map(int, top[count:]), top[:count], strict=True)
            sampled[row] = Sampled(int(token), logprob, tuple(pairs)[: draws[row].sampling.logprobs])
    return sampled
