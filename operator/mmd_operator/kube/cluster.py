"""The API server as this operator uses it: apply, read, scale, delete, report. Knows the Kubernetes client and nothing of deployments' meaning."""

from __future__ import annotations

import asyncio
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
PASSES_AT_ONCE = 8
"""Over all deployments: enough to keep the API server busy, few enough to renew the lease while hundreds start at once."""
APPLY_PATCH = "application/apply-patch+yaml"
MERGE_PATCH = "application/merge-patch+json"
JSON_PATCH = "application/json-patch+json"
METADATA = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
MAX_RETRY_AFTER_SECONDS = 300.0
PAGE_OBJECTS = 500
MAX_PAGES = 2000
MAX_WARNING_PAGES = 20
"""Events expire within hours: an object with more warnings than these pages hold is not expected."""
MAX_RECORDED_PAGES = 4
"""Of the recorded specs of one deployment, of which the operator keeps fewer than one page."""
MAX_WARNINGS = 20
METADATA_LIST = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
NOT_OF_SCHEMA = "failed to create typed patch object"
_UNDECLARED = re.compile(r"(\.status\.\S+): field not declared in schema")
_UNSUPPORTED_CONDITION = re.compile(r'status\.conditions\[\d+\]\.type: Unsupported value: "(\w+)"')
_NOT_A_NAME = re.compile(r"\[[^]]*\]")
"""The key or index of a list's item, in the path of a field."""


@dataclass(frozen=True, slots=True)
class Resource:
    """Where objects of a kind live."""

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
        """URL path of the collection over all namespaces."""
        return f"{self._prefix}/{self.plural}"

    @property
    def served_at(self) -> str:
        """URL path that exists where the API server serves this version of the group."""
        return self._prefix

    @property
    def api_version(self) -> str:
        """As manifests name it."""
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
"""Kinds that a deployment may own; the operator watches each that the API server serves."""
INSTALLED_BY_USERS = ("LeaderWorkerSet", "HTTPRoute", "InferencePool", POOL_KIND)
"""Those of them that are no part of Kubernetes."""
PODS = Resource("", "v1", "pods")
SECRETS = Resource("", "v1", "secrets")
CONTROLLER_REVISIONS = Resource("apps", "v1", "controllerrevisions")
EVENTS = Resource("", "v1", "events")
NAMESPACES = Resource("", "v1", "namespaces")
DEPLOYMENTS = Resource(GROUP, VERSION, PLURAL)

UNREACHABLE = (aiohttp.ClientError, TimeoutError, OSError)


class RefusedError(Exception):
    """The API server rejects this until something changes (400, 403, 404, 422, an admission webhook that fails); the message is its own."""


class NotServedError(RefusedError):
    """The API server does not know the kind: its definition is not installed."""


class BusyError(Exception):
    """It cannot be done now (409, 429, 5xx, out of reach): come back, after `retry_seconds` where the API server asked for that.

    `undone`: the API server answered that it changed nothing; else the write may have been carried out.
    """

    def __init__(self, message: str, retry_seconds: float | None = None, *, undone: bool = False) -> None:
        super().__init__(message)
        self.retry_seconds = retry_seconds
        self.undone = undone


class ExpiredError(BusyError):
    """The API server has compacted the snapshot that a list is read from (410); the pages so far are unusable."""


@dataclass(frozen=True, slots=True)
class Listing:
    """All objects of a kind as of one resource version."""

    uids: frozenset[str]
    version: str


