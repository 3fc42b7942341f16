"""Reads what all gateways of a deployment report at their admin ports.

Each gateway knows only its own requests, but the pods of all.
"""

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
    """Reports of a gateway at one time: its view of the pods, and its counters (name and labels → value).

    `requests`: the newest requests that it keeps, if they were asked for. `endpoints`: admin ports of all
    gateways that it knows, by pod.
    """

    taken: float
    state: Mapping[str, Any]
    counters: Mapping[tuple[str, tuple[tuple[str, str], ...]], float] = field(default_factory=dict)
    requests: Sequence[Mapping[str, Any]] = ()
    endpoints: Mapping[str, str] = field(default_factory=dict)

    def total(self, name: str, **labels: str) -> float:
        """The sum over the series of a metric that have these labels."""
        required = set(labels.items())
        return sum(
            value
            for (metric, series_labels), value in self.counters.items()
            if metric == name and required <= set(series_labels)
        )


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Reports of gateways at about the same time, by pod.

    `missing`: a sentence for each known gateway without a report.
    """

    gateways: Mapping[str, GatewaySnapshot]
    missing: tuple[str, ...] = ()

    def total(self, name: str, **labels: str) -> float:
        """The sum over all gateways."""
        return sum(gateway.total(name, **labels) for gateway in self.gateways.values())

    def largest(self, name: str, label: str) -> dict[str, float]:
        """The largest value of a metric over all gateways, by the value of a label.

        For metrics that every gateway reads from the same source.
        """
        by_label: dict[str, float] = {}
        for gateway in self.gateways.values():
            for (n, labels), value in gateway.counters.items():
                if n == name and (kind := dict(labels).get(label)) is not None:
                    by_label[kind] = max(value, by_label.get(kind, value))
        return dict(sorted(by_label.items()))

    @property
    def pods(self) -> list[Mapping[str, Any]]:
        """Workers that any gateway knows, each with its last report."""
        newest: dict[str, Mapping[str, Any]] = {}
        for pod in (pod for gateway in self.gateways.values() for pod in gateway.state["pods"]):
            if pod["pod"] not in newest or pod["sent"] > newest[pod["pod"]]["sent"]:
                newest[pod["pod"]] = pod
        return list(newest.values())

    @property
    def requests(self) -> list[Mapping[str, Any]]:
        """Requests of all gateways, from the time since which no gateway has forgotten any."""
        lists = [gateway.requests for gateway in self.gateways.values()]
        begins = (min(map(_arrival, requests)) for requests in lists if len(requests) >= KEPT_REQUESTS)
        since = max(begins, default=-math.inf)
        return [request for requests in lists for request in requests if _arrival(request) >= since]


def _arrival(request: Mapping[str, Any]) -> float:
    return float(request["arrived"])


def buckets(snapshots: Iterable[GatewaySnapshot], name: str) -> dict[float, float]:
    """The cumulative counts of a histogram by upper bound, over all labels."""
    counts: dict[float, float] = defaultdict(float)
    for snapshot in snapshots:
        for (n, labels), value in snapshot.counters.items():
            if n == f"{name}_bucket":
                counts[float(dict(labels)["le"])] += value
    return counts


def look(admin_urls: Sequence[str], *, requests: bool = False) -> Snapshot:
    """Query gateways at their admin ports, all at once. `requests`: also fetch the newest requests that they
    keep.

    Raises:
        UnreachableError: no gateway responds.
    """
    with ThreadPoolExecutor(min(ASKED_AT_ONCE, len(admin_urls))) as threads:
        answers = {url: threads.submit(_look, url, requests=requests) for url in dict.fromkeys(admin_urls)}
    gateways: dict[str, GatewaySnapshot] = {}
    silent: dict[str, str] = {}
    for url, answer in answers.items():
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
    """Why each known gateway is missing.

    `silent`: what is wrong with the gateways that did not answer, by URL.
    """
    yield from silent.values()
    addresses = {urlsplit(url).netloc for url in silent}
    endpoints = {
        pod: endpoint for gateway in gateways.values() for pod, endpoint in gateway.endpoints.items()
    }
    for pod, endpoint in sorted(endpoints.items()):
        if pod not in gateways and endpoint not in addresses:
            yield f"gateway {pod}, which was not asked; give the URL of its admin port, {endpoint} in its network, by another --url"


def _look(admin_url: str, *, requests: bool) -> GatewaySnapshot:
    try:
        with httpx.Client(base_url=admin_url, timeout=TIMEOUT_SECONDS) as client:
            state = client.get(paths.GATEWAY_STATE).raise_for_status().json()
            text = client.get(paths.METRICS).raise_for_status().text
            targets = client.get(paths.GATEWAY_TARGETS).raise_for_status().json()
            retained: list[Mapping[str, Any]] = []
            if requests:
                newest = client.get(paths.GATEWAY_REQUESTS, params={"limit": KEPT_REQUESTS})
                retained = newest.raise_for_status().json()["requests"]
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
    return GatewaySnapshot(time.time(), state, counters, retained, endpoints)
