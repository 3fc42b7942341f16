"""How a Prometheus finds the pods of a namespace in which a test plays the kubelet, and the operator, which is a process here."""

from __future__ import annotations

from pathlib import Path

import yaml

from support.cluster.standin import Namespace
from support.servers.prometheus_server import documented_job, write_targets

HOME = "multimodal-system"


def configuration(operator_port: int, rules: Path, discovered: Path) -> str:
    """The documented job with pods as `Discovery` finds them, and the operator, which is a process here and no pod."""
    job = documented_job()
    del job["kubernetes_sd_configs"]
    job["file_sd_configs"] = [{"files": [str(discovered)]}]
    target = {"targets": [f"127.0.0.1:{operator_port}"], "labels": {"namespace": HOME, "pod": "operator-0"}}
    operator = {"job_name": "operator", "honor_labels": job["honor_labels"], "static_configs": [target]}
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(rules)],
        "scrape_configs": [job, operator],
    }
    return yaml.safe_dump(config, sort_keys=False)


class Discovery:
    """Tells Prometheus of the namespace's pods by a file."""

    def __init__(self, namespace: Namespace, file: Path) -> None:
        self._namespace, self.file = namespace, file
        write_targets(file, [])

    def write(self) -> None:
        core = self._namespace.core
        pods = core.api_client.sanitize_for_serialization(core.list_namespaced_pod(self._namespace.name))
        write_targets(self.file, pods["items"])
