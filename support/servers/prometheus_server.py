"""A real Prometheus that scrapes real processes. Under CI, a missing one is a failure."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import yaml

from mmd_cli.local.pods import free_port
from mmd_cli.prometheus import configuration
from support.harness.needed import lacking
from support.harness.waiting import wait_until

RULES = Path(__file__).resolve().parents[2] / "charts" / "multimodal-operator" / "alerts" / "rules.yaml"
PAGE = RULES.parents[3] / "docs" / "observe.md"
UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def program(name: str) -> str:
    """The path of one of Prometheus's programs."""
    path = shutil.which(name)
    if path is None:
        lacking(f"there is no {name}: apt-get install prometheus")
    return path


def documented_job() -> dict[str, Any]:
    """The scrape job for clusters, as docs/observe.md has it."""
    (block,) = re.findall(r"```yaml\n(scrape_configs:\n.*?)```", PAGE.read_text(), re.DOTALL)
    (job,) = yaml.safe_load(block)["scrape_configs"]
    scrape_job: dict[str, Any] = job
    return scrape_job


def discovered(pods: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Groups of targets for a file, made from pods as the API server gives them.

    They replace Prometheus's discovery of pods, which Debian leaves out. Every pod with an address is there
    once for each port, under the labels that Prometheus documents for role pod.
    """
    return [group for pod in pods if pod["status"].get("podIP") for group in _groups(pod)]


def write_targets(file: Path, pods: Iterable[Mapping[str, Any]]) -> None:
    """Write the targets of these pods to a file that Prometheus watches, all at once."""
    after = json.dumps(discovered(pods))
    if not file.exists() or after != file.read_text():
        part = file.with_suffix(".part")
        part.write_text(after)
        part.rename(file)


def _groups(pod: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    facts = pod["metadata"]
    labels = {"namespace": facts["namespace"], "pod_name": facts["name"]}
    for kind in ("label", "annotation"):
        for name, value in facts.get(f"{kind}s", {}).items():
            labels[f"pod_{kind}_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)] = value
    for port in pod["spec"]["containers"][0].get("ports", ()):
        of_port = {
            "pod_container_port_name": port.get("name", ""),
            "pod_container_port_number": str(port["containerPort"]),
        }
        meta = {f"__meta_kubernetes_{name}": value for name, value in (labels | of_port).items()}
        yield {"targets": [f"{pod['status']['podIP']}:{port['containerPort']}"], "labels": meta}


def hurried(path: Path, windows: float, waits: float) -> Path:
    """The chart's rules, written to `path` with every window (`[5m]`, `offset 5m`) and every `for:` divided
    by a factor.

    Nothing else is changed: not one threshold, not one label, and no range of `last_over_time`.
    """

    def shorter(duration: str, factor: float) -> str:
        seconds = int(duration[:-1]) * UNIT_SECONDS[duration[-1]]
        return f"{max(1, round(1000 * seconds / factor))}ms"

    rules = yaml.safe_load(RULES.read_text())
    for rule in (rule for group in rules["groups"] for rule in group["rules"]):
        rule["expr"] = re.sub(
            r"last_over_time\([^)]*\)|(?<=\[)\d+[smhd](?=\])|(?<=offset )\d+[smhd]",
            lambda match: match[0] if "(" in match[0] else shorter(match[0], windows),
            rule["expr"],
        )
        if "for" in rule:
            rule["for"] = shorter(rule["for"], waits)
    path.write_text(yaml.safe_dump(rules, sort_keys=False))
    return path


class Prometheus:
    """A server that ends with the block."""

    def __init__(self, folder: Path, config: str) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        path = folder / "prometheus.yml"
        path.write_text(config)
        self._log = (folder / "prometheus.log").open("w")
        self._process = subprocess.Popen(
            [
                program("prometheus"),
                f"--config.file={path}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
                "--enable-feature=exemplar-storage",
            ],
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    @classmethod
    def of_gateway(cls, folder: Path, admin_url: str, rules: Path = RULES) -> Prometheus:
        """A server with the configuration that `mmd prometheus` writes, which scrapes every second."""
        return cls(folder, configuration(admin_url, rules, scrape_seconds=1))

    def __enter__(self) -> Prometheus:
        def is_ready() -> bool:
            return httpx.get(f"{self.url}/-/ready", timeout=2).status_code == 200

        wait_until(is_ready, "Prometheus is ready", retried=(httpx.HTTPError,))
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(20)
        self._log.close()

    def query(self, expr: str, at: float | None = None) -> list[dict[str, Any]]:
        """The result of an instant query."""
        parameters: dict[str, Any] = {"query": expr, **({"time": at} if at else {})}
        answer = httpx.post(f"{self.url}/api/v1/query", data=parameters, timeout=10).json()
        assert answer["status"] == "success", f"{expr}: {answer}"
        result: list[dict[str, Any]] = answer["data"]["result"]
        return result

    def answers(self, expr: str) -> bool:
        """Whether a query has a result that is a number."""
        return any(not math.isnan(float(series["value"][1])) for series in self.query(expr))

    def value(self, expr: str) -> float:
        """The one value of a query; 0 when it has none."""
        return sum(float(series["value"][1]) for series in self.query(expr))

    def firing(self, alert: str, since: float) -> list[dict[str, Any]]:
        """The labels of an alert that has been in state firing at some time since then (Unix seconds)."""
        return [labels for labels in self.all_firing(since) if labels["alertname"] == alert]

    def all_firing(self, since: float) -> list[dict[str, Any]]:
        """The labels of every alert that has been in state firing at some time since then (Unix seconds)."""
        seconds = max(1, math.ceil(time.time() - since))
        alerts = self.query(f'max_over_time(ALERTS{{alertstate="firing"}}[{seconds}s])')
        return [series["metric"] for series in alerts]

    def until_scraped(self, pods: int) -> None:
        """Wait until every pod has been scraped since now."""
        start = time.time()
        wait_until(
            lambda: len(self.query(f"timestamp(up{{deployment!=''}} == 1) > {start}")) >= pods,
            "pods are scraped",
        )
