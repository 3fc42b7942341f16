"""The API server as this operator uses it: apply, read, scale, delete, report. Knows the Kubernetes client and nothing of deployments' meaning."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import aiohttp
from kubernetes.aio.client import ApiClient
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.dynamic import DynamicClient

from mmd_api.resource import API_VERSION, DRAIN_ANNOTATION, GROUP, KIND, PLURAL, VERSION
from mmd_operator.metrics import OperatorMetrics
from mmd_operator.observed import FIELD_MANAGER, SCALER_FIELD_MANAGER
from mmd_operator.resources.naming import Manifest

REQUEST_SECONDS = 30.0
PASSES_AT_ONCE = 8
"""Of all deployments: enough to keep the API server busy, and few enough that the lease is renewed while hundreds begin at once."""
APPLY_PATCH = "application/apply-patch+yaml"
MERGE_PATCH = "application/merge-patch+json"
METADATA_LIST = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"


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
    def _prefix(self) -> str:
        return f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"


CHILD_KINDS: dict[str, Resource] = {
    "ConfigMap": Resource("", "v1", "configmaps"),
    "Service": Resource("", "v1", "services"),
    "StatefulSet": Resource("apps", "v1", "statefulsets"),
    "Deployment": Resource("apps", "v1", "deployments"),
    "PodDisruptionBudget": Resource("policy", "v1", "poddisruptionbudgets"),
    "NetworkPolicy": Resource("networking.k8s.io", "v1", "networkpolicies"),
}
"""Kinds that a plan may hold; the operator watches each."""
PODS = Resource("", "v1", "pods")
SECRETS = Resource("", "v1", "secrets")
EVENTS = Resource("", "v1", "events")
DEPLOYMENTS = Resource(GROUP, VERSION, PLURAL)

UNREACHABLE = (aiohttp.ClientError, TimeoutError, OSError)


class RefusedError(Exception):
    """The API server will not do this until somebody changes something (400, 403, 404, 422); its words are the message."""


class BusyError(Exception):
    """It cannot be done now (409, 429, 5xx, out of reach): come back, after `retry_seconds` where the API server asked for that."""

    def __init__(self, message: str, retry_seconds: float | None = None) -> None:
        super().__init__(message)
        self.retry_seconds = retry_seconds


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

    async def apply(self, manifest: Manifest, namespace: str) -> Manifest:
        """Server-side apply of an owned object; returns it as it stands afterwards."""
        path = CHILD_KINDS[manifest["kind"]].path(namespace, manifest["metadata"]["name"])
        return await self._apply(path, manifest, FIELD_MANAGER)

    async def create_secret(self, manifest: Manifest, namespace: str) -> bool:
        """Create a Secret; False: there is one of this name, which is left as it is. Secrets are never read."""
        try:
            await self._request("post", SECRETS.path(namespace), body=manifest)
        except BusyError as error:
            if not isinstance(error.__cause__, ApiException) or error.__cause__.status != 409:
                raise
            return False
        return True

    async def hand_over_replicas(self, namespace: str, name: str, replicas: int) -> None:
        """Make the scaler own a StatefulSet's size too, so that an apply that leaves it out does not reset it to 1."""
        body = {
            "apiVersion": "apps/v1",
            "kind": "StatefulSet",
            "metadata": {"name": name, "namespace": namespace},
            "spec": {"replicas": replicas},
        }
        path = CHILD_KINDS["StatefulSet"].path(namespace, name)
        await self._apply(path, body, SCALER_FIELD_MANAGER, force=False)

    async def scale(self, namespace: str, name: str, replicas: int) -> None:
        """Set a StatefulSet's size through `/scale`."""
        await self._request(
            "patch",
            CHILD_KINDS["StatefulSet"].path(namespace, name, "scale"),
            body={"spec": {"replicas": replicas}},
            content_type=MERGE_PATCH,
            field_manager=SCALER_FIELD_MANAGER,
        )

    async def ask_to_drain(self, namespace: str, pod: str, uid: str, now: datetime) -> None:
        """Tell a worker's pod to finish what it holds, if it is still this very pod."""
        body = {
            "metadata": {"uid": uid, "annotations": {DRAIN_ANNOTATION: now.isoformat(timespec="seconds")}}
        }
        await self._request(
            "patch", PODS.path(namespace, pod), body=body, content_type=MERGE_PATCH, absent_is_none=True
        )

    async def delete_pod(self, namespace: str, pod: str, uid: str) -> None:
        """Delete this very pod; its StatefulSet makes another."""
        body = {"preconditions": {"uid": uid}}
        await self._request("delete", PODS.path(namespace, pod), body=body, absent_is_none=True)

    async def delete(self, kind: str, namespace: str, name: str, uid: str) -> None:
        """Delete this very object; one that is gone, or another of its name, is left alone."""
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
        await self._request("patch", path, body=body, content_type=MERGE_PATCH, absent_is_none=True)

    async def apply_status(self, namespace: str, name: str, status: Mapping[str, Any]) -> None:
        """Write the status of a deployment; fields that are left out are removed."""
        body = {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": {"name": name, "namespace": namespace},
            "status": status,
        }
        await self._apply(DEPLOYMENTS.path(namespace, name, "status"), body, FIELD_MANAGER)

    async def warnings_about(self, namespace: str, kind: str, name: str) -> list[Manifest]:
        """The newest warnings that controllers wrote about an object, as core/v1 Events, oldest first."""
        selector = f"involvedObject.kind={kind},involvedObject.name={name},type=Warning"
        found = await self._request("get", EVENTS.path(namespace), field_selector=selector, limit=20)
        items: list[Manifest] = (found or {}).get("items", [])
        return sorted(items, key=lambda e: str(e.get("lastTimestamp") or e.get("eventTime") or ""))

    async def uids(self, resource: Resource, namespace: str | None, selector: str | None) -> set[str]:
        """UIDs of all objects of a kind, in one namespace or (None) all, from a consistent list of metadata alone."""
        path = resource.path(namespace) if namespace else resource.everywhere
        options: dict[str, Any] = {"label_selector": selector, "header_params": {"Accept": METADATA_LIST}}
        found = await self._request("get", path, **options)
        return {item["metadata"]["uid"] for item in (found or {}).get("items", ())}

    async def report(
        self, about: Mapping[str, Any], reason: str, message: str, *, warning: bool = False
    ) -> None:
        """Write an Event about a deployment."""
        metadata = about["metadata"]
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        body = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {
                "name": f"{metadata['name']}.{uuid4().hex[:16]}",
                "namespace": metadata["namespace"],
            },
            "involvedObject": {
                "apiVersion": API_VERSION,
                "kind": KIND,
                "name": metadata["name"],
                "namespace": metadata["namespace"],
                "uid": metadata["uid"],
            },
            "reason": reason,
            "message": message[:1000],
            "type": "Warning" if warning else "Normal",
            "source": {"component": FIELD_MANAGER},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        await self._request("post", EVENTS.path(metadata["namespace"]), body=body)

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
            if error.status in (409, 429) or (error.status or 500) >= 500:
                raise BusyError(words_of(error), _retry_after(error)) from error
            raise RefusedError(words_of(error)) from error
        except UNREACHABLE as error:
            raise BusyError(f"the API server cannot be reached: {error!r}") from error
        return answer


_RESULTS = {404: "absent", 409: "conflict", 429: "throttled"}


@contextmanager
def counted(metrics: OperatorMetrics, verb: str) -> Iterator[None]:
    """One call of the API server, told by its HTTP method and by how it ended."""
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


def words_of(error: ApiException) -> str:
    """The message of the Status that the API server answered with."""
    try:
        return str(json.loads(error.body)["message"])
    except (TypeError, ValueError, KeyError):
        return f"{error.status} {error.reason}"


def _retry_after(error: ApiException) -> float | None:
    value = (error.headers or {}).get("Retry-After")
    return float(value) if value is not None and value.isdigit() else None
