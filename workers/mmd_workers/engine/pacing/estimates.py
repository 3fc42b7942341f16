"""Running averages of an engine's recent speed, for routing and scaling. Independent of the kind of engine."""

from __future__ import annotations

from mmd_workers.engine.interface import StepOutput

AVERAGE_WEIGHT = 0.2  # weight of the newest step


class Estimates:
    """Estimates from recent steps. Each is 0 before the first step of its kind."""

    def __init__(self) -> None:
        self.prefill_tokens_per_second = 0.0
        self.step_seconds = 0.0  # duration of a step that decodes
        self.itl_seconds = 0.0  # less than `step_seconds` where a step yields several tokens of a sequence

    def add(self, output: StepOutput) -> None:
        """Add a step. If it decodes and prefills, the time of decoding is estimated from earlier steps."""
        if output.prefill_tokens:
            decode_seconds = self.step_seconds if output.decode_sequences else 0.0
            prefill_seconds = max(output.duration_seconds - decode_seconds, output.duration_seconds / 2)
            self.prefill_tokens_per_second = _average(
                self.prefill_tokens_per_second, output.prefill_tokens / prefill_seconds
            )
        elif output.decode_sequences:
            self.step_seconds = _average(self.step_seconds, output.duration_seconds)
            tokens_each = max(1.0, len(output.tokens) / output.decode_sequences)
            self.itl_seconds = _average(self.itl_seconds, output.duration_seconds / tokens_each)


def _average(old: float, new: float) -> float:
    return new if old == 0.0 else old + AVERAGE_WEIGHT * (new - old)
