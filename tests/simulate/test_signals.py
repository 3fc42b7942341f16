"""The simulator feeds the scaler what a cluster would: the answers of pods and gateways, read by the operator's own code."""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from dataclasses import asdict, fields
from typing import Any, get_type_hints

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmd_api.contract.load import PodLoad
from mmd_api.resource import API_VERSION, KIND, MultimodalDeployment
from mmd_api.spec.deployment import MultimodalDeploymentSpec
from mmd_operator.autoscaling import DeploymentPolicy, gateway_report, signals, worker_report
from mmd_operator.simulate.calibration import Calibration, DeviceNumbers
from mmd_operator.simulate.model import Pipeline
from mmd_operator.simulate.policies import Autoscaler, Hpa, Static, desired_replicas
from mmd_operator.simulate.telemetry import GATEWAY, REVISION, Telemetry
from mmd_operator.simulate.traces import GENERATORS, Trace
from mmd_workers.wire.messages.every_pod import Heartbeat

SCALED = {"gpus": 1, "autoscaling": {"minReplicas": 1, "maxReplicas": 6}, "resources": {"cpu": "4"}}
counts = st.integers(0, 10**9)
rates = st.floats(0, 1e9)


def spec(**parts: Any) -> MultimodalDeploymentSpec:
    body = {"model": {"id": "builtin/demo"}, "decode": SCALED, **parts}
    return MultimodalDeployment.parse(
        {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "m"}, "spec": body}
    ).spec


def texts(count: int, tokens: int, output: int, every: float = 1.0) -> Trace:
    none, ones = np.zeros(count, np.int64), np.ones(count, np.int64)
    media = {"image": none, "video": none, "audio": none}
    return Trace("texts", np.arange(count) * every, media, ones * tokens, ones * output)


loads = st.builds(
    PodLoad,
    encode_queued_work=st.dictionaries(st.sampled_from(["image", "video"]), counts),
    encode_work_per_second=st.dictionaries(st.sampled_from(["image", "video"]), rates),
    encode_busy_fraction=st.floats(0, 1),
    prefill_waiting_tokens=counts,
    prefill_blocked_tokens=counts,
    prefill_tokens_per_second=rates,
    decode_running=counts,
    decode_waiting=counts,
    decode_max_sequences=counts,
    kv_blocks_total=st.just(10**9),
    kv_blocks_free=counts,
    itl_seconds=rates,
)


@given(loads)
def test_the_load_of_a_heartbeat_arrives_at_the_autoscaler_unchanged(load: PodLoad):
    beat = Heartbeat("p-0", "prefill", ["prefill"], "i", "r", "ready", "", 0.0, load)
    assert worker_report(json.dumps(asdict(beat)).encode(), "p-0", "r").load == load


def test_wire_and_autoscaler_share_one_definition_of_load():
    assert get_type_hints(Heartbeat)["load"] is PodLoad


def test_the_scaler_is_given_nothing_but_answers_of_pods_and_gateways():
    """Every signal of every decision comes from a field that workers or gateways fill; prefill has no busy time."""
    deployment = spec(encoder=SCALED, prefill=SCALED, slo={"ttftMilliseconds": 1000})
    seen: dict[str, set[str]] = {}

    class Watching(Autoscaler):
        def sizes(self, now: float, telemetry: Telemetry):
            found = super().sizes(now, telemetry)
            for pool, decision in self.decisions.items():
                seen.setdefault(pool, set()).update(signal.metric for signal in decision.signals)
            return found

    scaler = Watching(DeploymentPolicy.of(deployment))
    Pipeline(deployment, GENERATORS["video-storm"](3.0, 600.0, 5), Calibration.load(None), scaler).run()
    assert seen["encoder"] <= {"BacklogSeconds", "BusyFraction"}
    assert seen["prefill"] <= {"BacklogSeconds", "TtftSeconds", "HeldRequests"}
    assert seen["decode"] <= {"KvUtilization", "Sequences", "ItlSeconds", "HeldRequests"}
    assert "BacklogSeconds" in seen["prefill"]


def test_answers_of_the_simulated_pods_pass_the_operators_reader_at_every_tick():
    deployment = spec(encoder=SCALED, prefill=SCALED)
    read = {"encoder": 0, "prefill": 0, "decode": 0}

    class Reading(Static):
        def sizes(self, now: float, telemetry: Telemetry):
            for pool in read:
                for pod, answer in telemetry.worker_answers(pool):
                    report = worker_report(answer, pod, REVISION)
                    assert report.load.prefill_blocked_tokens <= report.load.prefill_waiting_tokens
                    read[pool] += 1
            gateway_report(telemetry.gateway_answer(), GATEWAY, REVISION)
            return {}

    Pipeline(deployment, GENERATORS["bursty"](2.0, 300.0, 1), Calibration.load(None), Reading()).run()
    assert min(read.values()) > 100


