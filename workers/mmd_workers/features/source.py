"""Where the prefill role requests features: from encoder pods, from the tower in the same process, or from either."""

from __future__ import annotations

from typing import Protocol

from mmd_api.contract.errors import DeadlineError, MediaGoneError, MmdError, UnsupportedInputError
from mmd_workers.features.store import FeatureStore
from mmd_workers.wire.messages.message_parts import FeatureRef
from mmd_workers.wire.messages.prefill import GenerateRequest


class FeatureSource(Protocol):
    """A source of features: the queue and encoder pods, or the tower of this process."""

    def request(self, ref: FeatureRef, request: GenerateRequest) -> None:
        """Request the feature; it, or its failure, arrives in the store."""
        ...

    def times(self, feature_id: str) -> dict[str, float]:
        """Unix times of the steps of a feature that has arrived; empty if it was here already.

        `arrived` is among them if another pod encoded the feature; that pod reports how.
        """
        ...


class LocalFeatureSource(FeatureSource, Protocol):
    """The tower of this process."""

    def has(self, feature_id: str) -> bool:
        """Whether the feature is in the tower's cache, or is being made."""
        ...


class NoMediaSource:
    """No source, for a model of text alone: gateways reject its requests with media."""

    def __init__(self, store: FeatureStore) -> None:
        self._store = store

    def request(self, ref: FeatureRef, _request: GenerateRequest) -> None:
        """Reject the medium."""
        error = UnsupportedInputError(f"this model does not accept {ref.modality}; use another model")
        self._store.fail(ref.feature_id, error)

    def times(self, _feature_id: str) -> dict[str, float]:
        """No times."""
        return {}

    def has(self, _feature_id: str) -> bool:
        """No feature."""
        return False


class EitherSource:
    """The tower of this process for small media and features that it has, encoder pods for the rest.

    The router decides for which requests the tower encodes small media.
    """

    def __init__(self, local: LocalFeatureSource, remote: FeatureSource) -> None:
        self._local = local
        self._remote = remote

    def request(self, ref: FeatureRef, request: GenerateRequest) -> None:
        """See `FeatureSource.request`."""
        is_local = request.encode_here or self._local.has(ref.feature_id)
        (self._local if is_local else self._remote).request(ref, request)

    def times(self, feature_id: str) -> dict[str, float]:
        """See `FeatureSource.times`."""
        return self._local.times(feature_id) or self._remote.times(feature_id)


class EncodeError(MmdError):
    """A medium was given up; code, status and remedy come from the encoder's error.

    `retryable` is about placing the whole request anew. If the gateway that held the bytes no longer has them, the request can still be
    served: placed again, it brings its own. A deadline here belongs to a job or to another request that shares the feature; the request's
    own is watched elsewhere. `feature_id`: id of the medium's feature if another try at encoding it is of no use; otherwise empty.
    """

    def __init__(self, error: MmdError, *, retryable: bool, feature_id: str = "") -> None:
        super().__init__(error.message)
        self.feature_id = feature_id
        self.code, self.status, self.remedy = error.code, error.status, error.remedy
        self.retryable = retryable or isinstance(error, MediaGoneError | DeadlineError)
