"""Chooses the gateway pod for a request from the platform's own gateway. Pure: the state of the gateways is passed in.

Every gateway knows the prefix caches of all workers and places requests on any of them, so for a prompt it does not matter which gateway takes
it: the least loaded gateway does. A request with an idempotency key goes to the gateway that had the previous request with this key, because
its answer, or the stream to resume, is retained there; any other gateway would have to read it from there. The gateway decides whether to admit
a request, because it knows the tenant and whether the request is a repeat.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from mmd_api.contract.errors import OverloadedError

STICKY_HEADER = "idempotency-key"
MOST_ENDPOINTS = 3
"""The most endpoints in an answer: the chosen one, and alternatives in case it cannot be reached."""
RETRY_SECONDS = 1.0
PICKED_DIVISOR = 8
"""Recent picks count only up to a gateway's request limit divided by this, so that a flood of picks cannot make a gateway look full."""


@dataclass(frozen=True, slots=True)
class GatewayLoad:
    """The load of a serving gateway in its heartbeat. `sent`: Unix time of the heartbeat. `endpoint`: `ip:port` for clients."""

    pod: str
    endpoint: str
    is_ready: bool
    requests: int
    max_requests: int
    sent: float


@dataclass(frozen=True, slots=True)
class PickRequest:
    """The properties of a request for the choice. `subset`: the allowed endpoints; None: all."""

    sticky_key: str = ""
    subset: frozenset[str] | None = None


@dataclass(slots=True)
class _Picked:
    """The number of requests sent to a gateway since its newest heartbeat, which does not include them."""

    sent: float
    requests: int = 0


class Picks:
    """Chooses among `gateways`, the gateways of one pipeline revision."""

    def __init__(self, rng: random.Random) -> None:
        self.gateways: Sequence[GatewayLoad] = ()
        self._rng = rng
        self._picked: dict[str, _Picked] = {}

    def pick(self, wanted: PickRequest) -> list[str]:
        """The endpoints (`ip:port`) for a request, the best first; at most three.

        Raises:
            OverloadedError: no allowed gateway is serving.
        """
        serving = [g for g in self.gateways if wanted.subset is None or g.endpoint in wanted.subset]
        ready = [g for g in serving if g.is_ready]
        gateways = ready or serving  # a draining gateway still serves while no other does
        if not gateways:
            which = "of the endpoints in the subset hint" if wanted.subset is not None else "pod"
            raise OverloadedError(
                f"no gateway {which} is ready; retry later, or check the pods of the gateway",
                retry_after_seconds=RETRY_SECONDS,
            )
        self._forget_all_but({g.pod for g in self.gateways})
        order = sorted(gateways, key=self._load)
        if wanted.sticky_key:
            home = min(gateways, key=lambda g: (self._is_full(g), _weight(wanted.sticky_key, g.pod)))
            order = [home, *(g for g in order if g is not home)]
        self._picked[order[0].pod].requests += 1
        return [g.endpoint for g in order[:MOST_ENDPOINTS]]

    def _load(self, gateway: GatewayLoad) -> tuple[float, float]:
        """The used share of a gateway's request limit; ties are broken at random, so that several pickers choose differently."""
        return self._requests(gateway) / max(1, gateway.max_requests), self._rng.random()

    def _is_full(self, gateway: GatewayLoad) -> bool:
        return self._requests(gateway) >= gateway.max_requests

    def _requests(self, gateway: GatewayLoad) -> int:
        """The requests running at a gateway by its heartbeat, and those sent there since."""
        picked = self._picked.setdefault(gateway.pod, _Picked(gateway.sent))
        if picked.sent != gateway.sent:
            picked.sent, picked.requests = gateway.sent, 0
        return gateway.requests + min(picked.requests, max(1, gateway.max_requests // PICKED_DIVISOR))

    def _forget_all_but(self, pods: Collection[str]) -> None:
        for pod in self._picked.keys() - pods:
            del self._picked[pod]


def _weight(key: str, pod: str) -> bytes:
    """A weight for rendezvous hashing: every picker maps a key to the same gateway, and if a gateway leaves, only its keys move."""
    return hashlib.blake2b(f"{pod} {key}".encode(), digest_size=8).digest()
