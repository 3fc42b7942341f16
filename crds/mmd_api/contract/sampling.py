"""Changes of a request to the model's logits before a token is chosen.

Gateways send them, pods apply them.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class LogitRules:
    """Changes to logits, applied in the order of the fields. The defaults change nothing.

    `allowed_token_ids`: the only tokens that are allowed; empty: every token. `bad_words`: sequences of
    tokens; the last one is excluded where the newest output tokens are those before it. `logit_bias`: tokens,
    each once, with what is added to their logits. `repetition_penalty` divides the positive logits of all
    tokens of prompt and output and multiplies the negative ones. `frequency_penalty` is subtracted once for
    each time that a token is in the output, `presence_penalty` once if it is.
    """

    allowed_token_ids: list[int] = field(default_factory=list)
    bad_words: list[list[int]] = field(default_factory=list)
    logit_bias: list[tuple[int, float]] = field(default_factory=list)
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0


@dataclass(frozen=True, slots=True)
class Guidance:
    """Classifier-free guidance, applied before all rules.

    With the log probabilities p after the prompt and c after the companion's, tokens have the logits
    `scale * (p - c) + c`. The companion's prompt is `token_ids` (at least one, none of a medium), and its
    answer is the same.
    """

    scale: float
    token_ids: list[int]
