"""What the dashboards and alerts show of the cluster: a Prometheus with the documented job, the chart's rules in shorter times,
and every query of every panel.

Pods are asked through the API server (`kubectl proxy`), so that it goes wherever kubectl goes.
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import yaml

from e2e.shell import FailedError, in_background, shown
from mmd_dashboards.boards import BOARDS
from mmd_dashboards.queries import filled

SCRAPE_SECONDS = 3
WINDOW = "1m"
WINDOWS, WAITS = 10, 300  # what windows and waiting times of the rules are divided by
PROXY_SECONDS = 20
Query = tuple[str, str]
"""The title of a panel and a PromQL expression."""


class Panels:
    """`silent` are the queries without an answer so far that load or scaling must move, `troubles` those that only trouble or tenants move;
    `fired` counts the series of each alert that has been firing.
    """

    def __init__(
        self, kubectl: list[str | Path], environment: Mapping[str, str], namespace: str, deployment: str
    ) -> None:
        self._kubectl, self._environment = kubectl, dict(environment)
        self.silent: set[Query] = set()
        self.troubles: set[Query] = set()
        self.fired: Counter[str] = Counter()
        for board in BOARDS:
            for panel in board.panels():
                for query in panel.queries:
                    expr = filled(query.expr, namespace, deployment, WINDOW)
                    queries = self.silent if query.moves in ("load", "operator") else self.troubles
                    queries.add((panel.title, expr))
        self.asked = len(self.silent)

    @contextmanager
    def looking(self, folder: Path) -> Iterator[None]:
        """Scrape and query until the block ends."""
        from support.servers.prometheus_server import Prometheus, documented_job, hurried, write_targets

        began = time.time()
        found = folder / "pods.json"
        write_targets(found, [])
        with self._proxy() as port:
            config = {
                "global": {"scrape_interval": f"{SCRAPE_SECONDS}s", "evaluation_interval": "1s"},
                "rule_files": [str(hurried(folder / "rules.yaml", WINDOWS, WAITS))],
                "scrape_configs": [_by_proxy(documented_job(), found, port)],
            }
            with Prometheus(folder, yaml.safe_dump(config, sort_keys=False)) as prometheus:
                api = f"http://127.0.0.1:{port}"
                with in_background(
                    "panels", lambda: self._look(prometheus.answers, found, api), SCRAPE_SECONDS
                ):
                    yield
                for alert in prometheus.all_firing(since=began):
                    self.fired[alert["alertname"]] += 1

    def _look(self, answers: Callable[[str], bool], found: Path, api: str) -> None:
        from support.servers.prometheus_server import write_targets

        with suppress(httpx.HTTPError):
            write_targets(found, httpx.get(f"{api}/api/v1/pods", timeout=10).json()["items"])
            self.silent -= {query for query in self.silent if answers(query[1])}
            self.troubles -= {query for query in self.troubles if answers(query[1])}

    @contextmanager
    def _proxy(self) -> Iterator[int]:
        command = [*self._kubectl, "proxy", "--port=0", "--address=127.0.0.1"]
        child = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **self._environment},
        )
        try:
            assert child.stdout is not None
            silence = threading.Timer(PROXY_SECONDS, child.kill)
            silence.start()
            words = child.stdout.readline()
            silence.cancel()
            if "127.0.0.1:" not in words:
                raise FailedError(f"{shown(command)} does not listen: {words.strip()}")
            yield int(words.rsplit(":", 1)[1])
        finally:
            child.terminate()
            child.wait(10)


def _by_proxy(job: dict[str, Any], found: Path, port: int) -> dict[str, Any]:
    """The documented job, its pods from a file (Debian's Prometheus has no discovery of its own) and asked through the proxy."""
    del job["kubernetes_sd_configs"]
    job["file_sd_configs"] = [{"files": [str(found)], "refresh_interval": "2s"}]
    path = {
        "source_labels": ["namespace", "pod", "__meta_kubernetes_pod_container_port_number"],
        "separator": "/",
        "regex": "(.+)/(.+)/(.+)",
        "replacement": "/api/v1/namespaces/$1/pods/$2:$3/proxy/metrics",
        "target_label": "__metrics_path__",
    }
    address = {"replacement": f"127.0.0.1:{port}", "target_label": "__address__"}
    return {**job, "relabel_configs": [*job["relabel_configs"], path, address]}
