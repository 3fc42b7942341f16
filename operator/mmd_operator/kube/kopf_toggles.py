"""Keeps the time of a start in proportion to the number of objects that are listed.

kopf keeps a toggle for each listed object, and each object's worker waits until all toggles are gone. Its set of toggles wakes every waiter
for each toggle that comes or goes, so that N objects cost N² wake-ups before the first handler is called. kopf has no setting for this: its
set is replaced while the operator runs by one that wakes waiters when what they wait for has changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from kopf._cogs.aiokits import aiotoggles


class CalmToggleSet(aiotoggles.ToggleSet):
    """A set of toggles that wakes its waiters only when it turns on or off as a whole."""

    async def make_toggle(self, __val: bool = False, *, name: str | None = None) -> aiotoggles.Toggle:
        """A toggle of the set, in a given state."""
        toggle = aiotoggles.Toggle(__val, name=name, condition=self._condition)
        was = self.is_on()
        self._toggles.add(toggle)
        await self._tell_since(was)
        return toggle

    async def drop_toggle(self, toggle: aiotoggles.Toggle) -> None:
        """Take a toggle out of the set, if it is there."""
        await self.drop_toggles([toggle])

    async def drop_toggles(self, toggles: Iterable[aiotoggles.Toggle]) -> None:
        """Take toggles out of the set, those that are there."""
        was = self.is_on()
        self._toggles.difference_update(toggles)
        await self._tell_since(was)

    async def _tell_since(self, was: bool) -> None:
        if self.is_on() != was:
            async with self._condition:
                self._condition.notify_all()


@contextmanager
def calm_toggles() -> Iterator[None]:
    """Let kopf make its sets of toggles of this kind."""
    module: Any = aiotoggles
    original = module.ToggleSet
    module.ToggleSet = CalmToggleSet
    try:
        yield
    finally:
        module.ToggleSet = original
