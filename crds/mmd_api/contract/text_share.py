"""How the prompt tokens of a step are divided between text and media: the engine schedules by it, and the simulator orders prompts by it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class TextShare:
    """While prompts of text alone and prompts with media both wait, text has `percent` of the tokens that are computed, and media the rest.

    What one side had too much, because a prompt cannot be cut so, is owed to the other, which then comes first. A side that has all it
    wants is owed nothing, and nothing is owed once one of them does not wait.
    """

    percent: int
    owed_hundredths: int = 0  # of tokens, to text; less than 0: to media

    @property
    def text_first(self) -> bool:
        """Whether text is the next to have tokens."""
        return self.owed_hundredths >= 0

    def quota(self, tokens: int, text: int, media: int) -> int:
        """How many of a step's `tokens` the first side has, where text wants `text` of them and media `media`: its part, what it is owed, and
        what the other one does not want."""
        of_text = (self.percent * tokens + self.owed_hundredths) // 100
        of_text = min(tokens, max(0, of_text))
        return max(of_text, tokens - media) if self.text_first else max(tokens - of_text, tokens - text)

    def add(self, text: int, media: int, *, text_wants: bool, media_want: bool, most: int) -> None:
        """Learn what both had, and whether they still want some. Above `most` tokens, what a side is owed grows no more: it cannot use it."""
        owed = self.owed_hundredths + self.percent * (text + media) - 100 * text
        if not text_wants:
            owed = min(owed, 0)
        if not media_want:
            owed = max(owed, 0)
        limit = max(100 * most, abs(self.owed_hundredths))
        self.owed_hundredths = max(-limit, min(limit, owed))

    def clear(self) -> None:
        """Only one side waits."""
        self.owed_hundredths = 0
