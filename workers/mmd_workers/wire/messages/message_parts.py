"""Parts that several messages share, and the reply without content."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mmd_api.contract.answers import Grammar
from mmd_api.contract.pools import Modality
from mmd_api.contract.sampling import LogitRules


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """Name, dtype (torch name without `torch.`) and shape of a tensor. Its raw bytes follow, in C order."""

    name: str
    dtype: str
    shape: list[int]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """Reply without content: the message has been received and acted upon."""


@dataclass(frozen=True, slots=True)
class FeatureRef:
    """One medium of a request: its identity, the place of its rows in the prompt, and the facts of its shape for the model.

    - `feature_id`: derived once, by the gateway, from (digest, pipeline revision, sampling settings).
    - `ranges`: [start, length] pairs of placeholder positions in the prompt's token ids; the lengths add up to `num_tokens`.
    - `geometry`: the model's small shape facts (`image_grid_thw`, `video_second_per_grid`, ...), computed from dimensions before
      decoding; the encoder must arrive at the same.
    - `work`: the encoder's work, in the units of its calibrated throughput (patches for pixels, frames for sound).
    - `host_bytes`: host memory of the decoded medium and of the tower's inputs made from it, without the file's `num_bytes`.
    - `size`: size to which the model's processor resizes an image, in its own terms; empty: as it is set up.
    """

    feature_id: str
    digest: str
    modality: Modality
    num_bytes: int
    num_tokens: int
    ranges: list[list[int]]
    geometry: dict[str, Any]
    sampling: dict[str, Any]
    work: int
    host_bytes: int = 0
    size: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to choose tokens. Temperature 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 mean no limit.

    A seeded draw depends on (seed, index of the output token) alone, so it survives migration. So do the `rules`, which depend on the
    tokens so far. `stop_token_ids` end the answer, as end-of-sequence tokens do unless `ignore_eos`; neither is sampled before
    `min_tokens` others. `grammar`: the answer must match it; each pod follows it from the output tokens. `prompt_logprobs`: the first
    token brings log probabilities of the prompt's tokens, as many of each as `logprobs` has.
    """

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    logprobs: int | None = None
    ignore_eos: bool = False
    min_p: float = 0.0
    min_tokens: int = 0
    stop_token_ids: list[int] = field(default_factory=list)
    rules: LogitRules | None = None
    grammar: Grammar | None = None
    prompt_logprobs: bool = False


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token id with the natural logarithm of its probability."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class PromptLogprob:
    """Natural logarithms of probabilities at one token of a prompt, given the tokens before it.

    `logprob`: of the token itself. `top_logprobs`: of the likeliest tokens.
    """

    logprob: float
    top_logprobs: list[TokenLogprob]


@dataclass(frozen=True, slots=True)
class Phase:
    """One interval of a request's life on one pod, in Unix seconds.

    Names: queue, encode, embedding_transfer, prefill, kv_transfer, decode. `detail` carries sizes (tokens, bytes) and identities, and for
    a transfer `wire_seconds`: how long its bytes travelled, by the receiver's clock alone.
    """

    name: str
    start: float
    end: float
    detail: dict[str, Any] = field(default_factory=dict)
