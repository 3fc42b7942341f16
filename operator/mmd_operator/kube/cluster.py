"""Client of the API server: apply, read, scale, delete, report. Knows the Kubernetes client, and nothing of what deployments mean."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import aiohttp
from kubernetes.aio.client import ApiClient
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.dynamic import DynamicClient

from mmd_api.contract.annotations import DRAIN_ANNOTATION
from mmd_api.pool_resource import POOL_KIND, POOL_PLURAL
from mmd_api.resource import API_VERSION, GROUP, KIND, PLURAL, VERSION
from mmd_operator.kube.metrics import OperatorMetrics
from mmd_operator.kube.pass_places import PassPlaces
from mmd_operator.observed.observed import FIELD_MANAGER, SCALER_FIELD_MANAGER, unix_seconds
from mmd_operator.observed.problems import WEBHOOK_FAILED
from mmd_operator.resources.exposure import (
    GATEWAY_API_GROUP,
    GATEWAY_API_VERSION,
    HTTP_ROUTES,
    INFERENCE_GROUP,
    INFERENCE_POOLS,
    INFERENCE_VERSION,
)
from mmd_operator.resources.naming import Manifest
from mmd_operator.resources.workload_kinds import LWS_GROUP, LWS_PLURAL, LWS_VERSION

logger = logging.getLogger(__name__)

REQUEST_SECONDS = 30.0
PASSES_AT_ONCE = 16
"""Concurrent passes over all deployments, of which one namespace has half: enough to keep the API server busy, few enough to renew the lease
while hundreds of them start."""
APPLY_PATCH = "application/apply-patch+yaml"
MERGE_PATCH = "application/merge-patch+json"
JSON_PATCH = "application/json-patch+json"
METADATA = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
MAX_RETRY_AFTER_SECONDS = 300.0
PAGE_OBJECTS = 500
MAX_PAGES = 2000
MAX_WARNING_PAGES = 20
"""Pages of warnings read about one object. Events expire within hours, so no object is expected to have more."""
MAX_RECORDED_PAGES = 4
"""Pages of recorded specs read for one deployment. The operator keeps less than one page."""
MAX_WARNINGS = 20
METADATA_LIST = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
NOT_OF_SCHEMA = "failed to create typed patch object"
_UNDECLARED = re.compile(r"(\.status\.\S+): field not declared in schema")
_UNSUPPORTED_CONDITION = re.compile(r'status\.conditions\[\d+\]\.type: Unsupported value: "(\w+)"')
_ITEM_KEY = re.compile(r"\[[^]]*\]")
"""Key or index of a list item within a field path."""


@dataclass(frozen=True, slots=True)
class Resource:
    """API group, version and plural of a kind, and the URL paths that follow from them."""

    group: str
    version: str
    plural: str

    def path(self, namespace: str, name: str = "", subresource: str = "") -> str:
        """URL path of a collection, an object or a subresource."""
        return "/".join(
            p for p in (self._prefix, "namespaces", namespace, self.plural, name, subresource) if p
        )

    @property
    def everywhere(self) -> str:
        """URL path of the collection across all namespaces."""
        return f"{self._prefix}/{self.plural}"

    @property
    def served_at(self) -> str:
        """URL path of this version of the group. It exists only if the API server serves that version."""
        return self._prefix

    @property
    def api_version(self) -> str:
        """The `apiVersion` of manifests."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def _prefix(self) -> str:
        return f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"


