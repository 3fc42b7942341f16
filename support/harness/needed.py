"""What tests need of a machine and a developer's may lack: there they are skipped, in continuous integration they fail."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest

NO_COMPILER = "no C++ compiler here: apt-get install g++"
CI = bool(os.environ.get("CI"))


def lacking(reason: str) -> NoReturn:
    """End this test: the machine lacks something, and `reason` names it and where it is from."""
    if CI:
        pytest.fail(reason)
    pytest.skip(reason)


def needs(found: object, reason: str) -> pytest.MarkDecorator:
    """The mark of tests that need what was `found`, or was not."""
    return pytest.mark.skipif(not found and not CI, reason=reason)
