"""Which Secret is named for problems with API keys, while the spec changes from one to another."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

from mmd_api.spec.deployment import MultimodalDeploymentSpec
from mmd_operator.api_keys import ApiKeys
from mmd_operator.cluster import BusyError
from mmd_operator.context import PassContext
from mmd_operator.observed import Observed, pod_of
from mmd_operator.pod_client import ReportFetcher
from mmd_operator.resources.naming import COMPONENT_LABEL, REVISION_LABEL

from .answering_pods import spec
from .bodies import NEW, pod


class Secrets:
    """The Secrets of a namespace, at an API server that may be busy."""

    def __init__(self, *names: str) -> None:
        self.names, self.busy = set(names), False

    async def secret_metadata(self, _namespace: str, name: str) -> dict[str, Any] | None:
        if self.busy:
            raise BusyError("too many requests")
        return {"name": name} if name in self.names else None

    async def secret_lacks(self, _namespace: str, _name: str, _entries: list[str]) -> list[str]:
        return []


class Gateways(ReportFetcher):
    """Gateways that reject their file, all of them."""

    async def get(self, address: str, port: int, path: str, max_bytes: int) -> bytes:
        ttft = {"window_seconds": 30.0, "requests": 0, "seconds": 0.0}
        queue = {"age_seconds": 0.0, "waiting_work": {}}
        report = {"pod": address, "revision": NEW, "queue": queue, "ttft": ttft, "keys_fault": "line 1"}
        return json.dumps(report).encode()


def api_keys(secrets: Secrets) -> ApiKeys:
    context = PassContext(secrets, None, None, "default", "demo")  # type: ignore[arg-type]  # all that is asked of them
    return ApiKeys(context, Gateways())


def with_keys(secret: str) -> MultimodalDeploymentSpec:
    body = spec().model_dump(mode="json", by_alias=True, exclude_none=True)
    body.setdefault("gateway", {})["auth"] = {"keysSecret": secret}
    return MultimodalDeploymentSpec.model_validate(body)


def gateway(name: str, secret: str):
    return replace(pod("gateway", name=name, ready=True), address=name, keys_secret=secret)


def problems(keys: ApiKeys, secret: str, now: float, *gateways) -> list[str]:
    found = asyncio.run(keys.problems(with_keys(secret), Observed({}, gateways), now))
    return [str(problem) for problem in found]


def test_problems_of_a_secret_end_when_the_spec_names_another_even_while_nothing_can_be_looked_up() -> None:
    secrets = Secrets("new")
    keys = api_keys(secrets)
    (missing,) = problems(keys, "old", 0.0)
    assert "Secret old" in missing
    secrets.busy = True
    assert problems(keys, "new", 1.0) == []
    secrets.busy, secrets.names = False, set()
    (missing,) = problems(keys, "new", 1.5)
    assert "Secret new" in missing


def test_a_rejected_file_is_that_of_the_secret_which_the_pod_mounts() -> None:
    keys = api_keys(Secrets("new"))
    pods = gateway("before", "old"), gateway("after", "new")
    found = problems(keys, "new", 0.0, *pods)
    assert [f"Secret {name}" in text for name, text in zip(("old", "new"), found, strict=True)] == [
        True,
        True,
    ]


def test_a_pod_shows_the_secret_that_it_mounts() -> None:
    volumes = [{"name": "config"}, {"name": "keys", "secret": {"secretName": "demo-keys"}}]
    labels = {COMPONENT_LABEL: "gateway", REVISION_LABEL: NEW}
    metadata = {"name": "demo", "uid": "u", "labels": labels}
    assert pod_of({"metadata": metadata, "spec": {"volumes": volumes}}).keys_secret == "demo-keys"
    assert pod_of({"metadata": metadata, "spec": {"volumes": volumes[:1]}}).keys_secret is None
