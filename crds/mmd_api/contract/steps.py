"""Number of tokens of an engine step that is bounded in time.

The engine schedules by it, and the simulator prices by it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class StepBound:
    """Bound of a step that should end within `seconds`.

    The step has from `least` to `most` tokens, however slow or fast the machine is. Its rows may take
    `fixed_cost_multiple` times its fixed time, even if the step then exceeds the bound: otherwise a long fixed
    time would leave too few tokens in a step.
    """

    seconds: float
    most: int
    least: int
    fixed_cost_multiple: float

    @classmethod
    def of_chunks(cls, seconds: float, chunk_tokens: int) -> Self:
        """The bound of steps that have `chunk_tokens` of prompts where nothing bounds them.

        A step has at least an eighth of these tokens; the fixed time is at most a sixth of a step.
        """
        return cls(seconds, chunk_tokens, max(1, chunk_tokens // 8), fixed_cost_multiple=5)

    def tokens(self, fixed_seconds: float, row_seconds: float, decodes: int = 0) -> int:
        """Prompt tokens of a step beside `decodes`, each of which is a row too.

        A step takes a fixed time, and a time for each row.
        """
        seconds = max(self.seconds - fixed_seconds, self.fixed_cost_multiple * fixed_seconds)
        rows = seconds / row_seconds if row_seconds > 0 else math.inf
        return int(self.within(rows - decodes))

    def within(self, tokens: float) -> float:
        """The nearest number of tokens that a step may have."""
        return min(self.most, max(self.least, tokens))
