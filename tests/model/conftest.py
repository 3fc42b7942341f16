from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from support.oracles import random_model


@pytest.fixture(scope="session", autouse=True)
def _quiet() -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a random checkpoint of an architecture, made once per session."""
    made: dict[str, Path] = {}

    def get(arch: str) -> Path:
        if arch not in made:
            made[arch] = random_model.build(arch, tmp_path_factory.mktemp("models") / arch)
        return made[arch]

    return get
