"""The error of a request in whose step an engine failed. Independent of engines."""

from __future__ import annotations

import torch

from mmd_api.contract.errors import MmdError, OverloadedError, StepFailedError, SuspectError

MOST_SUSPICIONS = 2
"""Engine failures in shared steps; then a request is not placed again."""


def charged(engine_failures: int, *, alone: bool) -> bool:
    """Return whether a request of a failed step must not be placed again, since another engine would fail too.

    `engine_failures`: engines that failed in its steps before. `alone`: the step ran no other request.
    """
    return alone or engine_failures >= MOST_SUSPICIONS


def suspicion(engine: str, engine_failures: int, num_requests: int, error: Exception) -> MmdError:
    """Return the error to report for a request of a step of `num_requests` in which the engine failed.

    `engine`: its name in the message. No request is the cause of exhausted memory.
    """
    words = f"{type(error).__name__}: {str(error)[:300]}"
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return OverloadedError(
            f"{engine} ran out of memory in a step of {num_requests} requests ({words}); lower spec.prefill.chunkTokens or the KV "
            "cache's share of memory"
        )
    if charged(engine_failures, alone=num_requests == 1):
        return StepFailedError(f"{engine} failed on this request: {words}")
    return SuspectError(
        f"{engine} failed in a step of {num_requests} requests, of which this was one: {words}"
    )
