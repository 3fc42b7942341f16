"""Equal shares for modalities, of the time of a stage or of the bytes in memory: so an image waits for no backlog of videos. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

from mmd_api.contract.pools import Modality


class FairShares:
    """Which modality is next: of those that wait, the one that has had the least. Start-time fair queueing (Goyal, Vin and Cheng, 1996):
    one that comes back has had as much as the one that was served last, so a pause earns it nothing.
    """

    def __init__(self) -> None:
        self._had: dict[Modality, float] = {}
        self._served = 0.0  # what one had before it was served last
        self._waited: frozenset[Modality] = frozenset()  # when one was chosen last

    def next_of(
        self, waiting: Collection[Modality], having: Mapping[Modality, float] = MappingProxyType({})
    ) -> Modality:
        """Choose among modalities, at least one. `having`: what they have had that has not been added yet."""
        for modality in frozenset(waiting) - self._waited:
            self._had[modality] = max(self._had.get(modality, 0.0), self._served)
        self._waited = frozenset(waiting)
        return min(waiting, key=lambda modality: self._had[modality] + having.get(modality, 0.0))

    def add(self, modality: Modality, amount: float) -> None:
        """It has been served so much more."""
        had = self._had.get(modality, 0.0)
        self._served = max(self._served, had)
        self._had[modality] = had + amount
