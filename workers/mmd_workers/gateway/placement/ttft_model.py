"""The estimate of the time to the first token, and how it is fitted to what requests took. Pure: no clock, no network.

A request waits for what is queued before it while its media are encoded and travel, so of these the longer counts; then its prompt is computed.
Each term is seconds by the figures that pods report. A factor for each, and an overhead, are fitted after every first token: normalised least
mean squares, with the error of one request limited, and every factor within bounds. So one outlier moves little, and no load can make the
estimate absurd.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

OneOrMany = TypeVar("OneOrMany", float, npt.NDArray[np.float64])

STEP = 0.1  # of the error of a request, how much is corrected at once
MOST_ERROR = 0.5  # of the estimate: what one request may be off by, as far as fitting is concerned
LEAST_ERROR_SECONDS = 0.01
OVERHEAD_WEIGHT_SECONDS = 0.02  # as a term of this many seconds
FACTOR_BOUNDS = (0.25, 4.0)
OVERHEAD_BOUNDS_SECONDS = (0.0, 1.0)


@dataclass(frozen=True, slots=True)
class Terms:
    """Seconds by the figures that pods report: `queue` of the prefill pod, `encode` with its backlog, `transfer` of embeddings,
    `prefill` of what is not cached. `in_turn`: the pod's own tower encodes, after the prompts that wait, instead of other pods meanwhile.
    """

    queue: float = 0.0
    encode: float = 0.0
    transfer: float = 0.0
    prefill: float = 0.0
    in_turn: bool = False

    @property
    def seconds(self) -> dict[str, float]:
        """By name of the term."""
        return {
            "queue": self.queue,
            "encode": self.encode,
            "transfer": self.transfer,
            "prefill": self.prefill,
        }


@dataclass(frozen=True, slots=True)
class Factors:
    """What each term is multiplied by, and the seconds that every request takes besides."""

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
        """Seconds to the first token, of one pod or of many. `in_turn`: see `Terms`."""
        queued, media = queue * self.queue, encode * self.encode + transfer * self.transfer
        waiting: OneOrMany = np.maximum(queued, media)
        if in_turn is not False:
            waiting = np.where(in_turn, queued + media, waiting)  # type: ignore[assignment]  # as many as there are
        return waiting + prefill * self.prefill + self.overhead


class TtftModel:
    """Factors that follow the outcomes."""

    def __init__(self) -> None:
        self.factors = Factors()

    def estimate(self, terms: Terms) -> float:
        """Seconds to the first token."""
        return float(self.factors.ttft(*astuple(terms)))

    def learn(self, terms: Terms, seconds: float) -> None:
        """Fit the factors to a request that took so long."""
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
        most = max(LEAST_ERROR_SECONDS, MOST_ERROR * estimate)
        error = min(most, max(-most, seconds - estimate))
        norm = sum(each * each for each in counted.values())
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
