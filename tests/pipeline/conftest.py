"""One running deployment of the demo model for all tests that only ask it questions."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from local_deployment import ROOT, Deployment


@pytest.fixture(scope="session", autouse=True)
def _state_directory(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Running deployments of tests are not those of the person who runs them."""
    os.environ["MMD_STATE_DIR"] = str(tmp_path_factory.mktemp("state"))


@pytest.fixture(scope="session")
def demo() -> Iterator[Deployment]:
    """examples/demo.yaml: 1 encoder, 1 prefill, 2 decode."""
    with Deployment(ROOT / "examples" / "demo.yaml") as deployment:
        yield deployment