CHILD_KINDS: dict[str, Resource] = {
    "ConfigMap": Resource("", "v1", "configmaps"),
    "PersistentVolumeClaim": Resource("", "v1", "persistentvolumeclaims"),
    "Job": Resource("batch", "v1", "jobs"),
    "Service": Resource("", "v1", "services"),
    "StatefulSet": Resource("apps", "v1", "statefulsets"),
    "LeaderWorkerSet": Resource(LWS_GROUP, LWS_VERSION, LWS_PLURAL),
    "Deployment": Resource("apps", "v1", "deployments"),
    "PodDisruptionBudget": Resource("policy", "v1", "poddisruptionbudgets"),
    "NetworkPolicy": Resource("networking.k8s.io", "v1", "networkpolicies"),
    "Ingress": Resource("networking.k8s.io", "v1", "ingresses"),
    "HTTPRoute": Resource(GATEWAY_API_GROUP, GATEWAY_API_VERSION, HTTP_ROUTES),
    "InferencePool": Resource(INFERENCE_GROUP, INFERENCE_VERSION, INFERENCE_POOLS),
    POOL_KIND: Resource(GROUP, VERSION, POOL_PLURAL),
}
"""Kinds that a deployment may own. The operator watches each kind that the API server serves."""
INSTALLED_BY_USERS = ("LeaderWorkerSet", "HTTPRoute", "InferencePool", POOL_KIND)
"""Child kinds that are not part of Kubernetes."""
PODS = Resource("", "v1", "pods")
SECRETS = Resource("", "v1", "secrets")
CONTROLLER_REVISIONS = Resource("apps", "v1", "controllerrevisions")
EVENTS = Resource("", "v1", "events")
NAMESPACES = Resource("", "v1", "namespaces")
DEPLOYMENTS = Resource(GROUP, VERSION, PLURAL)

UNREACHABLE = (aiohttp.ClientError, TimeoutError, OSError)


class RefusedError(Exception):
    """The API server rejects a request until something changes (400, 403, 404, 422, a failing admission webhook).

    The message is the API server's own.
    """


class NotServedError(RefusedError):
    """The API server does not know the kind: its definition is not installed."""


class BusyError(Exception):
    """A request cannot be served now (409, 429, 5xx, unreachable); retry it later.

    `retry_seconds`: the delay that the API server asked for, if any. `undone`: the API server answered that it changed nothing;
    otherwise the write may have been carried out.
    """

    def __init__(self, message: str, retry_seconds: float | None = None, *, undone: bool = False) -> None:
        super().__init__(message)
        self.retry_seconds = retry_seconds
        self.undone = undone


class ExpiredError(BusyError):
    """The API server has compacted the snapshot of a paged list (410); the pages read so far are unusable."""


@dataclass(frozen=True, slots=True)
class Listing:
    """UIDs of all objects of a kind as of one resource version."""

    uids: frozenset[str]
    version: str


