"""Reads, watches and changes a deployment and its recorded specs on a cluster, with the kubeconfig's rights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from kubernetes.aio import client, watch
from kubernetes.aio.config import ConfigException

from mmd_api.history import SPEC_LABEL
from mmd_api.resource import GROUP, PLURAL, VERSION
from mmd_cli.errors import CommandError
from mmd_cli.rollout_history import HistoryEntry, entries_of
from mmd_operator.kube.cluster import JSON_PATCH, MERGE_PATCH, REQUEST_SECONDS, UNREACHABLE, words_of
from mmd_operator.resources.naming import DEPLOYMENT_LABEL
from mmd_operator.serve import api_client

FIELD_MANAGER_OF_USERS = "mmd"
WATCH_SECONDS = 60


@asynccontextmanager
async def connected() -> AsyncIterator[client.ApiClient]:
    """A client of the kubeconfig's cluster.

    Raises:
        CommandError: there is no usable kubeconfig.
    """
    try:
        async with api_client() as api:
            yield api
    except ConfigException as error:
        raise CommandError(f"no cluster: {error}; set KUBECONFIG, or use kubectl config") from error


@contextmanager
def _answered() -> Iterator[None]:
    try:
        yield
    except client.ApiException as error:
        if error.status == 409:
            raise CommandError("the deployment was changed meanwhile; run the command again") from error
        raise CommandError(words_of(error)) from error
    except UNREACHABLE as error:
        raise CommandError(f"cannot reach the API server ({error!r}); check the kubeconfig") from error


class DeploymentOnCluster:
    """One deployment, by namespace and name."""

    def __init__(self, api: client.ApiClient, namespace: str, name: str) -> None:
        self._custom, self._apps = client.CustomObjectsApi(api), client.AppsV1Api(api)
        self._api = api
        self._where = (GROUP, VERSION, namespace, PLURAL)
        self.namespace, self.name = namespace, name

    async def read(self) -> dict[str, Any]:
        """Read the resource.

        Raises:
            CommandError: it does not exist or may not be read.
        """
        with _answered():
            body: dict[str, Any] = await self._custom.get_namespaced_custom_object(
                *self._where, self.name, _request_timeout=REQUEST_SECONDS
            )
        return body

    async def history(self, uid: str) -> list[HistoryEntry]:
        """Recorded specs of the resource with this UID, the oldest first.

        Raises:
            CommandError: they may not be read.
        """
        selector = f"{DEPLOYMENT_LABEL}={self.name},{SPEC_LABEL}"
        with _answered():
            revisions = await self._apps.list_namespaced_controller_revision(
                self.namespace, label_selector=selector, _request_timeout=REQUEST_SECONDS
            )
        return entries_of([self._api.sanitize_for_serialization(item) for item in revisions.items], uid)

    async def replace_spec(self, body: Mapping[str, Any], spec: Mapping[str, Any], *, dry_run: bool) -> None:
        """Replace the spec, if `body` is still the present version of the resource.

        Raises:
            CommandError: the change is refused, or another client has changed the resource.
        """
        operations = [
            {
                "op": "replace",
                "path": "/metadata/resourceVersion",
                "value": body["metadata"]["resourceVersion"],
            },
            {"op": "replace", "path": "/spec", "value": spec},
        ]
        await self._patch(operations, JSON_PATCH, dry_run=dry_run)

    async def pause(self, *, paused: bool) -> None:
        """Pause or resume rollouts.

        Raises:
            CommandError: the change is refused, or the definition in the cluster does not know the field.
        """
        stored = await self._patch({"spec": {"rollout": {"paused": paused}}}, MERGE_PATCH, dry_run=False)
        if paused and not (stored["spec"].get("rollout") or {}).get("paused"):
            raise CommandError(
                "the MultimodalDeployment definition in this cluster has no spec.rollout, so that nothing is paused; apply the new one "
                "(`kubectl apply --server-side -k crds`)"
            )

    async def states(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the resource now and after each change, endlessly.

        Raises:
            CommandError: it does not exist, is deleted or may not be read.
        """
        listing = self._custom.list_namespaced_custom_object
        selector = f"metadata.name={self.name}"
        while True:
            with _answered():
                listed = await listing(
                    *self._where, field_selector=selector, _request_timeout=REQUEST_SECONDS
                )
            if not listed["items"]:
                raise CommandError(
                    f"there is no MultimodalDeployment {self.name} in namespace {self.namespace}; check -n and the name"
                )
            yield listed["items"][0]
            version = listed["metadata"]["resourceVersion"]
            options = {"field_selector": selector, "resource_version": version}
            stream = watch.Watch().stream(listing, *self._where, timeout_seconds=WATCH_SECONDS, **options)
            try:
                async for event in stream:
                    if event["type"] == "DELETED":
                        raise CommandError(f"MultimodalDeployment {self.name} was deleted")
                    yield event["object"]
            except client.ApiException as error:
                if error.status != 410:  # the watch is too old: list again
                    raise CommandError(words_of(error)) from error
            except UNREACHABLE:
                await asyncio.sleep(1)  # the next list reports what is wrong
            finally:
                await stream.close()

    async def _patch(self, change: object, content_type: str, *, dry_run: bool) -> dict[str, Any]:
        options = {"dry_run": "All"} if dry_run else {}
        with _answered():
            stored: dict[str, Any] = await self._custom.patch_namespaced_custom_object(
                *self._where,
                self.name,
                change,
                field_manager=FIELD_MANAGER_OF_USERS,
                _content_type=content_type,
                _request_timeout=REQUEST_SECONDS,
                **options,
            )
        return stored
