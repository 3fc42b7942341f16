"""Tracks who may still write to the reservations of a decode pod, and until when. Pure: time is an argument.

A lease ends once: by its commit, by its release, by expiry or with its owner. The table frees no blocks: `DecodeService` does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mmd_api.contract.errors import LeaseError


@dataclass(frozen=True, slots=True)
class Lease:
    """The reservation of `sequence_id`, to which `pod`/`incarnation` may write until `expires` (seconds, exclusive)."""

    lease_id: str
    pod: str
    incarnation: str
    sequence_id: str
    expires: float


class LeaseTable:
    """All leases a decode worker has granted. Not thread-safe: one loop owns it."""

    def __init__(self) -> None:
        self._granted: dict[str, Lease] = {}

    def __len__(self) -> int:
        return len(self._granted)

    def grant(
        self, lease_id: str, pod: str, incarnation: str, sequence_id: str, now: float, seconds: float
    ) -> Lease:
        """Enter a new lease that ends at `now + seconds`.

        Raises:
            ValueError: the lease id is in use; the granting side creates a new one for every grant.
        """
        if lease_id in self._granted:
            raise ValueError(f"lease {lease_id} already exists; create a new id for every grant")
        lease = Lease(lease_id, pod, incarnation, sequence_id, now + seconds)
        self._granted[lease_id] = lease
        return lease

    def get(self, lease_id: str, now: float) -> Lease:
        """The live lease with this id; to be checked before every write.

        Raises:
            LeaseError: the lease is unknown, expired, released or already committed.
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

    def commit(self, lease_id: str, now: float) -> None:
        """End a live lease because all KV has arrived. `DecodeService` answers repeated commits.

        Raises:
            LeaseError: as in `get`; the blocks may already hold another sequence's KV.
        """
        del self._granted[self.get(lease_id, now).lease_id]

    def release(self, lease_id: str) -> Lease | None:
        """End a lease early (cancelled, failed). Returns the lease, or None if it has already ended."""
        return self._granted.pop(lease_id, None)

    def expire(self, now: float) -> list[Lease]:
        """End every expired lease; returns these leases, oldest grant first."""
        return self._end([lease for lease in self._granted.values() if now >= lease.expires])

    def drop_owner(self, pod: str, incarnation: str) -> list[Lease]:
        """End every lease of a lost worker and return them."""
        return self._end(
            [
                lease
                for lease in self._granted.values()
                if (lease.pod, lease.incarnation) == (pod, incarnation)
            ]
        )

    def _end(self, leases: list[Lease]) -> list[Lease]:
        for lease in leases:
            del self._granted[lease.lease_id]
        return leases
