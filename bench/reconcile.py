"""What reconciling costs: API calls, seconds and memory of one operator with 1, 50 and 300 deployments, against a real API server.

    python -m bench.reconcile [--sizes 1 50 300] [--quiet-seconds 60]

Creates the deployments, waits until each has all its objects and a status, then changes one, then leaves all alone, then kills the operator
and starts another. Calls are counted at a proxy before the API server, watches apart. No controllers run: pods are nobody's business here.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import urllib3
from kubernetes import client
from rich.console import Console
from rich.table import Table

from bench import report
from mmd_api.crd import custom_resource_definition
from mmd_api.pool_resource import pool_definition
from mmd_api.resource import GROUP, PLURAL, VERSION
from support.cluster.control_plane import TOKEN, ControlPlane
from support.cluster.deployments import SPEC
from support.cluster.operator_process import OperatorProcess
from support.cluster.standin import Namespace
from support.cluster.unruly_server import UnrulyServer
from support.harness.waiting import eventually

DEADLINE_SECONDS = 600.0


def administrator(plane: ControlPlane) -> client.ApiClient:
    urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)
    configuration = client.Configuration(host=plane.url)
    configuration.verify_ssl = False
    configuration.api_key = {"authorization": f"Bearer {TOKEN}"}
    api = client.ApiClient(configuration)
    definitions = (custom_resource_definition(), pool_definition())
    extensions = client.ApiextensionsV1Api(api)
    for definition in definitions:
        extensions.create_custom_resource_definition(definition)

    def established() -> None:
        for definition in definitions:
            found = extensions.read_custom_resource_definition(definition["metadata"]["name"])
            conditions = found.status.conditions or []
            assert any(c.type == "Established" and c.status == "True" for c in conditions)

    eventually(established, 60)
    return api


def statuses(namespace: Namespace) -> list[dict[str, Any]]:
    listed = namespace.custom.list_namespaced_custom_object(GROUP, VERSION, namespace.name, PLURAL)
    return [item.get("status", {}) for item in listed["items"]]


def reconciled(namespace: Namespace, count: int, operator: OperatorProcess) -> None:
    if operator.wait(0) is not None:
        raise RuntimeError(f"the operator ended:\n{operator.log_text()[-2000:]}")
    done = [s for s in statuses(namespace) if s.get("observedGeneration", 0) >= 1 and s.get("conditions")]
    assert len(done) == count
    sets = namespace.apps.list_namespaced_stateful_set(namespace.name).items
    assert len(sets) == 4 * count  # three pools and the message bus


def calls(server: UnrulyServer) -> Counter[str]:
    """By what they do; the Lease's renewals apart."""
    counted: Counter[str] = Counter()
    for (method, path), number in server.calls.items():
        kind = "lease" if "/leases" in path else "read" if method == "GET" else "write"
        counted[kind] += number
    return counted


def measure(
    plane: ControlPlane, api: client.ApiClient, count: int, quiet_seconds: float, folder: Path
) -> dict[str, Any]:
    namespace = Namespace.create(api, f"bench-{count}")
    door = UnrulyServer(plane.url, TOKEN, folder)
    door.start()
    operator = OperatorProcess(door.kubeconfig, namespace.name, folder)
    operator.start()
    try:
        eventually(lambda: leads(operator), 60)
        process = psutil.Process(operator.process.pid)
        before, begun = calls(door), time.perf_counter()
        for number in range(count):
            namespace.apply(SPEC, name=f"d{number}")
        eventually(lambda: reconciled(namespace, count, operator), DEADLINE_SECONDS)
        created_seconds, created = time.perf_counter() - begun, calls(door) - before

        before, begun = calls(door), time.perf_counter()
        namespace.change({"decode": {"replicas": 3}}, name="d0")
        eventually(lambda: sized(namespace, 3), 60)
        changed_seconds, changed = time.perf_counter() - begun, calls(door) - before

        before, cpu = calls(door), sum(process.cpu_times()[:2])
        time.sleep(quiet_seconds)  # what is measured is that nothing happens
        quiet = calls(door) - before
        quiet_cpu = sum(process.cpu_times()[:2]) - cpu
        memory = process.memory_info().rss

        operator.kill()
        before = calls(door)
        operator = OperatorProcess(door.kubeconfig, namespace.name, folder)
        operator.start()
        process = psutil.Process(operator.process.pid)
        eventually(lambda: leads(operator), 60)
        begun = time.perf_counter()
        eventually(lambda: written(door, before, operator), DEADLINE_SECONDS)
        first_write_cpu, first_write_seconds = sum(process.cpu_times()[:2]), time.perf_counter() - begun
        return {
            "deployments": count,
            "objects": len(namespace.objects()),
            "create_seconds": created_seconds,
            "create_calls": dict(created),
            "create_calls_each": (created["read"] + created["write"]) / count,
            "change_seconds": changed_seconds,
            "change_calls": dict(changed),
            "quiet_seconds": quiet_seconds,
            "quiet_calls": dict(quiet),
            "quiet_cpu_fraction": quiet_cpu / quiet_seconds,
            "memory_mebibytes": memory / 2**20,
            "restart_cpu_seconds": first_write_cpu,
            "restart_seconds": first_write_seconds,
        }
    finally:
        operator.kill()
        door.stop()


def leads(operator: OperatorProcess) -> None:
    assert " is the leader" in operator.log_text()


def written(door: UnrulyServer, before: Counter[str], operator: OperatorProcess) -> None:
    if operator.wait(0) is not None:
        raise RuntimeError(f"the operator ended:\n{operator.log_text()[-2000:]}")
    assert (calls(door) - before)["write"]


def sized(namespace: Namespace, replicas: int) -> None:
    sets = namespace.apps.list_namespaced_stateful_set(
        namespace.name,
        label_selector="serving.multimodal.dev/deployment=d0,app.kubernetes.io/component=decode",
    ).items
    assert [s.spec.replicas for s in sets] == [replicas]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 50, 300])
    parser.add_argument("--quiet-seconds", type=float, default=60.0)
    options = parser.parse_args()
    rows = []
    for count in options.sizes:
        with tempfile.TemporaryDirectory() as folder:
            plane = ControlPlane(Path(folder))
            try:
                plane.start()
                rows.append(measure(plane, administrator(plane), count, options.quiet_seconds, Path(folder)))
            finally:
                plane.stop()
        path = report.keep("reconcile", {"rows": rows})
    table = Table(title="Cost of reconciling", title_justify="left")
    for column in (
        "deployments",
        "all created",
        "calls each",
        "one changed",
        "its calls",
        "calls a minute at rest",
        "CPU at rest",
        "memory",
        "first write after a restart",
        "its CPU",
    ):
        table.add_column(column, justify="right")
    for row in rows:
        at_rest = sum(n for kind, n in row["quiet_calls"].items() if kind != "lease")
        table.add_row(
            str(row["deployments"]),
            f"{row['create_seconds']:.1f} s",
            f"{row['create_calls_each']:.1f}",
            f"{row['change_seconds']:.2f} s",
            str(sum(n for kind, n in row["change_calls"].items() if kind != "lease")),
            f"{at_rest * 60 / row['quiet_seconds']:.0f}",
            f"{row['quiet_cpu_fraction']:.1%}",
            f"{row['memory_mebibytes']:.0f} MiB",
            f"{row['restart_seconds']:.1f} s",
            f"{row['restart_cpu_seconds']:.1f} s",
        )
    Console(width=160).print(table)
    print(path)


if __name__ == "__main__":
    main()
