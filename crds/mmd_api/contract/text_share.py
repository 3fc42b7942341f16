"""Division of a step's prompt tokens between text and media.

The engine schedules by it, and the simulator orders prompts by it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class TextShare:
    """Text gets `percent` of the computed tokens while text-only and media prompts both wait; media get the rest.

    Prompts cannot always be split exactly: the side that got too much owes the other, which then goes first.
    Debts end when one side stops waiting or gets all it wants.
    """

    percent: int
    owed_hundredths: int = 0  # hundredths of tokens owed to text; negative: to media

    @property
    def text_first(self) -> bool:
        """Whether text is the next to have tokens."""
        return self.owed_hundredths >= 0

    def quota(self, tokens: int, text: int, media: int) -> int:
        """How many of a step's `tokens` the first side has, if text wants `text` of them and media `media`.

        These are its part, the tokens that it is owed, and those that the other side does not want.
        """
        text_quota = (self.percent * tokens + self.owed_hundredths) // 100
        text_quota = min(tokens, max(0, text_quota))
        return max(text_quota, tokens - media) if self.text_first else max(tokens - text_quota, tokens - text)

    def add(self, text: int, media: int, *, text_wants: bool, media_want: bool, most: int) -> None:
        """Record how many tokens both sides had, and whether they still want some.

        Above `most` tokens, a debt to a side grows no more: the side cannot use it.
        """
        owed = self.owed_hundredths + self.percent * (text + media) - 100 * text
        if not text_wants:
            owed = min(owed, 0)
        if not media_want:
            owed = max(owed, 0)
        limit = max(100 * most, abs(self.owed_hundredths))
        self.owed_hundredths = max(-limit, min(limit, owed))

    def clear(self) -> None:
        """Forget all debts, because only one side waits."""
        self.owed_hundredths = 0
