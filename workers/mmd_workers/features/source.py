"""Where the prefill role requests features: from encoder pods, or from the tower in the same process."""

from __future__ import annotations

from typing import Protocol

from mmd_api.contract.errors import DeadlineError, MediaGoneError, MmdError
from mmd_workers.wire.messages import FeatureRef, GenerateRequest


class FeatureSource(Protocol):
    """Where features come from: the queue and an encoder pod, or the tower of this process."""

    encodes_here: bool  # else the encoding pod reports that phase

    def request(self, ref: FeatureRef, request: GenerateRequest) -> None:
        """Request the feature; it, or its failure, arrives in the store."""
        ...

    def times(self, feature_id: str) -> dict[str, float]:
        """Unix times of the steps of a feature that has arrived; empty when it was here already."""
        ...


class EncodeError(MmdError):
    """A medium was given up; code, status and remedy are those of the encoder's error.

    `retryable` is about the request, placed anew as a whole. When the gateway that held the bytes is done with them the request can still be served: placed again, it brings its own.
    A deadline here is that of a job or of another request that shares the feature; the request's own is watched elsewhere.
    """

    def __init__(self, error: MmdError, *, retryable: bool) -> None:
        super().__init__(error.message)
        self.code, self.status, self.remedy = error.code, error.status, error.remedy
        self.retryable = retryable or isinstance(error, MediaGoneError | DeadlineError)
