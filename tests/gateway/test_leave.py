"""When a gateway that was asked to go ends: as timelines of what it sees, a look every half second."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mmd_workers.gateway.leave import (
    ALONE_SECONDS,
    MOST_ALONE_SECONDS,
    QUIET_SECONDS,
    STALLED_SECONDS,
    TAKEOVER_SECONDS,
    Leave,
)

STEP_SECONDS = 0.5
ASKED = 1000.0
"""When the gateway is asked to go."""
ANOTHER = SimpleNamespace(pod="gateway-1", pool="gateway")
FOREVER = 600.0


@dataclass
class Story:
    """Seconds since the gateway was asked to go. `idle_before`: without a request until then. `running`: when its last request ends.
    `requests`: short ones that come later. `another`: when another gateway is ready. `delivered`: from when to when clients read the
    rest of the answers, a byte each time.
    """

    idle_before: float = 60.0
    running: float = 0.0
    requests: tuple[float, ...] = ()
    another: tuple[float, float] = (-60.0, FOREVER)
    delivered: tuple[float, float] = (0.0, 0.0)
    stalled: bool = False
    expects_another: bool = True
    now: float = field(default=0.0, init=False)

    def ends(self) -> float:
        """When it ends."""
        gateway = SimpleNamespace(pod="gateway-0", last_request=ASKED - self.idle_before, running=0)
        gateway.directory = SimpleNamespace(pods=self._ready)
        leave = Leave(
            cast(Any, gateway), self._undelivered, self.expects_another, clock=lambda: ASKED + self.now
        )
        while self.now < FOREVER:
            gateway.running = int(self.now < self.running)
            if came := [at for at in self.requests if at <= self.now]:
                gateway.last_request = ASKED + came[-1]
            if leave.may_end():
                return self.now
            self.now += STEP_SECONDS
        return FOREVER

    def _ready(self) -> list[SimpleNamespace]:
        pods = [
            SimpleNamespace(pod="gateway-0", pool="gateway"),
            SimpleNamespace(pod="decode-0", pool="decode"),
        ]
        since, until = self.another
        return [*pods, ANOTHER] if since <= self.now < until else pods

    def _undelivered(self) -> int:
        _, until = self.delivered
        if self.stalled:
            return 1
        return max(0, int((until - self.now) / STEP_SECONDS))


ALONE = (FOREVER, FOREVER)


@pytest.mark.parametrize(
    ("story", "ends"),
    [
        pytest.param(Story(), QUIET_SECONDS, id="another serves"),
        pytest.param(Story(running=40), 40, id="a request is in flight"),
        pytest.param(Story(requests=(1, 2, 3)), 3 + QUIET_SECONDS, id="clients still come"),
        pytest.param(Story(delivered=(0, 50)), 50, id="clients read slowly"),
        pytest.param(
            Story(delivered=(0, 50), requests=(49,)), 49 + QUIET_SECONDS, id="a request comes meanwhile"
        ),
        pytest.param(Story(delivered=(0, 10), running=30), 30, id="both, the request is longer"),
        pytest.param(Story(stalled=True), QUIET_SECONDS + STALLED_SECONDS, id="a client has stopped reading"),
        pytest.param(Story(stalled=True, running=100), 100 + STALLED_SECONDS, id="it stops after a request"),
        pytest.param(Story(another=ALONE), ALONE_SECONDS, id="alone"),
        pytest.param(
            Story(another=ALONE, requests=(10, 20)), 20 + ALONE_SECONDS, id="alone, and clients come"
        ),
        pytest.param(
            Story(another=ALONE, requests=tuple(range(0, 600, 10))),
            MOST_ALONE_SECONDS + QUIET_SECONDS,
            id="alone for ever, and a client comes every ten seconds",
        ),
        pytest.param(
            Story(another=(5, FOREVER), requests=tuple(range(0, 12))),
            5 + TAKEOVER_SECONDS,
            id="another takes over",
        ),
        pytest.param(
            Story(another=(5, 9), requests=tuple(range(0, 12))),
            11 + ALONE_SECONDS,
            id="another has gone before nodes knew it",
        ),
        pytest.param(
            Story(another=(-60, 1), requests=(1,)), 1 + ALONE_SECONDS, id="the other is asked to go too"
        ),
        pytest.param(Story(another=ALONE, expects_another=False), 0, id="nothing replaces it"),
        pytest.param(
            Story(another=ALONE, expects_another=False, idle_before=1), 1, id="nothing replaces it, just used"
        ),
    ],
)
def test_a_gateway_ends_when_nobody_needs_it(story: Story, ends: float) -> None:
    assert story.ends() == ends
