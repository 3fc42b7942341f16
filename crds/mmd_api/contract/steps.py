"""How many tokens an engine step has that is bounded in time: the engine schedules by it, and the simulator prices by it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class StepBound:
    """A step is to end in `seconds`. It has from `least` to `most` tokens, however slow or fast the machine is, and its rows may take
    `fixed_cost_multiple` times its fixed time, although it then passes the bound: else little would come of a step."""

    seconds: float
    most: int
    least: int
    fixed_cost_multiple: float

    @classmethod
    def of_chunks(cls, seconds: float, chunk_tokens: int) -> Self:
        """Of steps that have `chunk_tokens` of prompts where nothing bounds them: an eighth of these at least; the fixed time is a sixth at most."""
        return cls(seconds, chunk_tokens, max(1, chunk_tokens // 8), fixed_cost_multiple=5)

    def tokens(self, fixed_seconds: float, row_seconds: float, decodes: int = 0) -> int:
        """Tokens of prompts beside `decodes`, each of which is a row too, where a step takes a fixed time and a time for each row."""
        seconds = max(self.seconds - fixed_seconds, self.fixed_cost_multiple * fixed_seconds)
        return int(self.within(seconds / row_seconds - decodes))

    def within(self, tokens: float) -> float:
        """The nearest number of tokens that a step may have."""
        return min(self.most, max(self.least, tokens))
