"""What the gateways of a deployment report at their admin ports, all of them: each knows its own requests alone, and the pods of all."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx
from prometheus_client.parser import text_string_to_metric_families

from mmd_api.contract import paths
from mmd_cli.errors import CommandError
from mmd_workers.gateway.placement.timeline import KEPT_REQUESTS

TIMEOUT_SECONDS = 5.0
ASKED_AT_ONCE = 16


class UnreachableError(CommandError):
    """No gateway responds."""


@dataclass(frozen=True, slots=True)
class GatewaySnapshot:
    """What a gateway returned at one time: its view of the pods, and its own counters (name and labels → value). `requests`: the newest that
    it keeps, if they were asked for. `endpoints`: of the admin ports of all gateways that it knows, by pod.
    """

    taken: float
    state: Mapping[str, Any]
    counters: Mapping[tuple[str, tuple[tuple[str, str], ...]], float] = field(default_factory=dict)
    requests: Sequence[Mapping[str, Any]] = ()
    endpoints: Mapping[str, str] = field(default_factory=dict)

    def total(self, name: str, **labels: str) -> float:
        """The sum over the series of a metric that have these labels."""
        wanted = set(labels.items())
        return sum(value for (n, have), value in self.counters.items() if n == name and wanted <= set(have))


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What gateways returned at about the same time, by pod. `missing`: a sentence for each one that is known and has no part in it."""

    gateways: Mapping[str, GatewaySnapshot]
    missing: tuple[str, ...] = ()

    def total(self, name: str, **labels: str) -> float:
        """The sum over all gateways."""
        return sum(one.total(name, **labels) for one in self.gateways.values())

    def largest(self, name: str, label: str) -> dict[str, float]:
        """Of a metric that every gateway reads of the same thing, by the value of a label."""
        found: dict[str, float] = {}
        for one in self.gateways.values():
            for (n, labels), value in one.counters.items():
                if n == name and (kind := dict(labels).get(label)) is not None:
                    found[kind] = max(value, found.get(kind, value))
        return dict(sorted(found.items()))

    @property
    def pods(self) -> list[Mapping[str, Any]]:
        """Workers that any gateway knows, each as it reported last."""
        newest: dict[str, Mapping[str, Any]] = {}
        for pod in (pod for one in self.gateways.values() for pod in one.state["pods"]):
            if pod["pod"] not in newest or pod["sent"] > newest[pod["pod"]]["sent"]:
                newest[pod["pod"]] = pod
        return list(newest.values())

    @property
    def requests(self) -> list[Mapping[str, Any]]:
        """Of all gateways, since when none of them has forgotten one."""
        lists = [one.requests for one in self.gateways.values()]
        begins = (min(map(_arrival, kept)) for kept in lists if len(kept) >= KEPT_REQUESTS)
        since = max(begins, default=-math.inf)
        return [request for kept in lists for request in kept if _arrival(request) >= since]


def _arrival(request: Mapping[str, Any]) -> float:
    return float(request["arrived"])


def buckets(snapshots: Iterable[GatewaySnapshot], name: str) -> dict[float, float]:
    """The cumulative counts of a histogram by upper bound, over all labels."""
    found: dict[float, float] = defaultdict(float)
    for snapshot in snapshots:
        for (n, labels), value in snapshot.counters.items():
            if n == f"{name}_bucket":
                found[float(dict(labels)["le"])] += value
    return found


def look(admin_urls: Sequence[str], *, requests: bool = False) -> Snapshot:
    """Ask gateways at their admin ports, all at once. `requests`: for the newest that they keep, too.

    Raises:
        UnreachableError: none answers.
    """
    with ThreadPoolExecutor(min(ASKED_AT_ONCE, len(admin_urls))) as threads:
        asked = {url: threads.submit(_look, url, requests=requests) for url in dict.fromkeys(admin_urls)}
    gateways: dict[str, GatewaySnapshot] = {}
    silent: dict[str, str] = {}
    for url, answer in asked.items():
        try:
            snapshot = answer.result()
        except UnreachableError as error:
            silent[url] = error.message
        else:
            gateways[snapshot.state["pod"]] = snapshot
    if not gateways:
        raise UnreachableError("\n".join(silent.values()))
    return Snapshot(gateways, tuple(f"not counted: {words}" for words in _missing(gateways, silent)))


def _missing(gateways: Mapping[str, GatewaySnapshot], silent: Mapping[str, str]) -> Iterator[str]:
    """Why each gateway is missing that is known. `silent`: by URL, what is wrong with those that did not answer."""
    yield from silent.values()
    addresses = {urlsplit(url).netloc for url in silent}
    known = {pod: endpoint for one in gateways.values() for pod, endpoint in one.endpoints.items()}
    for pod, endpoint in sorted(known.items()):
        if pod not in gateways and endpoint not in addresses:
            yield f"gateway {pod}, which was not asked; give the URL of its admin port, {endpoint} in its network, by another --url"


def _look(admin_url: str, *, requests: bool) -> GatewaySnapshot:
    try:
        with httpx.Client(base_url=admin_url, timeout=TIMEOUT_SECONDS) as client:
            state = client.get(paths.GATEWAY_STATE).raise_for_status().json()
            text = client.get(paths.METRICS).raise_for_status().text
            targets = client.get(paths.GATEWAY_TARGETS).raise_for_status().json()
            kept: list[Mapping[str, Any]] = []
            if requests:
                newest = client.get(paths.GATEWAY_REQUESTS, params={"limit": KEPT_REQUESTS})
                kept = newest.raise_for_status().json()["requests"]
            counters = {
                (sample.name, tuple(sorted(sample.labels.items()))): sample.value
                for family in text_string_to_metric_families(text)
                for sample in family.samples
            }
            endpoints = {
                target["labels"]["pod"]: target["targets"][0]
                for target in targets
                if target["labels"]["component"] == "gateway"
            }
            _ = state["pod"], state["pods"]
    except (httpx.HTTPError, ValueError) as error:
        raise UnreachableError(
            f"no gateway responded at {admin_url} ({error}); check that it is running, and that this is its admin port"
        ) from error
    except (LookupError, TypeError, AttributeError) as error:
        raise UnreachableError(
            f"what responded at {admin_url} is no gateway; give the URL of its admin port"
        ) from error
    return GatewaySnapshot(time.time(), state, counters, kept, endpoints)
