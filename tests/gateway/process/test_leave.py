"""When a gateway that was asked to go ends: as timelines of what it sees, a look every half second."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mmd_api.contract.load import PodLoad, WorkerState
from mmd_workers.gateway.process.leave import (
    ALONE_SECONDS,
    MOST_ALONE_SECONDS,
    QUIET_SECONDS,
    STALLED_BYTES,
    STALLED_SECONDS,
    TAKEOVER_SECONDS,
    Leave,
    OtherGateways,
)
from mmd_workers.wire.messages.every_pod import Heartbeat
from mmd_workers.wire.peers import EventKind, PeerEvent

STEP_SECONDS = 0.5
ASKED = 1000.0
"""When the gateway is asked to go."""
FOREVER = 900.0
HEARTBEAT_SECONDS = 2.5
QUIET_BESIDE_ANOTHER = HEARTBEAT_SECONDS + 0.5
LONG_AGO = -60.0
BEAT = Heartbeat("gateway-1", "gateway", [], "i", "r1", "ready", "10.0.0.2:1", 0.0, PodLoad())


@dataclass
class Story:
    """Seconds since the gateway was asked to go. `idle_before`: without a request until then. `running`: when its last request ends.
    `requests`: short ones that come later. `others`: from when to when other gateways are ready. `delivered`: when clients have read
    the rest of the answers, `STALLED_BYTES` at a time. `left`: bytes that nobody reads, by the number of the look. `replicas`: how many
    gateways there should be.
    """

    idle_before: float = 60.0
    running: float = 0.0
    requests: tuple[float, ...] = ()
    others: tuple[tuple[float, float], ...] = ((LONG_AGO, FOREVER),)
    delivered: float = 0.0
    left: tuple[int, ...] = ()
    is_replaced: bool = True
    replicas: int = 1
    now: float = field(default=0.0, init=False)
    looks: int = field(default=0, init=False)

    def ends(self) -> float:
        """When it ends."""
        directory = SimpleNamespace(timeout_seconds=HEARTBEAT_SECONDS)
        gateway = SimpleNamespace(
            last_request=ASKED - self.idle_before, running=0, directory=directory, picker=None
        )
        others = OtherGateways("gateway-0", self.replicas, clock=self._clock)
        moments = [round(at * 2) / 2 for span in self.others for at in span]
        self.now = min([0.0, *moments])
        leave = None
        while self.now < FOREVER:
            for number, (since, until) in enumerate(self.others, start=1):
                beat = replace(BEAT, pod=f"gateway-{number}")
                if since == self.now:
                    others.note(PeerEvent("appeared", beat, None))
                if until == self.now:
                    others.note(PeerEvent("state", replace(beat, state="draining"), beat))
            if self.now >= 0:
                leave = leave or Leave(
                    cast(Any, gateway), others, self._undelivered, self.is_replaced, clock=self._clock
                )
                gateway.running = int(self.now < self.running)
                if came := [at for at in self.requests if at <= self.now]:
                    gateway.last_request = ASKED + came[-1]
                if leave.may_end():
                    return self.now
            self.now += STEP_SECONDS
        return FOREVER

    def _clock(self) -> float:
        return ASKED + self.now

    def _undelivered(self) -> int:
        self.looks += 1
        if self.left:
            return self.left[self.looks % len(self.left)]
        return max(0, int((self.delivered - self.now) / STEP_SECONDS)) * STALLED_BYTES


ALONE = ()


@pytest.mark.parametrize(
    ("story", "ends"),
    [
        pytest.param(Story(), QUIET_BESIDE_ANOTHER, id="another serves"),
        pytest.param(Story(running=40), 40, id="a request is in flight"),
        pytest.param(Story(requests=(1, 2, 3)), 3 + QUIET_BESIDE_ANOTHER, id="clients still come"),
        pytest.param(Story(delivered=50), 50, id="clients read slowly"),
        pytest.param(
            Story(delivered=50, requests=(49,)), 49 + QUIET_BESIDE_ANOTHER, id="a request comes meanwhile"
        ),
        pytest.param(Story(delivered=10, running=30), 30, id="both, the request is longer"),
        pytest.param(
            Story(left=(1,)), QUIET_BESIDE_ANOTHER + STALLED_SECONDS, id="a client has stopped reading"
        ),
        pytest.param(
            Story(left=(5000, 4999, 4998)),
            QUIET_BESIDE_ANOTHER + STALLED_SECONDS,
            id="one reads a byte now and then",
        ),
        pytest.param(
            Story(left=(5000, 5300)),
            QUIET_BESIDE_ANOTHER + STALLED_SECONDS,
            id="one has stopped, and others get short answers",
        ),
        pytest.param(Story(left=(1,), running=100), 100 + STALLED_SECONDS, id="it stops after a request"),
        pytest.param(Story(others=ALONE), ALONE_SECONDS, id="alone"),
        pytest.param(
            Story(others=ALONE, requests=(10, 20)), 20 + ALONE_SECONDS, id="alone, and clients come"
        ),
        pytest.param(
            Story(others=ALONE, requests=tuple(range(0, 900, 10))),
            MOST_ALONE_SECONDS + QUIET_BESIDE_ANOTHER,
            id="alone for ever, and a client comes every ten seconds",
        ),
        pytest.param(
            Story(others=((5, FOREVER),), requests=tuple(range(0, 20, 4))),
            12 + QUIET_BESIDE_ANOTHER,
            id="another takes over",
        ),
        pytest.param(
            Story(others=((-0.5, FOREVER),), requests=(0, 3)),
            max(3 + QUIET_BESIDE_ANOTHER, TAKEOVER_SECONDS - 0.5),
            id="another was first heard of just before",
        ),
        pytest.param(
            Story(others=((LONG_AGO, 1), (0.5, FOREVER)), requests=(0, 3)),
            0.5 + TAKEOVER_SECONDS,
            id="the other goes too, and a third has just come",
        ),
        pytest.param(
            Story(others=((5, 9),), requests=tuple(range(12))),
            11 + ALONE_SECONDS,
            id="another has gone before nodes knew it",
        ),
        pytest.param(
            Story(others=((LONG_AGO, 1),), requests=(1,)),
            1 + ALONE_SECONDS,
            id="the other is asked to go too",
        ),
        pytest.param(
            Story(replicas=2), ALONE_SECONDS, id="one of two is left, and its replacement does not come"
        ),
        pytest.param(
            Story(replicas=2, others=((LONG_AGO, FOREVER), (3, FOREVER))),
            3 + TAKEOVER_SECONDS,
            id="one of two is left until its replacement serves",
        ),
        pytest.param(
            Story(replicas=2, others=((LONG_AGO, 8), (3, FOREVER)), requests=(8.5,)),
            8.5 + ALONE_SECONDS,
            id="the other of two is deleted too, before the replacement serves",
        ),
        pytest.param(
            Story(replicas=2, others=((LONG_AGO, FOREVER), (LONG_AGO, FOREVER))),
            QUIET_BESIDE_ANOTHER,
            id="both others of a rollout serve",
        ),
        pytest.param(Story(others=ALONE, is_replaced=False), 0, id="nothing replaces it"),
        pytest.param(
            Story(others=ALONE, is_replaced=False, idle_before=1),
            QUIET_SECONDS - 1,
            id="nothing replaces it, just used",
        ),
    ],
)
def test_a_gateway_ends_when_nobody_needs_it(story: Story, ends: float) -> None:
    assert story.ends() == ends


@pytest.mark.parametrize(
    ("kind", "pod", "pool", "state", "serves"),
    [
        ("state", "gateway-1", "gateway", "ready", False),
        ("reborn", "gateway-1", "gateway", "ready", False),
        ("lost", "gateway-1", "gateway", "ready", False),
        ("state", "gateway-1", "gateway", "draining", False),
        ("state", "decode-0", "decode", "draining", True),
    ],
)
def test_another_gateway_serves_while_it_goes_on(
    kind: EventKind, pod: str, pool: str, state: WorkerState, serves: bool
) -> None:
    now = [0.0]
    others = OtherGateways("gateway-0", 1, clock=lambda: now[0])
    others.note(PeerEvent("appeared", BEAT, None))
    others.note(PeerEvent("appeared", replace(BEAT, pod="gateway-0"), None))
    now[0] = TAKEOVER_SECONDS - 0.1
    assert not others.suffice()
    now[0] = TAKEOVER_SECONDS
    assert others.suffice()
    others.note(PeerEvent(kind, replace(BEAT, pod=pod, pool=pool, state=state), BEAT))
    now[0] += 1.0
    assert others.suffice() == serves
