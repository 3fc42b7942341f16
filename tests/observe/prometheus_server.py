"""A real Prometheus that scrapes a real deployment. Where CI runs, a missing one is a failure."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from local_deployment import until

from mmd_workers.local.prometheus import configuration

RULES = Path(__file__).resolve().parents[2] / "charts" / "multimodal-operator" / "alerts" / "rules.yaml"


def program(name: str) -> str:
    """The path of one of Prometheus's programs."""
    path = shutil.which(name)
    if path is None:
        if os.environ.get("CI"):
            pytest.fail(f"there is no {name}: apt-get install prometheus")
        pytest.skip(f"there is no {name}: apt-get install prometheus")
    return path


class Prometheus:
    """Scrapes every second; ends with the block."""

    def __init__(self, folder: Path, gateway_url: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        config = folder / "prometheus.yml"
        config.write_text(configuration(gateway_url, RULES, scrape_seconds=1))
        self._log = (folder / "prometheus.log").open("w")
        self._process = subprocess.Popen(
            [
                program("prometheus"),
                f"--config.file={config}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
                "--enable-feature=exemplar-storage",
            ],
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def __enter__(self) -> Prometheus:
        def answers() -> bool:
            try:
                return httpx.get(f"{self.url}/-/ready", timeout=2).status_code == 200
            except httpx.HTTPError:
                return False

        until(answers, 30, "Prometheus is ready")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(20)
        self._log.close()

    def query(self, expr: str, at: float | None = None) -> list[dict[str, Any]]:
        """The result of an instant query."""
        asked: dict[str, Any] = {"query": expr, **({"time": at} if at else {})}
        answer = httpx.post(f"{self.url}/api/v1/query", data=asked, timeout=10).json()
        assert answer["status"] == "success", f"{expr}: {answer}"
        result: list[dict[str, Any]] = answer["data"]["result"]
        return result

    def value(self, expr: str) -> float:
        """The one value of a query; 0 when it has none."""
        return sum(float(one["value"][1]) for one in self.query(expr))

    def until_scraped(self, pods: int) -> None:
        """Every pod has been scraped since now."""
        begun = time.time()
        until(
            lambda: len(self.query(f"timestamp(up{{deployment!=''}} == 1) > {begun}")) >= pods,
            30,
            "pods are scraped",
        )
