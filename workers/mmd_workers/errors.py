"""Errors that cross a room's wall: each has a stable code, says what is wrong and what to do, and whether a retry can help."""

from __future__ import annotations


class MmdError(Exception):
    """Base of every error this project raises on purpose. `code` is stable; the message names the remedy."""

    code = "internal"
    retryable = False

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class UnsupportedInputError(MmdError):
    """The model or the policy does not take this input (modality, size, count)."""

    code = "unsupported_input"


class BadMediaError(MmdError):
    """The bytes are not what they claim to be, or exceed a limit: the job is poison and must not be retried."""

    code = "bad_media"


class FetchError(MmdError):
    """A media URL could not be fetched: refused address, status, size, time."""

    code = "fetch_failed"


class CountMismatchError(MmdError):
    """A worker arrived at another number of tokens than the layout: the request fails, nothing is guessed."""

    code = "count_mismatch"


class UnsupportedModelError(MmdError):
    """This architecture cannot be served; the message says why."""

    code = "unsupported_model"


class CapacityError(MmdError):
    """The request can never fit (longer than the model's context or than the whole KV pool)."""

    code = "too_large"


class OverloadedError(MmdError):
    """No room now; try elsewhere or later."""

    code = "overloaded"
    retryable = True


class LinkError(MmdError):
    """A transfer to a peer failed: deadline, lost peer, digest or order. The pair must be made anew."""

    code = "link_failed"
    retryable = True


class PeerLostError(MmdError):
    """A worker that held the request is gone."""

    code = "peer_lost"
    retryable = True


class DeadlineError(MmdError):
    """The request's deadline passed."""

    code = "deadline_exceeded"


class BackendUnavailableError(LinkError):
    """This machine cannot run the configured KV backend; trying again does not help."""

    code = "kv_backend_unavailable"
    retryable = False


class LeaseError(MmdError):
    """A lease on KV blocks is over: its blocks may belong to another sequence. The request must be offered again."""

    code = "lease_ended"
    retryable = True