class Cluster:
    """One API server. `api`: a client that sends no write while another process may act (see `serve.api_client`)."""

    def __init__(self, api: ApiClient, metrics: OperatorMetrics) -> None:
        self._dynamic = DynamicClient(api)
        self._metrics = metrics
        self.passes = asyncio.Semaphore(PASSES_AT_ONCE)

    async def get(self, kind: str, namespace: str, name: str) -> Manifest | None:
        """An object, or None.

        Raises:
            RefusedError, BusyError: see there.
        """
        return await self._request("get", CHILD_KINDS[kind].path(namespace, name), absent_is_none=True)

    async def serves(self, kind: str) -> bool:
        """Whether the API server knows a kind.

        Raises:
            RefusedError, BusyError: see there.
        """
        resource = CHILD_KINDS[kind]
        answer = await self._request("get", resource.served_at, absent_is_none=True) or {}
        return any(served["name"] == resource.plural for served in answer.get("resources") or ())

    async def apply(self, manifest: Manifest, namespace: str) -> Manifest:
        """Server-side apply of an owned object; returns the result.

        Raises:
            NotServedError, RefusedError, BusyError: see there.
        """
        path = CHILD_KINDS[manifest["kind"]].path(namespace, manifest["metadata"]["name"])
        try:
            return await self._apply(path, manifest, FIELD_MANAGER)
        except BusyError as error:  # 500, and a pod template of the user's is not what pods are
            if NOT_OF_SCHEMA not in str(error):
                raise
            raise RefusedError(str(error)) from error

    async def apply_pool_status(self, namespace: str, name: str, status: Mapping[str, Any]) -> None:
        """Write the status of a MultimodalPool.

        Raises:
            RefusedError, BusyError: see there.
        """
        metadata = {"name": name, "namespace": namespace}
        body = {"apiVersion": API_VERSION, "kind": POOL_KIND, "metadata": metadata, "status": status}
        path = CHILD_KINDS[POOL_KIND].path(namespace, name, "status")
        await self._apply(path, body, FIELD_MANAGER)

    async def create_secret(self, manifest: Manifest, namespace: str) -> None:
        """Create a Secret.

        Raises:
            RefusedError, BusyError: also if one of this name exists by now.
        """
        await self._request("post", SECRETS.path(namespace), body=manifest)

    async def secret_metadata(self, namespace: str, name: str) -> Manifest | None:
        """Metadata of a Secret, as the answer to a patch that changes nothing: the right to read it would show its values too."""
        options: dict[str, Any] = {"content_type": MERGE_PATCH, "header_params": {"Accept": METADATA}}
        path = SECRETS.path(namespace, name)
        found = await self._request("patch", path, body={}, absent_is_none=True, **options)
        return None if found is None else dict(found["metadata"])

    async def patch_secret(
        self, namespace: str, name: str, operations: list[Manifest], resource_version: str
    ) -> None:
        """Change a Secret, if it is still of this version; the answer holds metadata alone.

        Raises:
            RefusedError, BusyError: see there.
        """
        same = {"op": "replace", "path": "/metadata/resourceVersion", "value": resource_version}
        options: dict[str, Any] = {"content_type": JSON_PATCH, "header_params": {"Accept": METADATA}}
        await self._request("patch", SECRETS.path(namespace, name), body=[same, *operations], **options)

    async def secret_lacks(self, namespace: str, name: str, keys: Sequence[str]) -> list[str]:
        """Those of `keys` that a Secret does not have. A patch that moves each key onto itself changes nothing, and fails where one is
        missing (a copy would not): the right to read the Secret would show its values too."""
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
        """Make the scaler own a pool's size too, so that an apply that leaves it out does not reset it to 1, and so that it is no
        surge any more.

        Raises:
            RefusedError, BusyError: also if the size is another by now.
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
        """Whether a namespace is being deleted; True also for a deleted one."""
        path = f"{NAMESPACES.everywhere}/{namespace}"
        found = await self._request("get", path, absent_is_none=True)
        return found is None or "deletionTimestamp" in found["metadata"]

    async def delete_pod(
        self, namespace: str, pod: str, uid: str, grace_seconds: int | None = None, *, leads: bool = False
    ) -> None:
        """Delete the pod with this UID; its controller makes another. A terminating pod accepts a shorter `grace_seconds`.

        `leads`: it leads a group, and is gone only after its followers: LeaderWorkerSet before 0.9 takes the end of an old follower
        for a reason to recreate the new group.
        """
        body: dict[str, Any] = {"preconditions": {"uid": uid}}
        if leads:
            body["propagationPolicy"] = "Foreground"
        if grace_seconds is not None:
            body["gracePeriodSeconds"] = grace_seconds
        await self._request("delete", PODS.path(namespace, pod), body=body, absent_is_none=True)

    async def delete(self, kind: str, namespace: str, name: str, uid: str) -> None:
        """Delete the object with this UID; it is no error if that is gone or another has its name."""
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
        """Write the finalizers of a deployment, if it is still of this version."""
        body = {"metadata": {"finalizers": finalizers, "resourceVersion": resource_version}}
        path = DEPLOYMENTS.path(namespace, name)
        options: dict[str, Any] = {"content_type": MERGE_PATCH, "field_manager": FIELD_MANAGER}
        await self._request("patch", path, body=body, absent_is_none=True, **options)

    async def deployment(self, namespace: str, name: str) -> Manifest | None:
        """A deployment now, or None. Listed by its name: the operator holds the right to list, and none to get."""
        path, selector = DEPLOYMENTS.path(namespace), f"metadata.name={name}"
        found = await self._request("get", path, field_selector=selector)
        return next(iter((found or {}).get("items") or []), None)

    async def apply_status(self, namespace: str, name: str, status: Mapping[str, Any]) -> Manifest:
        """Write the status of a deployment, and return it as it is stored; fields that are left out are removed, and so are those, and
        conditions, that the CRD, of another release, does not declare."""
        known: Any = status
        for _ in ("fields", "conditions"):
            try:
                return await self._apply_status(namespace, name, known)
            except BusyError as error:  # the API server answers 500
                undeclared = sorted({_NOT_A_NAME.sub("", path) for path in _UNDECLARED.findall(str(error))})
                if not undeclared:
                    raise
                for path in undeclared:
                    known = _without(known, path.split(".")[2:])
            except RefusedError as error:
                types = sorted(set(_UNSUPPORTED_CONDITION.findall(str(error))))
                if not types:
                    raise
                undeclared = [f"condition {kind}" for kind in types]
                kept = [c for c in known["conditions"] if c["type"] not in types]
                known = {**known, "conditions": kept}
            logger.warning("%s/%s: the CRD does not declare %s", namespace, name, ", ".join(undeclared))
        return await self._apply_status(namespace, name, known)

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
        """The newest warnings that controllers wrote about an object, as core/v1 Events, oldest first.

        The API server lists Events by name, whatever their age: all of them are read to find the newest.
        """
        selector = f"involvedObject.kind={kind},involvedObject.name={name},type=Warning"
        newest: list[Manifest] = []
        pages = self._pages(EVENTS.path(namespace), MAX_WARNING_PAGES, field_selector=selector)
        async for page in pages:
            newest = sorted([*newest, *page["items"]], key=_last_seen)[-MAX_WARNINGS:]
        return newest

    async def uids(
        self, resource: Resource, namespace: str | None, selector: str | None, not_older_than: str | None
    ) -> Listing:
        """UIDs of all objects of a kind, in one namespace or (None) all, from a list of metadata alone, page by page.

        `not_older_than`: a resource version that the list must have reached, so that the API server may answer from its watch
        cache; None: the newest there is.

        Raises:
            RefusedError, BusyError: also where the list could not be read to its end; an incomplete one is never returned.
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
        self, path: str, most: int, not_older_than: str | None = None, **options: Any
    ) -> AsyncIterator[Manifest]:
        """At most `most` pages of a list; the last one read has `continue` in its metadata if there are more."""
        query = []
        if not_older_than is not None:
            query = [("resourceVersion", not_older_than), ("resourceVersionMatch", "NotOlderThan")]
        token = None
        for _ in range(most):
            answer = await self._request(
                "get", path, limit=PAGE_OBJECTS, _continue=token, query_params=list(query), **options
            )
            page = answer or {}
            yield {**page, "items": page.get("items") or []}  # null if there are none
            token, query = page.get("metadata", {}).get("continue"), []
            if not token:
                return

    async def recorded(self, namespace: str, selector: str) -> list[Manifest]:
        """ControllerRevisions with these labels.

        Raises:
            RefusedError, BusyError: see there.
        """
        pages = self._pages(CONTROLLER_REVISIONS.path(namespace), MAX_RECORDED_PAGES, label_selector=selector)
        return [item async for page in pages for item in page["items"]]

    async def create_recorded(self, namespace: str, manifest: Manifest) -> Manifest:
        """Create a ControllerRevision, and return it. Applied, so that the API server writes its data as it does in later patches: to it,
        other blanks would be other data.

        Raises:
            RefusedError, BusyError: see there.
        """
        path = CONTROLLER_REVISIONS.path(namespace, manifest["metadata"]["name"])
        return await self._apply(path, manifest, FIELD_MANAGER)

    async def patch_recorded(self, namespace: str, name: str, change: Mapping[str, Any]) -> None:
        """Change a ControllerRevision, whose data cannot change; it is no error if it is gone."""
        options: dict[str, Any] = {"body": change, "content_type": MERGE_PATCH}
        await self._request(
            "patch", CONTROLLER_REVISIONS.path(namespace, name), absent_is_none=True, **options
        )

    async def delete_recorded(self, namespace: str, name: str) -> None:
        """Delete a ControllerRevision; it is no error if it is gone."""
        await self._request("delete", CONTROLLER_REVISIONS.path(namespace, name), absent_is_none=True)

    async def create_event(self, namespace: str, event: Manifest) -> None:
        """Create an Event object."""
        await self._request("post", EVENTS.path(namespace), body=event)

    async def patch_event(self, namespace: str, name: str, change: Mapping[str, Any]) -> bool:
        """Change an Event object; False: it no longer exists."""
        options: dict[str, Any] = {"body": change, "content_type": MERGE_PATCH}
        found = await self._request("patch", EVENTS.path(namespace, name), absent_is_none=True, **options)
        return found is not None

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
            if WEBHOOK_FAILED in words_of(error):  # 500, and it concerns this object alone
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
    """One call of the API server: its HTTP method and how it ended."""
    begun, result = time.monotonic(), "cancelled"
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
        metrics.api_seconds.labels(verb).observe(time.monotonic() - begun)


def _without(value: Any, path: Sequence[str]) -> Any:
    """JSON-like content without the field at a path; in every item of a list."""
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


def _last_seen(event: Manifest) -> float:
    """When an Event was seen last, in Unix seconds; the two kinds of recorders write different fields."""
    times = (
        event.get("lastTimestamp"),
        (event.get("series") or {}).get("lastObservedTime"),
        event.get("eventTime"),
    )
    return max(unix_seconds(time) or 0.0 for time in times)


def words_of(error: ApiException) -> str:
    """The message of the Status that the API server answered with."""
    try:
        return str(json.loads(error.body)["message"])
    except (TypeError, ValueError, KeyError):
        return f"{error.status} {error.reason}"


def _is_status(error: ApiException) -> bool:
    """Whether the API server answered about an object. Of a path that it does not serve, it says so in plain text."""
    return str(error.body).lstrip("b'\"").startswith("{")


def _retry_after(error: ApiException) -> float | None:
    value = (error.headers or {}).get("Retry-After")
    return min(float(value), MAX_RETRY_AFTER_SECONDS) if value is not None and value.isdecimal() else None