class Cluster:
    """Client of one API server. `api`: a client that sends no write while another process may act (see `serve.api_client`)."""

    def __init__(self, api: ApiClient, metrics: OperatorMetrics) -> None:
        self._dynamic = DynamicClient(api)
        self._metrics = metrics
        self.passes = PassPlaces(PASSES_AT_ONCE)

    async def get(self, kind: str, namespace: str, name: str) -> Manifest | None:
        """Return an object, or None if it does not exist.

        Raises:
            RefusedError, BusyError: see the classes.
        """
        return await self._request("get", CHILD_KINDS[kind].path(namespace, name), absent_is_none=True)

    async def serves(self, resource: Resource) -> bool:
        """Whether the API server knows a kind.

        Raises:
            RefusedError, BusyError: see the classes.
        """
        answer = await self._request("get", resource.served_at, absent_is_none=True) or {}
        return any(served["name"] == resource.plural for served in answer.get("resources") or ())

    async def apply(self, manifest: Manifest, namespace: str) -> Manifest:
        """Apply an owned object server-side, and return the result.

        Raises:
            NotServedError, RefusedError, BusyError: see the classes.
        """
        path = CHILD_KINDS[manifest["kind"]].path(namespace, manifest["metadata"]["name"])
        try:
            return await self._apply(path, manifest, FIELD_MANAGER)
        except BusyError as error:  # a 500, although the user's pod template is at fault
            if NOT_OF_SCHEMA not in str(error):
                raise
            raise RefusedError(str(error)) from error

    async def apply_pool_status(self, namespace: str, name: str, status: Mapping[str, Any]) -> None:
        """Write the status of a MultimodalPool.

        Raises:
            RefusedError, BusyError: see the classes.
        """
        metadata = {"name": name, "namespace": namespace}
        body = {"apiVersion": API_VERSION, "kind": POOL_KIND, "metadata": metadata, "status": status}
        path = CHILD_KINDS[POOL_KIND].path(namespace, name, "status")
        await self._apply(path, body, FIELD_MANAGER)

    async def create_secret(self, manifest: Manifest, namespace: str) -> None:
        """Create a Secret.

        Raises:
            RefusedError, BusyError: also if a Secret of this name exists by now.
        """
        await self._request("post", SECRETS.path(namespace), body=manifest)

    async def secret_metadata(self, namespace: str, name: str) -> Manifest | None:
        """Return the metadata of a Secret, or None if it does not exist.

        The metadata is the answer to an empty patch, since the right to read a Secret would show its values too.
        """
        options: dict[str, Any] = {"content_type": MERGE_PATCH, "header_params": {"Accept": METADATA}}
        path = SECRETS.path(namespace, name)
        secret = await self._request("patch", path, body={}, absent_is_none=True, **options)
        return None if secret is None else dict(secret["metadata"])

    async def patch_secret(
        self, namespace: str, name: str, operations: list[Manifest], resource_version: str
    ) -> None:
        """Change a Secret if it still has this resource version. The answer holds only metadata.

        Raises:
            RefusedError, BusyError: see the classes.
        """
        unchanged_version = {"op": "replace", "path": "/metadata/resourceVersion", "value": resource_version}
        options: dict[str, Any] = {"content_type": JSON_PATCH, "header_params": {"Accept": METADATA}}
        await self._request(
            "patch", SECRETS.path(namespace, name), body=[unchanged_version, *operations], **options
        )

    async def secret_lacks(self, namespace: str, name: str, keys: Sequence[str]) -> list[str]:
        """Return those of `keys` that a Secret lacks.

        A patch that moves each key onto itself changes nothing, and fails if a key is missing (a copy would not). The right to read
        the Secret would show its values too.
        """
        if await self._secret_has(namespace, name, keys):
            return []
        return [key for key in keys if not await self._secret_has(namespace, name, [key])]

    async def _secret_has(self, namespace: str, name: str, keys: Sequence[str]) -> bool:
        moves = [{"op": "move", "from": f"/data/{key}", "path": f"/data/{key}"} for key in keys]
        options: dict[str, Any] = {"content_type": JSON_PATCH, "header_params": {"Accept": METADATA}}
        try:
            await self._request("patch", SECRETS.path(namespace, name), body=moves, **options)
        except RefusedError as error:
            if not isinstance(error.__cause__, ApiException) or error.__cause__.status != 422:
                raise
            return False
        return True

    async def release_replicas(self, kind: str, namespace: str, name: str, replicas: int) -> None:
        """Make the scaler a co-owner of a pool's size.

        An apply that leaves the size out then does not reset it to 1, and the size no longer counts as a surge.

        Raises:
            RefusedError, BusyError: also if the size has changed by now.
        """
        body = {
            "apiVersion": CHILD_KINDS[kind].api_version,
            "kind": kind,
            "metadata": {"name": name, "namespace": namespace},
            "spec": {"replicas": replicas},
        }
        path = CHILD_KINDS[kind].path(namespace, name)
        await self._apply(path, body, SCALER_FIELD_MANAGER, force=False)

    async def scale(
        self, kind: str, namespace: str, name: str, replicas: int, field_manager: str = SCALER_FIELD_MANAGER
    ) -> None:
        """Set the size of a workload through `/scale`."""
        await self._request(
            "patch",
            CHILD_KINDS[kind].path(namespace, name, "scale"),
            body={"spec": {"replicas": replicas}},
            content_type=MERGE_PATCH,
            field_manager=field_manager,
        )

    async def ask_to_drain(self, namespace: str, pod: str, uid: str, now: datetime) -> None:
        """Ask a worker's pod to drain, if it still has this UID."""
        body = {
            "metadata": {"uid": uid, "annotations": {DRAIN_ANNOTATION: now.isoformat(timespec="seconds")}}
        }
        await self._request(
            "patch", PODS.path(namespace, pod), body=body, content_type=MERGE_PATCH, absent_is_none=True
        )

    async def is_terminating(self, namespace: str) -> bool:
        """Whether a namespace is being deleted or is gone."""
        path = f"{NAMESPACES.everywhere}/{namespace}"
        answer = await self._request("get", path, absent_is_none=True)
        return answer is None or "deletionTimestamp" in answer["metadata"]

    async def delete_pod(
        self, namespace: str, pod: str, uid: str, grace_seconds: int | None = None, *, leads: bool = False
    ) -> None:
        """Delete the pod with this UID; its controller creates another. A terminating pod accepts a shorter `grace_seconds`.

        `leads`: the pod leads a group, and is gone only after its followers. LeaderWorkerSet before 0.9 would recreate the new group
        when an old follower ends.
        """
        body: dict[str, Any] = {"preconditions": {"uid": uid}}
        if leads:
            body["propagationPolicy"] = "Foreground"
        if grace_seconds is not None:
            body["gracePeriodSeconds"] = grace_seconds
        await self._request("delete", PODS.path(namespace, pod), body=body, absent_is_none=True)

    async def delete(self, kind: str, namespace: str, name: str, uid: str) -> None:
        """Delete the object with this UID. It is no error if the object is gone or another object has its name."""
        body = {"preconditions": {"uid": uid}, "propagationPolicy": "Background"}
        path = CHILD_KINDS[kind].path(namespace, name)
        try:
            await self._request("delete", path, body=body, absent_is_none=True)
        except BusyError as error:
            if not isinstance(error.__cause__, ApiException) or error.__cause__.status != 409:
                raise

    async def set_finalizers(
        self, namespace: str, name: str, finalizers: list[str], resource_version: str
    ) -> None:
        """Write the finalizers of a deployment if it still has this resource version."""
        body = {"metadata": {"finalizers": finalizers, "resourceVersion": resource_version}}
        path = DEPLOYMENTS.path(namespace, name)
        options: dict[str, Any] = {"content_type": MERGE_PATCH, "field_manager": FIELD_MANAGER}
        await self._request("patch", path, body=body, absent_is_none=True, **options)

    async def deployment(self, namespace: str, name: str) -> Manifest | None:
        """Return a deployment as it is now, or None. It is listed by name, since the operator may list but not get."""
        path, selector = DEPLOYMENTS.path(namespace), f"metadata.name={name}"
        answer = await self._request("get", path, field_selector=selector)
        return next(iter((answer or {}).get("items") or []), None)

    async def apply_status(self, namespace: str, name: str, status: Mapping[str, Any]) -> Manifest:
        """Write the status of a deployment, and return it as stored.

        Fields that are left out are removed. So are fields and conditions that the CRD, if it is of another release, does not declare.
        """
        declared: Any = status
        for _ in ("fields", "conditions"):
            try:
                return await self._apply_status(namespace, name, declared)
            except BusyError as error:  # the API server answers with 500
                undeclared = sorted({_ITEM_KEY.sub("", path) for path in _UNDECLARED.findall(str(error))})
                if not undeclared:
                    raise
                for path in undeclared:
                    declared = _without(declared, path.split(".")[2:])
            except RefusedError as error:
                types = sorted(set(_UNSUPPORTED_CONDITION.findall(str(error))))
                if not types:
                    raise
                undeclared = [f"condition {kind}" for kind in types]
                conditions = [c for c in declared["conditions"] if c["type"] not in types]
                declared = {**declared, "conditions": conditions}
            logger.warning("%s/%s: the CRD does not declare %s", namespace, name, ", ".join(undeclared))
        return await self._apply_status(namespace, name, declared)

    async def _apply_status(self, namespace: str, name: str, status: Mapping[str, Any]) -> Manifest:
        body = {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": {"name": name, "namespace": namespace},
            "status": status,
        }
        after = await self._apply(DEPLOYMENTS.path(namespace, name, "status"), body, FIELD_MANAGER)
        return dict(after.get("status", {}))

    async def warnings_about(self, namespace: str, kind: str, name: str) -> list[Manifest]:
        """Return the newest warnings of controllers about an object, as core/v1 Events, oldest first.

        The API server lists Events by name, not by age, so all of them are read to find the newest.
        """
        selector = f"involvedObject.kind={kind},involvedObject.name={name},type=Warning"
        newest: list[Manifest] = []
        pages = self._pages(EVENTS.path(namespace), MAX_WARNING_PAGES, field_selector=selector)
        async for page in pages:
            newest = sorted([*newest, *page["items"]], key=last_seen)[-MAX_WARNINGS:]
        return newest

    async def uids(
        self, resource: Resource, namespace: str | None, selector: str | None, not_older_than: str | None
    ) -> Listing:
        """List the UIDs of all objects of a kind, in one namespace or (None) all, page by page from metadata only.

        `not_older_than`: a resource version that the list must have reached, so that the API server may answer from its watch
        cache; None: the newest.

        Raises:
            RefusedError, BusyError: also if the list could not be read to its end; an incomplete list is never returned.
        """
        path = resource.path(namespace) if namespace else resource.everywhere
        uids: set[str] = set()
        metadata: Mapping[str, Any] = {}
        pages = self._pages(
            path, MAX_PAGES, not_older_than, label_selector=selector, header_params={"Accept": METADATA_LIST}
        )
        async for page in pages:
            metadata = page.get("metadata", {})
            uids.update(item["metadata"]["uid"] for item in page["items"])
        if metadata.get("continue"):
            raise BusyError(f"there are more than {MAX_PAGES * PAGE_OBJECTS} {resource.plural}")
        return Listing(frozenset(uids), metadata.get("resourceVersion", ""))

    async def _pages(
        self, path: str, max_pages: int, not_older_than: str | None = None, **options: Any
    ) -> AsyncIterator[Manifest]:
        """Yield at most `max_pages` pages of a list. The last page read has `continue` in its metadata if there are more."""
        query = []
        if not_older_than is not None:
            query = [("resourceVersion", not_older_than), ("resourceVersionMatch", "NotOlderThan")]
        token = None
        for _ in range(max_pages):
            answer = await self._request(
                "get", path, limit=PAGE_OBJECTS, _continue=token, query_params=list(query), **options
            )
            page = answer or {}
            yield {**page, "items": page.get("items") or []}  # null if the list is empty
            token, query = page.get("metadata", {}).get("continue"), []
            if not token:
                return

    async def recorded(self, namespace: str, selector: str) -> list[Manifest]:
        """Return the ControllerRevisions with these labels.

        Raises:
            RefusedError, BusyError: see the classes.
        """
        pages = self._pages(CONTROLLER_REVISIONS.path(namespace), MAX_RECORDED_PAGES, label_selector=selector)
        return [item async for page in pages for item in page["items"]]

    async def create_recorded(self, namespace: str, manifest: Manifest) -> Manifest:
        """Create a ControllerRevision, and return it.

        It is applied, so that the API server serializes its data as in later patches: data with different whitespace would be
        different data.

        Raises:
            RefusedError, BusyError: see the classes.
        """
        path = CONTROLLER_REVISIONS.path(namespace, manifest["metadata"]["name"])
        return await self._apply(path, manifest, FIELD_MANAGER)

    async def patch_recorded(self, namespace: str, name: str, change: Mapping[str, Any]) -> None:
        """Change a ControllerRevision, except for its immutable data. It is no error if it is gone."""
        options: dict[str, Any] = {"body": change, "content_type": MERGE_PATCH}
        await self._request(
            "patch", CONTROLLER_REVISIONS.path(namespace, name), absent_is_none=True, **options
        )

    async def delete_recorded(self, namespace: str, name: str) -> None:
        """Delete a ControllerRevision. It is no error if it is gone."""
        await self._request("delete", CONTROLLER_REVISIONS.path(namespace, name), absent_is_none=True)

    async def create_event(self, namespace: str, event: Manifest) -> None:
        """Create an Event object."""
        await self._request("post", EVENTS.path(namespace), body=event)

    async def patch_event(self, namespace: str, name: str, change: Mapping[str, Any]) -> bool:
        """Change an Event object; return False if it no longer exists."""
        options: dict[str, Any] = {"body": change, "content_type": MERGE_PATCH}
        patched = await self._request("patch", EVENTS.path(namespace, name), absent_is_none=True, **options)
        return patched is not None

    async def _apply(
        self, path: str, body: Mapping[str, Any], manager: str, *, force: bool = True
    ) -> Manifest:
        options: dict[str, Any] = {
            "content_type": APPLY_PATCH,
            "field_manager": manager,
            "force_conflicts": force,
        }
        return await self._request("patch", path, body=body, **options) or {}

    async def _request(
        self, method: str, path: str, *, absent_is_none: bool = False, **options: Any
    ) -> Manifest | None:
        try:
            with counted(self._metrics, method):
                response = await self._dynamic.request(
                    method, path, serialize=False, _request_timeout=REQUEST_SECONDS, **options
                )
                answer: Manifest = await response.json()
        except ApiException as error:
            if error.status == 404 and absent_is_none:
                return None
            if error.status == 410:
                raise ExpiredError(words_of(error), _retry_after(error)) from error
            if WEBHOOK_FAILED in words_of(error):  # a 500 about this object alone
                raise RefusedError(words_of(error)) from error
            if error.status in (409, 429) or (error.status or 500) >= 500:
                raise BusyError(
                    words_of(error), _retry_after(error), undone=error.status in (409, 429)
                ) from error
            if error.status == 404 and not _is_status(error):
                raise NotServedError(words_of(error)) from error
            raise RefusedError(words_of(error)) from error
        except UNREACHABLE as error:
            raise BusyError(f"cannot reach the API server: {error!r}") from error
        return answer


