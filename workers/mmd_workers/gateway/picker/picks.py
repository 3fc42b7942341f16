"""Which gateway pod a request of the platform's own gateway goes to. Pure: the state of the gateways comes in.

Every gateway knows the prefix caches of all workers and places requests on any of them, so it does not matter for a prompt which gateway takes
it: the least loaded does. A request with an idempotency key goes where the one before it with this key went, because its answer is retained
there, or its stream to resume; another gateway reads it there. Whether a request is admitted is for the gateway to decide, which knows
its tenant and whether it repeats one.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from mmd_api.contract.errors import OverloadedError

STICKY_HEADER = "idempotency-key"
MOST_ENDPOINTS = 3
"""Of an answer: the one to take, and those to go on with if it cannot be reached."""
RETRY_SECONDS = 1.0
PICKED_DIVISOR = 8
"""Of what a gateway may run: more picks than this share do not count, so that whoever asks without end cannot make a gateway look full."""


@dataclass(frozen=True, slots=True)
class GatewayLoad:
    """A gateway that serves, as of its heartbeat, which was `sent` at that Unix time. `endpoint`: `ip:port` for clients."""

    pod: str
    endpoint: str
    is_ready: bool
    requests: int
    max_requests: int
    sent: float


@dataclass(frozen=True, slots=True)
class PickRequest:
    """What a choice depends on. `subset`: the endpoints that are allowed; None: all."""

    sticky_key: str = ""
    subset: frozenset[str] | None = None


@dataclass(slots=True)
class _Picked:
    """How many requests were sent to a gateway since its newest heartbeat, which does not show them."""

    sent: float
    requests: int = 0


class Picks:
    """Chooses among the gateways of one pipeline revision, which are `gateways`."""

    def __init__(self, rng: random.Random) -> None:
        self.gateways: Sequence[GatewayLoad] = ()
        self._rng = rng
        self._picked: dict[str, _Picked] = {}

    def pick(self, wanted: PickRequest) -> list[str]:
        """Endpoints (`ip:port`), the best first; at most three.

        Raises:
            OverloadedError: no gateway of those that are allowed serves.
        """
        serving = [g for g in self.gateways if wanted.subset is None or g.endpoint in wanted.subset]
        ready = [g for g in serving if g.is_ready]
        gateways = ready or serving  # one that drains still serves, while no other does
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
        """Its share of the requests that it may run; ties fall at random, so that several pickers do not choose alike."""
        return self._requests(gateway) / max(1, gateway.max_requests), self._rng.random()

    def _is_full(self, gateway: GatewayLoad) -> bool:
        return self._requests(gateway) >= gateway.max_requests

    def _requests(self, gateway: GatewayLoad) -> int:
        """That run there, and those sent there since it said so."""
        picked = self._picked.setdefault(gateway.pod, _Picked(gateway.sent))
        if picked.sent != gateway.sent:
            picked.sent, picked.requests = gateway.sent, 0
        return gateway.requests + min(picked.requests, max(1, gateway.max_requests // PICKED_DIVISOR))

    def _forget_all_but(self, pods: Collection[str]) -> None:
        for pod in self._picked.keys() - pods:
            del self._picked[pod]


def _weight(key: str, pod: str) -> bytes:
    """Rendezvous hashing: of the gateways that are there, each key has the same one at every picker, and only keys of one that goes move."""
    return hashlib.blake2b(f"{pod} {key}".encode(), digest_size=8).digest()