def test_requests_are_held_at_the_gateway_while_no_prefill_pod_is_ready():
    zero = {"gpus": 1, "autoscaling": {"minReplicas": 0, "maxReplicas": 2}}
    deployment = spec(prefill=zero)
    held: list[int] = []

    class Waking(Autoscaler):
        def sizes(self, now: float, telemetry: Telemetry):
            answer = gateway_report(telemetry.gateway_answer(), GATEWAY, REVISION)
            held.append(answer.held.get("prefill", 0))
            return super().sizes(now, telemetry)

    scaler = Waking(DeploymentPolicy.of(deployment))
    numbers = Calibration.load(None)
    result = Pipeline(deployment, texts(3, 100, 10), numbers, scaler, start_sizes={"prefill": 0}).run()
    assert not result.lost
    assert max(held) == 3
    assert (result.ttft_seconds > numbers.prefill.start_seconds).all()


@pytest.mark.parametrize(
    ("current", "ready", "use", "target", "desired"),
    [
        (4, 4, 0.90, 0.60, 6),  # ceil(4 x 1.5)
        (4, 4, 0.65, 0.60, 4),  # within the tolerance of a tenth
        (4, 4, 0.67, 0.60, 5),
        (4, 4, 0.30, 0.60, 2),
        (1, 1, 0.05, 0.60, 1),
        (4, 2, 0.90, 0.60, 4),  # pods that are not ready count as idle: 0.45 of 0.6, so nothing
        (4, 3, 1.00, 0.60, 5),  # 0.75 of 0.6 over all four
        (4, 2, 0.30, 0.60, 1),  # downwards only the ready ones count
    ],
)
def test_the_hpa_follows_the_documented_formula(
    current: int, ready: int, use: float, target: float, desired: int
):
    assert desired_replicas(current, ready, use, target) == desired


def utilization(deployment: MultimodalDeploymentSpec, numbers: Calibration) -> list[tuple[Any, Any]]:
    """Of decode at every tick while one long answer is generated."""
    seen = []

    class Looking(Static):
        def sizes(self, now: float, telemetry: Telemetry):
            if 20 < now < 40:
                seen.append((telemetry.cpu_utilization("decode"), telemetry.gpu_utilization("decode")))
            return {}

    Pipeline(deployment, texts(1, 10, 10_000), numbers, Looking()).run()
    return seen


def test_one_sequence_uses_one_host_core_and_its_kernel_share():
    numbers = Calibration.load(None).model_copy(
        update={"device": DeviceNumbers(host_cores=1.0, kernel_share=0.8)}
    )
    for cpu, gpu in utilization(spec(prefill=SCALED), numbers):
        assert cpu == pytest.approx(0.25)
        assert gpu == pytest.approx(0.8)


def test_one_sequence_on_a_cpu_pod_uses_every_core_that_it_requested():
    pool = {"gpus": 0, "resources": {"cpu": "2500m"}}
    deployment = spec(prefill=pool, decode=pool, transfer={"kv": {"backend": "Gloo"}})
    for cpu, gpu in utilization(deployment, Calibration.load(None)):
        assert cpu == pytest.approx(2 / 2.5)
        assert gpu is None


def test_an_hpa_without_a_cpu_request_takes_no_action():
    pool = {"gpus": 1, "autoscaling": {"minReplicas": 1, "maxReplicas": 6}}
    deployment = spec(prefill=pool, decode=pool)
    hpa = Hpa(DeploymentPolicy.of(deployment), "cpu", 0.05)
    result = Pipeline(deployment, texts(60, 8000, 500), Calibration.load(None), hpa).run()
    assert all(sizes.max() == 1 for sizes in result.replicas.values())
    busy = Hpa(DeploymentPolicy.of(spec(prefill=SCALED)), "cpu", 0.05)
    grown = Pipeline(spec(prefill=SCALED), texts(60, 8000, 500), Calibration.load(None), busy).run()
    assert grown.replicas["decode"].max() > 1


def test_the_simulator_reports_every_number_that_a_signal_reads() -> None:
    """Or `mmd simulate` would see a load of zero, where a cluster has one."""
    of_load = {field.name for field in fields(PodLoad)}
    tree = ast.parse(inspect.getsource(signals))
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    made = ast.parse(textwrap.dedent(inspect.getsource(Telemetry._load)))
    calls = [node for node in ast.walk(made) if isinstance(node, ast.Call)]
    reported = {keyword.arg for call in calls for keyword in call.keywords}
    assert attributes & of_load <= reported