_RESULTS = {404: "absent", 409: "conflict", 429: "throttled"}


@contextmanager
def counted(metrics: OperatorMetrics, verb: str) -> Iterator[None]:
    """Count one call of the API server by HTTP method and result, and observe its duration."""
    started, result = time.monotonic(), "cancelled"
    try:
        yield
        result = "ok"
    except ApiException as error:
        status = error.status or 500
        result = _RESULTS.get(status, "refused" if status < 500 else "failed")
        raise
    except UNREACHABLE:
        result = "unreachable"
        raise
    finally:
        metrics.api_calls.labels(verb, result).inc()
        metrics.api_seconds.labels(verb).observe(time.monotonic() - started)


def _without(value: Any, path: Sequence[str]) -> Any:
    """Remove the field at a path from JSON-like content; in a list, from every item."""
    if isinstance(value, list):
        return [_without(item, path) for item in value]
    if not isinstance(value, Mapping):
        return value
    first, *rest = path
    return {
        key: _without(inner, rest) if key == first else inner
        for key, inner in value.items()
        if rest or key != first
    }


def last_seen(event: Manifest) -> float:
    """Unix seconds at which an Event was last seen. The two kinds of recorders write different fields."""
    times = (
        event.get("lastTimestamp"),
        (event.get("series") or {}).get("lastObservedTime"),
        event.get("eventTime"),
    )
    return max(unix_seconds(time) or 0.0 for time in times)


def words_of(error: ApiException) -> str:
    """The message of the Status in the API server's answer."""
    try:
        return str(json.loads(error.body)["message"])
    except (TypeError, ValueError, KeyError):
        return f"{error.status} {error.reason}"


def _is_status(error: ApiException) -> bool:
    """Whether the API server answered about an object. For a path that it does not serve, it answers in plain text."""
    return str(error.body).lstrip("b'\"").startswith("{")


def _retry_after(error: ApiException) -> float | None:
    value = (error.headers or {}).get("Retry-After")
    return min(float(value), MAX_RETRY_AFTER_SECONDS) if value is not None and value.isdecimal() else None
