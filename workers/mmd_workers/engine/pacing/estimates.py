"""How fast an engine has been of late: running averages, for routing and scaling. Independent of which engine it is."""

from __future__ import annotations

from mmd_workers.engine.interface import StepOutput

AVERAGE_WEIGHT = 0.2  # of the newest step


class Estimates:
    """All are 0 before the first step of their kind."""

    def __init__(self) -> None:
        self.prefill_tokens_per_second = 0.0
        self.step_seconds = 0.0  # of steps that decode
        self.itl_seconds = 0.0  # less where a step yields several tokens of a sequence

    def add(self, output: StepOutput) -> None:
        """Count a step. What decoding takes of one that also prefills is estimated from those before."""
        if output.prefill_tokens:
            decode_part = self.step_seconds if output.decode_sequences else 0.0
            seconds = max(output.duration_seconds - decode_part, output.duration_seconds / 2)
            self.prefill_tokens_per_second = _average(
                self.prefill_tokens_per_second, output.prefill_tokens / seconds
            )
        elif output.decode_sequences:
            self.step_seconds = _average(self.step_seconds, output.duration_seconds)
            tokens_each = max(1.0, len(output.tokens) / output.decode_sequences)
            self.itl_seconds = _average(self.itl_seconds, output.duration_seconds / tokens_each)


def _average(old: float, new: float) -> float:
    return new if old == 0.0 else old + AVERAGE_WEIGHT * (new - old)
