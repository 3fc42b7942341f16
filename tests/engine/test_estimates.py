"""How fast an engine has been, from what its steps did."""

from __future__ import annotations

from mmd_workers.engine.interface import SampledToken, StepOutput
from mmd_workers.engine.pacing.estimates import Estimates


def decoded(sequences: int, tokens_each: int, seconds: float) -> StepOutput:
    tokens = [SampledToken(str(n), i, 5) for n in range(sequences) for i in range(tokens_each)]
    return StepOutput(tokens, sequences=sequences, decode_sequences=sequences, duration_seconds=seconds)


def test_several_tokens_of_a_sequence_in_one_step_share_its_time() -> None:
    plain, drafted = Estimates(), Estimates()
    plain.add(decoded(3, 1, 0.2))
    drafted.add(decoded(3, 4, 0.2))
    assert plain.step_seconds == drafted.step_seconds == plain.itl_seconds == 0.2
    assert drafted.itl_seconds == 0.05
