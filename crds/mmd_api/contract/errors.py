"""The one table of errors: each type has a stable code, the HTTP status that clients see, whether a retry can help, and a remedy.

An error that one process raises and another reads is defined here, so that every process knows all of them. The message of an error
names the object, the fact with its numbers, and the remedy for this case; `remedy` is the general one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping


class MmdError(Exception):
    """A defect, or a failure without its own code. Base of every error that this project raises on purpose.

    A subclass with a `code` is a row of the table, and then no other field of the row is inherited. `status` None: it is between
    pods alone, and a client that it reaches all the same sees `internal`.
    """

    code: str = "internal"
    status: int | None = 500
    retryable: bool = False
    remedy: str = "check the end of the failed pod's log"

    def __init_subclass__(
        cls,
        *,
        code: str | None = None,
        status: int | None = None,
        retryable: bool = False,
        remedy: str = "",
    ) -> None:
        super().__init_subclass__()
        if code is not None:
            cls.code, cls.status, cls.retryable, cls.remedy = code, status, retryable, remedy

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


# --- what clients see -----------------------------------------------------------------------------------------


class UnsupportedInputError(
    MmdError,
    code="unsupported_input",
    status=400,
    remedy="remove the part, or send a medium that the model accepts",
):
    """The model or the policy does not accept this input (modality, size, count)."""


class BadMediaError(
    MmdError,
    code="bad_media",
    status=400,
    remedy="send a complete file of a supported format, within the limits of spec.gateway.media",
):
    """The bytes do not match their declared type, or exceed a limit: the job is poison and must not be retried."""


class FetchError(
    MmdError, code="fetch_failed", status=400, remedy="check the URL, or send the file as a data URL"
):
    """A media URL could not be fetched: refused address, status, size or timeout."""


class CapacityError(
    MmdError, code="too_large", status=400, remedy="shorten the request, or give the pods more memory for KV"
):
    """The request can never fit (longer than the model's context or than the whole KV pool)."""


class UnprocessableMediumError(
    MmdError, code="unprocessable_medium", status=422, remedy="send a smaller or re-encoded file"
):
    """Several encoders tried this medium, each on its own, and all failed on it: the job is poison and must not be retried."""


class OverloadedError(
    MmdError,
    code="overloaded",
    status=503,
    retryable=True,
    remedy="retry after the time in retry-after, or add replicas",
):
    """No capacity now; try another pod, or retry after `retry_after_seconds` if the pod that refused can estimate it."""

    def __init__(self, message: str, *, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class PeerLostError(
    MmdError,
    code="peer_lost",
    status=503,
    retryable=True,
    remedy="retry; if it persists, check the Events of the pods and of NATS",
):
    """A worker that held the request is lost."""


class LinkError(
    MmdError,
    code="link_failed",
    status=503,
    retryable=True,
    remedy="retry; if it persists, check the network between prefill and decode pods",
):
    """A transfer to a peer failed: deadline, lost peer, digest or order. The pair must reconnect."""


class DeadlineError(
    MmdError,
    code="deadline_exceeded",
    status=504,
    remedy="request fewer tokens, or raise x-request-timeout or spec.gateway.requestTimeoutSeconds",
):
    """The request deadline was exceeded."""


class StepFailedError(
    MmdError,
    code="step_failed",
    status=500,
    remedy="check the pod's log; do not send the same request again",
):
    """The model raised an error for this sequence, also when it ran alone: it would break the next batch as well."""


class BadLogitsError(
    MmdError,
    code="bad_logits",
    status=500,
    remedy="check the weights and spec.model.dtype; do not send the same request again",
):
    """The model returned no finite logit for this sequence: its weights or its features are invalid."""


class GrammarFailedError(
    MmdError,
    code="grammar_failed",
    status=422,
    remedy="simplify the schema or grammar: shorter patterns, fewer optional properties and alternatives",
):
    """The grammar of an answer cannot be compiled or followed; only its request fails."""


class CountMismatchError(
    MmdError, code="count_mismatch", status=500, remedy="report the model and the request: this is a defect"
):
    """A worker computed a different number of tokens than the prompt layout: the request fails; nothing is guessed."""


# --- what the gateway answers before any pod has the request ---------------------------------------------------


class InvalidJsonError(
    MmdError, code="invalid_json", status=400, remedy="send valid JSON, within the limits of docs/api.md"
):
    """The body is not JSON, is nested too deep, has too many elements, or has a number with too many digits."""


class InvalidTypeError(
    MmdError, code="invalid_type", status=400, remedy="send the type of docs/api.md for the field in `param`"
):
    """A field has a value of another JSON type."""


class InvalidValueError(
    MmdError, code="invalid_value", status=400, remedy="send a value of docs/api.md for the field in `param`"
):
    """A field has a value that is out of range, or that contradicts another field."""


class UnknownParameterError(
    MmdError, code="unknown_parameter", status=400, remedy="remove the field in `param`"
):
    """The body has a field that does not exist."""


class MissingParameterError(
    MmdError, code="missing_required_parameter", status=400, remedy="add the field in `param`"
):
    """The body lacks a required field."""


class UnsupportedParameterError(
    MmdError,
    code="unsupported_parameter",
    status=400,
    remedy="leave the field in `param` out; the message has an alternative if there is one",
):
    """A field of the OpenAI API that this server does not support, with a value other than its default."""


class TooManyMediaError(
    MmdError,
    code="too_many_media",
    status=400,
    remedy="send fewer media, or raise spec.gateway.media.maxItemsPerRequest",
):
    """The request has more media than one request may have."""


class ContextLengthError(
    MmdError,
    code="context_length_exceeded",
    status=400,
    remedy="shorten the prompt, or raise spec.model.maxModelLen",
):
    """The prompt leaves no room for an answer in the model's context."""


class InvalidApiKeyError(
    MmdError,
    code="invalid_api_key",
    status=401,
    remedy="send a valid key as `Authorization: Bearer KEY` or `x-api-key: KEY`; `mmd create-key` makes one",
):
    """The request has no API key, a malformed one, or one that is unknown or has expired."""


class KeysUnavailableError(
    MmdError,
    code="keys_unavailable",
    status=503,
    retryable=True,
    remedy="fix the Secret that spec.gateway.auth.keysSecret names; the gateway's log has the reason",
):
    """The gateway has had no valid file of API keys since it started: it lets no request in."""


class InvalidTokenError(
    MmdError,
    code="invalid_token",
    status=401,
    remedy="get a new token from the issuer, for the audience of spec.gateway.auth.oidc, and send it as `Authorization: Bearer TOKEN`",
):
    """The request has a JSON Web Token that is malformed, has expired, or was not signed by the issuer for this gateway."""


class UnknownTenantError(
    MmdError,
    code="unknown_tenant",
    status=403,
    remedy="add the tenant that the token names to keys.yaml, or set spec.gateway.auth.oidc.defaultTenant",
):
    """The token is valid, and its claim names no tenant of this gateway."""


class IssuerUnavailableError(
    OverloadedError,
    code="issuer_unavailable",
    status=503,
    retryable=True,
    remedy="retry; if it persists, check spec.gateway.auth.oidc.issuer and the network to it",
):
    """The gateway cannot check the token yet: it lacks the signing keys of the issuer, or the one of this token, which may be new. API keys work."""


class ForbiddenError(
    MmdError,
    code="forbidden",
    status=403,
    remedy="call the server as localhost or 127.0.0.1, from this machine",
):
    """A server on a loopback address was called under another name, or by a page of another site."""


class ModelNotFoundError(
    MmdError, code="model_not_found", status=404, remedy="use a model that /v1/models lists"
):
    """The gateway does not serve this model."""


class NotFoundError(MmdError, code="not_found", status=404, remedy="check the path in docs/api.md"):
    """No such path or recent request; with status 405, no such method of the path."""


class MethodNotAllowedError(NotFoundError):
    """The path exists, for another method."""

    status = 405


class FileNotFoundInStoreError(
    MmdError, code="file_not_found", status=404, remedy="upload the file again with POST /v1/files"
):
    """No uploaded file has this id: it never had, it has expired or been deleted, or it belongs to another tenant."""


class FileQuotaError(
    MmdError,
    code="file_quota_exceeded",
    status=413,
    remedy="delete files, or raise the limit of spec.gateway.files that the message names",
):
    """The files of the tenant, or of all tenants, leave no room for this one."""


class IdempotencyKeyReusedError(
    MmdError,
    code="idempotency_key_reused",
    status=422,
    remedy="send the same body as before, or another idempotency-key",
):
    """The idempotency key stands for a request with another body."""


class AnswerGoneError(
    MmdError,
    code="answer_gone",
    status=410,
    remedy="send the request with another idempotency-key, and without last-event-id",
):
    """The answer that a request repeats or resumes is not retained, or not from there on."""


class RequestTimeoutError(
    MmdError,
    code="request_timeout",
    status=408,
    remedy="send the body faster, or raise spec.gateway.requestTimeoutSeconds",
):
    """The body arrived too slowly."""


class RequestTooLargeError(
    MmdError,
    code="request_too_large",
    status=413,
    remedy="send media by URL, or raise spec.gateway.maxBodyMebibytes",
):
    """The body and its media are larger than one request may be."""


class UnsupportedMediaTypeError(
    MmdError,
    code="unsupported_media_type",
    status=415,
    remedy="send application/json without content-encoding",
):
    """The body is not sent as JSON, or is compressed."""


class TooManyRequestsError(
    OverloadedError,
    code="too_many_requests",
    status=429,
    retryable=True,
    remedy="retry after the time in retry-after, or raise spec.gateway.maxConcurrentRequests",
):
    """The gateway runs as many requests as it may, or this tenant's share of them and of the work that may wait."""


class RateLimitError(
    OverloadedError,
    code="rate_limit_exceeded",
    status=429,
    retryable=True,
    remedy="retry after the time in retry-after, or raise the tenant's limits in keys.yaml",
):
    """The tenant has as many requests as its limits allow."""


class ClientGoneError(
    MmdError, code="client_gone", remedy="none: nobody waits for the answer; check the timeouts of the client"
):
    """The client closed the connection before its answer was complete."""


# --- between pods: the request goes on elsewhere ---------------------------------------------------------------


class PreemptedError(
    MmdError,
    code="preempted",
    retryable=True,
    remedy="if it happens often, give decode more memory for KV or more replicas",
):
    """The KV pool was full and this was the newest sequence: place it again, tokens so far included."""


class SuspectError(
    MmdError,
    code="engine_failed",
    retryable=True,
    remedy="none: the request is placed on another pod; check the end of the failed pod's log",
):
    """The engine failed in a step that ran this request and others. It is placed again, and ends with the third engine that does."""


class LeaseError(
    MmdError,
    code="lease_ended",
    retryable=True,
    remedy="if it happens often, raise spec.transfer.kv.leaseSeconds",
):
    """A lease on KV blocks has ended: its blocks may belong to another sequence. The request must be offered again."""


class DrainingError(
    MmdError, code="draining", retryable=True, remedy="none: the request is placed on another pod"
):
    """The pod is draining and accepts no new work. It is not full: another pod takes its place."""


class RequestCancelledError(
    MmdError,
    code="cancelled",
    retryable=True,
    remedy="none: the client disconnected, or another pod has the request",
):
    """The attempt was cancelled before this message about it arrived."""


class LayoutMismatchError(
    MmdError,
    code="layout",
    retryable=True,
    remedy="report it: pods of one revision have the same KV layout and backend, so this is a defect",
):
    """The KV layouts or backends of two pods differ: they cannot exchange KV."""


class DrainedError(
    MmdError, code="drained", retryable=True, remedy="none: the request is placed on another pod"
):
    """The pod that was processing this request is draining: place it again, tokens so far included."""


class FeatureLostError(
    MmdError, code="feature_lost", retryable=True, remedy="none: the feature is requested again"
):
    """A feature that was to be shared has been lost."""


class MediaGoneError(MmdError, code="media_gone", remedy="none: a retried request sends its media again"):
    """The gateway no longer holds the medium: its request has ended, or the gateway was restarted."""


class ReceiverGoneError(MmdError, code="receiver_gone", remedy="none: the job is dropped"):
    """No request needs this feature any more."""


class WireError(
    MmdError,
    code="bad_message",
    remedy="report it: pods of one revision run the same code, so this is a defect",
):
    """A message is invalid for its subject: malformed, of the wrong type, nested too deeply or too large."""


class TooLongError(WireError):
    """A message exceeds one NATS message."""


# --- the pod ends or does not start ----------------------------------------------------------------------------


class EngineDeadError(
    MmdError, code="engine_dead", retryable=True, remedy="check the pod's log; the pod restarts"
):
    """The engine's thread has ended; this process must be restarted, and its requests go to other pods."""


class DeviceLostError(
    MmdError, code="device_lost", retryable=True, remedy="check the node's GPU; the pod restarts"
):
    """The accelerator no longer works in this process: the pod ends, and its work goes to other pods."""


class MemoryBudgetError(
    MmdError, code="memory_budget", remedy="lower spec.model.maxModelLen, or give the pool more memory for KV"
):
    """This pod's memory cannot hold the KV of one request of spec.model.maxModelLen."""


class UnsupportedModelError(MmdError, code="unsupported_model", remedy="use a model of docs/models.md"):
    """This architecture cannot be served; the message contains the reason."""


class EngineSettingsError(
    MmdError, code="engine_settings", remedy="fix the field of spec.engine that the message names"
):
    """The engine refuses its settings, or cannot run this model with them here; the message contains its own reason."""


class RevisionMismatchError(
    MmdError, code="revision_mismatch", remedy="name the image by its digest and the model by its commit"
):
    """This process runs code or weights other than those that its pipeline revision is pinned to."""


class BackendUnavailableError(
    LinkError,
    code="kv_backend_unavailable",
    remedy="set spec.transfer.kv.backend to Gloo, or install NCCL or NIXL in the image",
):
    """This machine cannot run the configured KV backend; trying again does not help."""


def _types() -> Iterator[type[MmdError]]:
    """Every type of this module that is a row, the base first."""
    rows = (kind for kind in globals().values() if isinstance(kind, type) and issubclass(kind, MmdError))
    return (kind for kind in rows if "code" in vars(kind))


ERRORS: Mapping[str, type[MmdError]] = {kind.code: kind for kind in _types()}
"""The table by code. A code from outside that is not here must not become a label of a metric."""


def error_of(code: str, message: str) -> MmdError:
    """The error that another process reported as data; `internal` for a code of another version."""
    return ERRORS.get(code, MmdError)(message)
