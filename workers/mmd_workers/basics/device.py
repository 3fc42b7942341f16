"""Finds out from an exception whether the accelerator is lost, and splits a failing batch until only its culprit fails.

Knows torch, but no model and no network.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from mmd_api.contract.errors import DeviceLostError, MmdError
from mmd_api.contract.pools import PoolName

Item = TypeVar("Item")
Result = TypeVar("Result")

log = logging.getLogger(__name__)


def chosen_device(gpus: int, pool: PoolName) -> torch.device:
    """The accelerator if there is one, otherwise the CPU. `gpus`: number of GPUs that Kubernetes gave this pod.

    Raises:
        DeviceLostError: none of the GPUs works: the pod must not serve from its CPU instead.
    """
    if torch.cuda.is_available():
        return torch.device("cuda")
    if gpus:
        raise DeviceLostError(
            f"spec.{pool}.gpus is {gpus}, but torch {torch.__version__} found no CUDA device in this pod; check the node's "
            f"driver and device plugin, or set spec.{pool}.gpus to 0 to serve from the CPU"
        )
    return torch.device("cpu")


def check_device(error: BaseException, device: torch.device) -> None:
    """Find out whether `error` leaves the device usable. Most CUDA errors do not: after an illegal access every later call fails.

    A CUDA device is asked whatever the error is, since code may raise another one while it handles the device's own. On other devices,
    the device's own error may be the cause of `error`.

    Raises:
        DeviceLostError: the device is not usable; only a new process can use it again.
    """
    cause = error
    while not isinstance(cause, RuntimeError | DeviceLostError) and cause.__cause__ is not None:
        cause = cause.__cause__
    if isinstance(cause, DeviceLostError):
        raise cause
    if isinstance(cause, torch.OutOfMemoryError):
        return
    reason = _first_line(cause) if isinstance(cause, RuntimeError) else ""
    if isinstance(cause, torch.AcceleratorError) and device.type != "cuda":
        raise _lost(device, reason) from error
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
        torch.ones(1, device=device).add_(1).item()
    except torch.OutOfMemoryError:
        return
    except RuntimeError as probe_error:
        raise _lost(device, reason or _first_line(probe_error)) from error


def _lost(device: torch.device, reason: str) -> DeviceLostError:
    return DeviceLostError(
        f"the accelerator of this process ({device}) failed and cannot be used again: {reason}; the process exits and its work is "
        "redistributed. If this repeats on one node, check the node's GPU (dmesg: NVRM Xid) and cordon it"
    )


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def run_isolating(
    items: Sequence[Item],
    run: Callable[[Sequence[Item]], Sequence[Result]],
    device: torch.device,
) -> list[Result | Exception]:
    """Call `run(items)`; if it raises, run each half, down to single items, whose error is their result.

    So a batch that is too large for the memory runs in parts, and an item that breaks the model fails alone. At most
    2 · items - 1 runs.

    Raises:
        DeviceLostError: the accelerator is gone; no result is usable.
    """
    try:
        return list(run(items))
    except Exception as error:
        check_device(error, device)
        failure = error
        if len(items) == 1 and not isinstance(error, MmdError):
            log.exception("an item of a batch failed alone")
    # Outside the handler: the frames of the failed run hold its tensors, and the halves need the memory.
    traceback.clear_frames(failure.__traceback__)
    failure.with_traceback(None)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    if len(items) <= 1:
        return [failure] * len(items)
    log.warning("a batch of %d failed (%s); running its halves separately", len(items), _first_line(failure))
    middle = len(items) // 2
    return [
        result for half in (items[:middle], items[middle:]) for result in run_isolating(half, run, device)
    ]
