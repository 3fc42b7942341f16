"""Equal shares of stage time or memory for each modality, so that an image waits for no backlog of videos. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

from mmd_api.contract.pools import Modality


class FairShares:
    """Orders waiting modalities by how much they have been served, least first.

    This is start-time fair queueing (Goyal, Vin and Cheng, 1996): a modality that comes back counts as having had as much as the one
    served last, so a pause earns it nothing.
    """

    def __init__(self) -> None:
        self._amounts: dict[Modality, float] = {}
        self._virtual_time = 0.0  # largest amount that a modality had when it was served
        self._waited: frozenset[Modality] = frozenset()  # modalities that waited at the last choice

    def in_turn(
        self, waiting: Collection[Modality], having: Mapping[Modality, float] = MappingProxyType({})
    ) -> list[Modality]:
        """The waiting modalities, the one whose turn it is first. `having`: amounts that have not been added yet."""
        for modality in frozenset(waiting) - self._waited:
            self._amounts[modality] = max(self._amounts.get(modality, 0.0), self._virtual_time)
        self._waited = frozenset(waiting)
        return sorted(waiting, key=lambda modality: self._amounts[modality] + having.get(modality, 0.0))

    def add(self, modality: Modality, amount: float) -> None:
        """Record that a modality has been served this much more."""
        previous = self._amounts.get(modality, 0.0)
        self._virtual_time = max(self._virtual_time, previous)
        self._amounts[modality] = previous + amount
