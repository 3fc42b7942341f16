"""Definitions of kinds that users install beside this project.

An API server has them as long as a test needs them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from kubernetes import client

from support.harness.waiting import eventually

HERE = Path(__file__).parent
GROUP_SETS = yaml.safe_load((HERE / "leaderworkersets.yaml").read_text())
HTTP_ROUTES = yaml.safe_load((HERE / "httproutes.yaml").read_text())
INFERENCE_POOLS = yaml.safe_load((HERE / "inferencepools.yaml").read_text())
OF_USERS = {d["spec"]["group"]: d for d in (GROUP_SETS, HTTP_ROUTES, INFERENCE_POOLS)}
"""Definitions by group."""


@contextmanager
def installed(api: client.ApiClient, definition: dict[str, Any]) -> Iterator[None]:
    """Serve the definition until the block ends."""
    try:
        establish(api, definition)
        yield
    finally:
        client.ApiextensionsV1Api(api).delete_custom_resource_definition(definition["metadata"]["name"])
        eventually(lambda: _is_served(api, definition, expected=False))


def establish(api: client.ApiClient, definition: dict[str, Any]) -> None:
    """Put a definition into the API server, and wait until its kind is served."""
    client.ApiextensionsV1Api(api).create_custom_resource_definition(definition)
    eventually(lambda: _is_served(api, definition, expected=True))


def _is_served(api: client.ApiClient, definition: dict[str, Any], *, expected: bool) -> None:
    spec = definition["spec"]
    where = (spec["group"], spec["versions"][0]["name"], spec["names"]["plural"])
    try:
        client.CustomObjectsApi(api).list_cluster_custom_object(*where)
        served = True
    except client.ApiException as error:
        if error.status != 404:
            raise
        served = False
    assert served == expected
