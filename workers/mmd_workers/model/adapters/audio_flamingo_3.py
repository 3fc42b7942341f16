"""Audio Flamingo 3: sound is cut into windows of 30 s, the last of which may be shorter."""

from __future__ import annotations

from mmd_api.contract.pools import Modality
from mmd_workers.model.adapters.base import Adapter
from mmd_workers.model.runs import Along, Inputs, TowerRun


class _Windows(Along):
    """Padded windows [windows, mels, frames] with a mask of their frames."""

    def __init__(self) -> None:
        super().__init__({"input_features": 0, "input_features_mask": 0}, divided=True)

    def part_tokens(self, inputs: Inputs, num_tokens: int) -> tuple[int, ...]:
        """A window has one row for each four frames."""
        frames = inputs["input_features_mask"].sum(-1)
        rows = tuple((((frames - 1) // 2 - 1) // 2 + 1).tolist())
        return rows if sum(rows) == num_tokens and all(rows) else (num_tokens,)


class AudioFlamingo3Adapter(Adapter):
    """Each window is read without the others."""

    def tower_run(self, modality: Modality) -> TowerRun:
        """Windows of any number of sounds share a run."""
        return _Windows() if modality == "audio" else super().tower_run(modality)
