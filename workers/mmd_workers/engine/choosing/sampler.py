"""Samples tokens from logits. The draw of output token i depends only on (seed, i) and its logits, on
whichever pod it runs."""

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
    """One row to sample: parameters, index of the output token, suppressed tokens, and the rules as of this token."""

    sampling: SamplingParams
    index: int
    suppress: tuple[int, ...] = ()
    rules: RuleState | None = None


@dataclass(frozen=True, slots=True)
class Sampled:
    """A sampled token.

    `logprob` and `top_logprobs` are natural logarithms of the model's own distribution, without suppressed
    ids: before grammars, rules and temperature, as in vLLM, and after guidance.
    """

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


def uniform(seed: int, index: int) -> float:
    """Return a number in [0, 1) from a counter-based generator: blake2b of (seed, index), 53 bits."""
    message = seed.to_bytes(16, "little", signed=True) + index.to_bytes(8, "little")
    return (int.from_bytes(hashlib.blake2b(message, digest_size=8).digest(), "little") >> 11) * 2.0**-53


def sample(logits: torch.Tensor, draws: Items[Draw], masks: Masks | None = None) -> list[Sampled | None]:
    """Sample float32 logits [n, vocab], one row per draw; the logits are overwritten.

    None stands for a row whose largest logit is not finite (broken weights), or for which `masks` allow nothing.

    The order is: rules, temperature, min-p (tokens at least `min_p` times as likely as the likeliest) and
    top-k, then top-p (nucleus: the smallest set of most likely tokens whose mass reaches p). Then the
    cumulative distribution is inverted at `uniform(seed, index)`. If one of the three cuts, tokens are in
    order of falling probability; otherwise in order of their ids, which needs no sorting. The results come
    from the device in one copy.
    """
    tokens, logprobs = compute(logits, draws, masks)
    if logprobs is None:
        token_ids: list[int] = tokens.tolist()
        return [Sampled(token) if token >= 0 else None for token in token_ids]
    return _with_logprobs(tokens, logprobs, draws)


def compute(
    logits: torch.Tensor, draws: Items[Draw], masks: Masks | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Do the part of `sample` that runs on the device.

    Returns tokens [n], -1 for none; and log probabilities, float64 [rows with log probabilities, 2 + 2 *
    most], None if no row requests them. Each of these rows has the token, its log probability, the most
    likely tokens' log probabilities, and their ids.
    """
    _suppress(logits, draws)
    logprob_rows = [row for row, draw in enumerate(draws) if draw.sampling.logprobs is not None]
    changed = masks is not None or any(draw.rules is not None for draw in draws)
    unchanged_logits = logits[logprob_rows] if logprob_rows and changed else None
    if masks is not None:
        masks.apply(logits)
    tokens = pick(logits, draws)
    if not logprob_rows:
        return tokens, None
    return tokens, _logprobs(
        logits[logprob_rows] if unchanged_logits is None else unchanged_logits, tokens, draws, logprob_rows
    )


def pick(logits: torch.Tensor, draws: Items[Draw]) -> torch.Tensor:
    """Choose token ids [n] from float32 logits [n, vocab], on their device; -1 for a row whose largest logit is not finite.

    The rules change the logits in place.
    """
    if ruled := [(row, draw.rules) for row, draw in enumerate(draws) if draw.rules is not None]:
        apply_rules(logits, ruled)
    best, tokens = logits.max(dim=-1)
    finite = torch.isfinite(best)
    random_rows = [row for row, draw in enumerate(draws) if draw.sampling.temperature > 0]
    if random_rows:
        # Broken rows are drawn from as zeros and discarded below. From NaN the draw would compute an index outside the row;
        # on CUDA that is an assertion, which makes the device unusable for every request.
        every = len(random_rows) == len(draws)
        rows = (
            logits.masked_fill(~finite[:, None], 0.0)
            if every
            else logits[random_rows].masked_fill_(~finite[random_rows][:, None], 0.0)
        )
        tokens[random_rows] = choose(rows, [draws[row] for row in random_rows])
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
    """Return the `tokens` that are in the vocabulary, on the device. Cached: a model's requests suppress the
    same tokens."""
    return torch.tensor(
        sorted({token for token in tokens if token < vocab}), dtype=torch.int64, device=device
    )


def choose(logits: torch.Tensor, draws: Items[Draw]) -> torch.Tensor:
    """Draw from finite logits [n, vocab], one row per draw. Returns token ids [n] on the logits' device."""
    device = logits.device

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=device)[:, None]

    temperature = column([draw.sampling.temperature for draw in draws])
    points = column([uniform(draw.sampling.seed, draw.index) for draw in draws])
    cut_rows = [row for row, draw in enumerate(draws) if _cuts(draw.sampling)]
    if not cut_rows:
        return _invert(_probabilities(logits, temperature), points)
    top_k = column([draws[row].sampling.top_k or logits.shape[-1] for row in cut_rows])
    top_p = column([draws[row].sampling.top_p for row in cut_rows])
    min_ps = [draws[row].sampling.min_p for row in cut_rows]
    min_p = column(min_ps) if any(min_ps) else None
    if len(cut_rows) == len(draws):
        return _choose_cut(logits, temperature, points, top_k, top_p, min_p)
    cut_set = set(cut_rows)
    rows = torch.tensor(cut_rows, device=device)
    uncut_rows = torch.tensor([row for row in range(len(draws)) if row not in cut_set], device=device)
    tokens = torch.empty(len(draws), dtype=torch.int64, device=device)
    tokens[uncut_rows] = _invert(
        _probabilities(logits[uncut_rows], temperature[uncut_rows]), points[uncut_rows]
    )
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
    if (
        min_p is not None
    ):  # top-p is relative to the remaining mass; in rows without min-p that is 1, not the rounded sum
        top_p = torch.where(min_p > 0, top_p * cumulative[:, -1:], top_p)
    outside_nucleus = cumulative - probabilities >= top_p
    outside_nucleus[:, 0] = False
    rank = _invert(probabilities.masked_fill(outside_nucleus, 0.0), points)
    return order.gather(-1, rank[:, None])[:, 0]


