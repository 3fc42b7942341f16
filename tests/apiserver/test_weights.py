"""The cache of weights: a Job fills the claim, pods wait for it, and what it reports and why it failed is in the status."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from mmd_api.contract import paths
from mmd_api.contract.weights import EXIT_STATUS, WeightsProgress
from support.cluster.deployments import SPEC
from support.cluster.standin import Namespace, eventually, is_gone
from support.servers.weights_server import WeightsServer

pytestmark = pytest.mark.usefixtures("any_operator")

CACHED = {
    **SPEC,
    "model": {"id": "org/llava", "storage": {"type": "Hub", "cache": {"sizeGibibytes": 5}}},
}
SHARED = {"model": {"storage": {"cache": {"sizeGibibytes": None, "claimName": "shared"}}}}
HALF = WeightsProgress(
    state="Downloading",
    bytes=2**30,
    total_bytes=2 * 2**30,
    bytes_per_second=64 * 2**20,
    remaining_seconds=16,
)


def waits(namespace: Namespace, reason: str, words: str) -> None:
    status, found, message = namespace.condition("WeightsCached")
    assert (status, found, words in message) == ("False", reason, True), message


def made(namespace: Namespace, kind: str) -> set[str]:
    return {key.partition("/")[2] for key in namespace.objects() if key.startswith(f"{kind}/")}


def run_pod(
    namespace: Namespace, job: Any, server: WeightsServer, ended: dict[str, Any] | None = None
) -> str:
    """A pod of the Job that answers at the server's address, or that has ended."""
    name = f"{job.metadata.name}-{'ended' if ended else 'runs'}"
    port = int(server.url.rpartition(":")[2])
    ports = [{"name": "http", "containerPort": port}]
    namespace.pod(name, job.spec.template.metadata.labels, ports=ports, container="weights")
    status: dict[str, Any] = {"phase": "Running", "podIP": "127.0.0.1", "podIPs": [{"ip": "127.0.0.1"}]}
    status["conditions"] = [{"type": kind, "status": "True"} for kind in ("PodScheduled", "Ready")]
    if ended:
        container = {"name": "weights", "image": "i", "imageID": "i", "ready": False, "restartCount": 0}
        status = {
            "phase": "Failed",
            "conditions": [{"type": "PodScheduled", "status": "True"}],
            "containerStatuses": [{**container, "state": {"terminated": ended}}],
        }
    namespace.core.patch_namespaced_pod_status(name, namespace.name, {"status": status})
    return name


def test_pods_start_when_the_job_has_filled_the_claim(namespace: Namespace):
    namespace.apply(CACHED)
    namespace.settled(lambda: waits(namespace, "Pending", "claim demo-weights"))
    job = eventually(namespace.job)

    def are_made() -> None:
        assert made(namespace, "PersistentVolumeClaim") == {"demo-weights"}
        assert made(namespace, "StatefulSet") == {"demo-nats"}

    eventually(are_made)
    assert not made(namespace, "Deployment")
    assert f"Job {job.metadata.name}" in namespace.condition("Ready")[2]

    with WeightsServer() as server:
        server.files[paths.WORKER_STATE] = HALF.dump().encode()
        name = run_pod(namespace, job, server)
        eventually(lambda: waits(namespace, "Downloading", "1.00 of 2.00 GiB, 64.0 MiB/s, 16 s left"))
        weights = namespace.get()["status"]["model"]["weights"]
        numbers = {"bytes": 2**30, "totalBytes": 2**31, "bytesPerSecond": 2**26, "remainingSeconds": 16}
        assert weights == {
            "claim": "demo-weights",
            "job": job.metadata.name,
            "state": "Downloading",
            **numbers,
        }
        namespace._end_pod(name)

        words = "claim demo-weights of 5 GiB is full; enlarge it"
        ended = {"exitCode": EXIT_STATUS["WeightsTooLarge"], "reason": "Error", "message": words}
        failed = run_pod(namespace, job, server, ended)
    eventually(lambda: waits(namespace, "WeightsTooLarge", f"{words}; Job {job.metadata.name} tries again"))
    assert namespace.condition("Degraded")[1] == "WeightsTooLarge"
    namespace.fail_job(job.metadata.name, datetime.now(UTC))
    eventually(lambda: waits(namespace, "WeightsTooLarge", f"kubectl delete job {job.metadata.name}"))
    assert namespace.get()["status"]["model"]["weights"]["state"] == "Failed"
    namespace.batch.delete_namespaced_job(job.metadata.name, namespace.name, propagation_policy="Background")
    namespace._end_pod(failed)
    again = namespace.settled(lambda: started_again(namespace, job))

    namespace.complete_job(again.metadata.name)
    namespace.settled(namespace.is_ready)
    assert namespace.condition("WeightsCached")[:2] == ("True", "Complete")
    volumes = {v.name: v for v in namespace.stateful_set("decode").spec.template.spec.volumes}
    assert volumes["models"].persistent_volume_claim.claim_name == "demo-weights"
    assert volumes["models"].persistent_volume_claim.read_only

    # Another claim: the revision that serves keeps its own until the other is full.
    before = made(namespace, "StatefulSet")
    namespace.change(SHARED)
    namespace.settled(lambda: waits(namespace, "Pending", "claim shared"))
    assert made(namespace, "StatefulSet") == before
    assert namespace.condition("Ready")[0] == "True"

    def fills_the_other() -> str:
        names = made(namespace, "Job") - {again.metadata.name}
        assert len(names) == 1
        return names.pop()

    name = eventually(fills_the_other)
    namespace.complete_job(name)
    namespace.settled(lambda: replaced(namespace, name))


def replaced(namespace: Namespace, job: str) -> None:
    namespace.is_ready()
    assert made(namespace, "Job") == {job}
    namespace.release_claims()
    assert not made(namespace, "PersistentVolumeClaim")


def started_again(namespace: Namespace, job: Any) -> Any:
    found = namespace.job()
    assert found.metadata.uid != job.metadata.uid
    return found


def test_a_download_that_failed_long_ago_is_started_again(namespace: Namespace):
    namespace.apply(CACHED)
    job = eventually(namespace.job)
    namespace.fail_job(job.metadata.name, datetime.now(UTC) - timedelta(minutes=11))
    namespace.settled(lambda: started_again(namespace, job))
    namespace.reported("Removed", job.metadata.name)
    namespace.delete()

    def gone() -> None:
        namespace.release_claims()
        is_gone(namespace)

    namespace.settled(gone)
    assert not namespace.objects()
