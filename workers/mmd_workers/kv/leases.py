"""Leases on granted KV blocks: who may still write into them, and until when. Pure: time is an argument, blocks are numbers.

A lease begins granted and ends exactly once: committed (its blocks now belong to the sequence, the table forgets them) or
freed (released, expired, or dropped with its owner; the caller gives its blocks back to the pool).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mmd_api.contract.errors import LeaseError


@dataclass(frozen=True, slots=True)
class Lease:
    """Blocks that `pod`/`incarnation` may fill for `request_id` until `expires` (seconds, exclusive)."""

    lease_id: str
    pod: str
    incarnation: str
    request_id: str
    blocks: tuple[int, ...]
    expires: float


class LeaseTable:
    """All leases a decode worker has granted. Not thread-safe: one loop owns it.

    Committed leases are remembered until they would have expired, so that a repeated commit gets the same answer.
    """

    def __init__(self) -> None:
        self._granted: dict[str, Lease] = {}
        self._committed: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._granted)

    @property
    def reserved_blocks(self) -> int:
        """Blocks granted and neither committed nor freed."""
        return sum(len(lease.blocks) for lease in self._granted.values())

    def grant(
        self,
        lease_id: str,
        pod: str,
        incarnation: str,
        request_id: str,
        blocks: Sequence[int],
        now: float,
        seconds: float,
    ) -> Lease:
        """Enter a new lease over `blocks` that ends at `now + seconds`.

        Raises:
            ValueError: the lease id is in use; ids are minted by the granting side and never used twice.
        """
        if lease_id in self._granted or lease_id in self._committed:
            raise ValueError(f"lease {lease_id} already exists; create a new id for every grant")
        lease = Lease(lease_id, pod, incarnation, request_id, tuple(blocks), now + seconds)
        self._granted[lease_id] = lease
        return lease

    def get(self, lease_id: str, now: float) -> Lease:
        """The live lease with this id; to be checked before every write into its blocks.

        Raises:
            LeaseError: the lease is unknown, expired, freed or already committed.
        """
        lease = self._granted.get(lease_id)
        if lease is None or now >= lease.expires:
            raise LeaseError(
                f"lease {lease_id} is not active (released, expired or never granted); offer the request again"
            )
        return lease

    def renew(self, lease_id: str, now: float, seconds: float) -> Lease:
        """Extend a live lease to `now + seconds`, never shortening it. Raises LeaseError as `get` does."""
        lease = self.get(lease_id, now)
        renewed = replace(lease, expires=max(lease.expires, now + seconds))
        self._granted[lease_id] = renewed
        return renewed

    def commit(self, lease_id: str, now: float) -> bool:
        """Hand the blocks to the sequence. True the first time; False for a repeat, which changes nothing.

        Raises:
            LeaseError: the lease expired or was freed: the blocks may already hold another sequence's KV.
        """
        if lease_id in self._committed:
            return False
        lease = self.get(lease_id, now)
        del self._granted[lease_id]
        self._committed[lease_id] = lease.expires
        return True

    def release(self, lease_id: str) -> Lease | None:
        """Free a lease early (cancelled, failed). Returns the freed lease, or None if nothing is left to free."""
        return self._granted.pop(lease_id, None)

    def expire(self, now: float) -> list[Lease]:
        """Free every expired lease and forget commits of that age; returns the freed leases, oldest grant first."""
        self._committed = {
            lease_id: expires for lease_id, expires in self._committed.items() if now < expires
        }
        return self._free([lease for lease in self._granted.values() if now >= lease.expires])

    def drop_owner(self, pod: str, incarnation: str) -> list[Lease]:
        """Free every lease of a lost worker; its commits stand."""
        return self._free(
            [
                lease
                for lease in self._granted.values()
                if (lease.pod, lease.incarnation) == (pod, incarnation)
            ]
        )

    def _free(self, leases: list[Lease]) -> list[Lease]:
        for lease in leases:
            del self._granted[lease.lease_id]
        return leases
