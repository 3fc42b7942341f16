"""The sequences and reservations of an engine, by id. Independent of the model and of the KV in their blocks."""

from __future__ import annotations

from dataclasses import dataclass

from mmd_workers.engine.scheduler import Scheduler
from mmd_workers.engine.sequence import Sequence


@dataclass(slots=True)
class Reservation:
    """Blocks of a sequence whose KV will arrive from another pod."""

    blocks: list[int]
    kv_tokens: int  # limit of tokens that may be written
    shared: int  # leading blocks taken from the prefix cache
    written: int  # tokens with KV, those in shared blocks included
    companion_blocks: list[int]  # nothing is written to them: the companion's prompt is computed here

    @property
    def places(self) -> int:
        """Rows of the sequence in a step."""
        return 2 if self.companion_blocks else 1


class SequenceTable:
    """Sequences that wait, run or are held, and reservations. What leaves it gives its blocks back."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._blocks = scheduler, scheduler.pool
        self.sequences: dict[str, Sequence] = {}
        self.reservations: dict[str, Reservation] = {}

    def check_new(self, sequence_id: str) -> None:
        """Check that an id is free.

        Raises:
            ValueError: the id is in use.
        """
        if sequence_id in self.sequences or sequence_id in self.reservations:
            raise ValueError(f"sequence {sequence_id} already exists")

    def abort(self, sequence_id: str) -> None:
        """Forget a sequence or a reservation in any state and free its blocks; unknown ids are ignored."""
        reservation = self.reservations.pop(sequence_id, None)
        if reservation is not None:
            self._blocks.release([*reservation.blocks, *reservation.companion_blocks])
        sequence = self.sequences.pop(sequence_id, None)
        if sequence is not None:
            self._scheduler.remove(sequence)

    def take_preempted(self) -> list[Sequence]:
        """Remove and return the sequences that were preempted and cannot be computed again here."""
        preempted, self._scheduler.preempted = self._scheduler.preempted, []
        for sequence in preempted:
            del self.sequences[sequence.sequence_id]
        return preempted

    @property
    def reserved_places(self) -> int:
        """Rows in a step that reservations will take."""
        return sum(reservation.places for reservation in self.reservations.values())
