"""A rank of tensor parallelism: vLLM's worker in a process of its own, which lives exactly as long as the pod's process.

vLLM's parent process learns only that a rank did not start. So a rank leaves the reason in a file.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

from vllm.platforms import current_platform

from mmd_workers.vllm_engine.reasons import reason

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as DeviceWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as DeviceWorker

FAULT_FILE = "MMD_VLLM_RANK_FAULT"  # environment variable of the ranks: where one writes why it cannot start


class RankError(Exception):
    """A rank did not start; the message is its reason."""


@contextmanager
def starting(threads: int, ranks: int) -> Iterator[None]:
    """Start ranks inside, which share the pod's threads.

    Raises:
        RankError: in place of what vLLM raises, if a rank gave a reason.
    """
    with tempfile.TemporaryDirectory(prefix="mmd-ranks-") as folder:
        file = Path(folder) / "fault"
        own = {FAULT_FILE: str(file), "OMP_NUM_THREADS": str(max(1, threads // ranks))}
        before = {name: os.environ.get(name) for name in own}
        os.environ.update(own)
        try:
            yield
        except Exception as error:
            if file.exists():
                raise RankError(file.read_text()) from None
            raise error from error.__cause__
        finally:
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value


def _explains(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        try:
            return method(*arguments, **named)
        except Exception as error:
            if (file := os.environ.get(FAULT_FILE)) is not None:
                part = Path(f"{file}.{os.getpid()}")
                part.write_text(reason(error))
                part.rename(file)
            raise

    return wrapped


class Rank(DeviceWorker):
    """vLLM's worker for this device."""

    @_explains
    def __init__(self, *arguments: Any, **named: Any) -> None:
        os.setsid()  # signals to the pod's process group are for the pod, which drains first; this process ends when vLLM's pipe to it closes
        super().__init__(*arguments, **named)

    @_explains
    def init_device(self) -> None:
        """Join the other ranks."""
        super().init_device()

    @_explains
    def load_model(self, *arguments: Any, **named: Any) -> None:
        """Make this rank's part of the model, and read its weights."""
        super().load_model(*arguments, **named)
