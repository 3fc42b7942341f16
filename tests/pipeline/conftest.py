"""One running deployment of the demo model for all tests that only ask it questions, and a random checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.oracles import random_model
from support.serving.local_deployment import ROOT, Deployment


@pytest.fixture(scope="package", autouse=True)
def _state_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Running deployments of tests are not those of the person who runs them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MMD_STATE_DIR", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="package")
def demo() -> Iterator[Deployment]:
    """examples/demo.yaml: 1 encoder, 1 prefill, 2 decode; 2 gateways. It ends with this folder."""
    with Deployment(ROOT / "examples" / "demo.yaml") as deployment:
        yield deployment


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with random weights, the same ones whoever makes it."""
    folder = tmp_path_factory.mktemp("models") / "qwen2_5_vl"
    random_model.build(
        "qwen2_5_vl", folder, seed=3, size=random_model.Size(hidden=128)
    )  # vLLM: heads of 32 or more
    return folder
