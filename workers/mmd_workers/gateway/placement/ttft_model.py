"""The estimate of the time to the first token, and its fit to measured times. Pure: no clock, no network.

A request waits for the queue ahead of it while its media are encoded and transferred, so only the longer of the two counts. Then its
prompt is computed. Each term is in seconds, from figures that pods report. A factor for each term and an overhead are fitted after every
first token, by normalised least mean squares. The error of one request is limited, and every factor is bounded. So one outlier changes
little, and no load makes the estimate absurd.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

OneOrMany = TypeVar("OneOrMany", float, npt.NDArray[np.float64])

STEP = 0.1  # fraction of a request's error that is corrected at once
MOST_ERROR = 0.5  # limit of one request's error, as a fraction of its estimate
LEAST_ERROR_SECONDS = 0.01
OVERHEAD_WEIGHT_SECONDS = 0.02  # the overhead is fitted like a term of this length
FACTOR_BOUNDS = (0.25, 4.0)
OVERHEAD_BOUNDS_SECONDS = (0.0, 1.0)


@dataclass(frozen=True, slots=True)
class Terms:
    """The parts of an estimate in seconds, from figures that pods report.

    `queue`: of the prefill pod. `encode`: with the backlog. `transfer`: of embeddings. `prefill`: of tokens that are not cached. `in_turn`:
    the pod's own tower encodes after the waiting prompts, instead of other pods meanwhile.
    """

    queue: float = 0.0
    encode: float = 0.0
    transfer: float = 0.0
    prefill: float = 0.0
    in_turn: bool = False

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by the name of the term."""
        return {
            "queue": self.queue,
            "encode": self.encode,
            "transfer": self.transfer,
            "prefill": self.prefill,
        }


@dataclass(frozen=True, slots=True)
class Factors:
    """Multipliers of each term, and the overhead in seconds of every request."""

    queue: float = 1.0
    encode: float = 1.0
    transfer: float = 1.0
    prefill: float = 1.0
    overhead: float = 0.0

    def ttft(
        self,
        queue: OneOrMany,
        encode: OneOrMany,
        transfer: OneOrMany,
        prefill: OneOrMany,
        in_turn: bool | npt.NDArray[np.bool_] = False,
    ) -> OneOrMany:
        """Seconds to the first token, for one pod or an array of pods. `in_turn`: see `Terms`."""
        queued, media = queue * self.queue, encode * self.encode + transfer * self.transfer
        waiting: OneOrMany = np.maximum(queued, media)
        if in_turn is not False:
            waiting = np.where(in_turn, queued + media, waiting)  # type: ignore[assignment]  # same shape
        return waiting + prefill * self.prefill + self.overhead


class TtftModel:
    """Factors that follow measured times."""

    def __init__(self) -> None:
        self.factors = Factors()

    def estimate(self, terms: Terms) -> float:
        """Seconds to the first token."""
        return float(self.factors.ttft(*astuple(terms)))

    def learn(self, terms: Terms, seconds: float) -> None:
        """Fit the factors to a request that took this many seconds."""
        factors = self.factors
        queue, media = (
            terms.queue * factors.queue,
            terms.encode * factors.encode + terms.transfer * factors.transfer,
        )
        counted = {"prefill": terms.prefill, "overhead": OVERHEAD_WEIGHT_SECONDS}
        if terms.in_turn or queue >= media:
            counted["queue"] = terms.queue
        if terms.in_turn or queue < media:
            counted |= {"encode": terms.encode, "transfer": terms.transfer}
        estimate = self.estimate(terms)
        limit = max(LEAST_ERROR_SECONDS, MOST_ERROR * estimate)
        error = min(limit, max(-limit, seconds - estimate))
        norm = sum(value * value for value in counted.values())
        fitted = {name: getattr(factors, name) for name in Factors.__slots__}
        for name, term in counted.items():
            correction = STEP * error * term / norm
            if name == "overhead":
                low, high = OVERHEAD_BOUNDS_SECONDS
                correction *= OVERHEAD_WEIGHT_SECONDS
            else:
                low, high = FACTOR_BOUNDS
            fitted[name] = min(high, max(low, fitted[name] + correction))
        self.factors = Factors(**fitted)