def _probabilities(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Return the probabilities in float64."""
    scaled = logits.double()
    return torch.softmax((scaled - scaled.amax(dim=-1, keepdim=True)) / temperature, dim=-1)


def _invert(probabilities: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """Return the index at which each row's cumulative distribution passes its point in [0, 1); its
    probability is never 0."""
    cumulative = probabilities.cumsum(dim=-1)
    total = cumulative[:, -1:].contiguous()
    target = torch.minimum(points * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target, right=True)[:, 0]


def logprobs_of(logits: torch.Tensor, tokens: Items[int], count: int) -> list[Logprob]:
    """Return natural-log probabilities from float32 logits [n, vocab]: of one given token per row, and of the
    `count` likeliest."""
    chosen = torch.tensor(tokens, dtype=torch.int64, device=logits.device)[:, None]
    table = torch.log_softmax(logits, dim=-1)
    values, ids = table.topk(min(count, table.shape[-1]), dim=-1)
    packed = torch.cat([table.gather(-1, chosen).double(), values.double(), ids.double()], dim=1)
    rows: list[list[float]] = packed.tolist()
    width = values.shape[1]
    return [(row[0], tuple(zip(map(int, row[1 + width :]), row[1 : 1 + width], strict=True))) for row in rows]


def _logprobs(
    rows: torch.Tensor, tokens: torch.Tensor, draws: Items[Draw], logprob_rows: list[int]
) -> torch.Tensor:
    """Return log probabilities of the rows `logprob_rows`, whose logits are `rows`.

    The result is float64, which holds ids and log probabilities exactly.
    """
    table = torch.log_softmax(rows, dim=-1)
    token_logprobs = table.gather(-1, tokens[logprob_rows].clamp(min=0)[:, None])
    count = min(max(draws[row].sampling.logprobs or 0 for row in logprob_rows), table.shape[-1])
    values, ids = table.topk(count, dim=-1)
    return torch.cat(
        [tokens[logprob_rows][:, None].double(), token_logprobs.double(), values.double(), ids.double()],
        dim=1,
    )


def _with_logprobs(tokens: torch.Tensor, logprobs: torch.Tensor, draws: Items[Draw]) -> list[Sampled | None]:
    """Build the samples from one copy of tokens and log probabilities to the host."""
    logprob_rows = [row for row, draw in enumerate(draws) if draw.sampling.logprobs is not None]
    count = (logprobs.shape[1] - 2) // 2
    flat: list[float] = torch.cat([tokens.double(), logprobs.flatten()]).tolist()
    sampled = [Sampled(int(token)) if token >= 0 else None for token in flat[: len(draws)]]
    width = 2 + 2 * count
    for number, row in enumerate(logprob_rows):
        start = len(draws) + number * width
        token, logprob, *top = flat[start : start + width]
        if token >= 0:
            pairs = zip(map(int, top[count:]), top[:count], strict=True)
            sampled[row] = Sampled(int(token), logprob, tuple(pairs)[: draws[row].sampling.logprobs])
    return sampled
