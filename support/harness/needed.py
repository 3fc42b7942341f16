"""What tests need and a developer's machine may lack.

There such tests are skipped; in continuous integration they fail.
"""

from __future__ import annotations

import os
from typing import NoReturn

import pytest

NO_COMPILER = "no C++ compiler here: apt-get install g++"
CI = bool(os.environ.get("CI"))


def lacking(reason: str) -> NoReturn:
    """End this test, because the machine lacks something. `reason` names it and where to get it."""
    if CI:
        pytest.fail(reason)
    pytest.skip(reason)


def needs(found: object, reason: str) -> pytest.MarkDecorator:
    """The mark of tests that need something. `found`: whether the machine has it."""
    return pytest.mark.skipif(not found and not CI, reason=reason)
