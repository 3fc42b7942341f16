"""Which parts a pod has, in which order they start, and what the pod reports of them."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mmd_api.contract.load import PodLoad
from mmd_api.pipeline import PipelineConfig, roles_of
from mmd_workers.encoder.encoder_role import EncoderRole
from mmd_workers.engine.memory.cache_changes import CacheDelta
from mmd_workers.engine.scheduler import TEXT_SECONDS
from mmd_workers.process.pod import Pod, sum_of
from mmd_workers.process.settings import WorkerSettings
from mmd_workers.sequences.engine import EngineHost
from mmd_workers.worker import engine_host, parts_of
from support.oracles.engine_oracle import TextModel, llama, make_engine


def pod_of(pool: Any, engine: str = "Native", **pools: Any) -> Pod:
    spec = {
        "model": {"id": "builtin/demo"},
        "engine": {"type": engine},
        "transfer": {"kv": {"backend": "Gloo"}},
    }
    spec |= {name: {"gpus": 0} for name in (*pools, "decode")}
    config = {"namespace": "test", "name": "parts", "revision": "r1", "spec": spec}
    pipeline = PipelineConfig.model_validate(config)
    settings = WorkerSettings(pipeline, f"{pool}-0", "127.0.0.1", 0, "nats://unused", threads=1)
    pod = Pod.of(settings, pool, roles_of(pipeline.spec, pool))
    pod.bus = pod.directory = None  # type: ignore[assignment]  # nothing is started
    return pod


SHARED = ["NativeHost", "Sequences"]


@pytest.mark.parametrize(
    ("pod", "parts"),
    [
        (pod_of("encoder", encoder=1, prefill=1), ["FeatureReports", "EncoderRole"]),
        (pod_of("prefill", encoder=1, prefill=1), ["FeatureReports", "KvLinks", *SHARED, "PrefillRole"]),
        (pod_of("decode", encoder=1, prefill=1), ["KvLinks", *SHARED, "DecodeRole"]),
        (pod_of("prefill", prefill=1), ["FeatureReports", "EncoderRole", "KvLinks", *SHARED, "PrefillRole"]),
        (pod_of("decode", encoder=1), ["FeatureReports", *SHARED, "PrefillRole"]),
        (pod_of("decode"), ["FeatureReports", "EncoderRole", *SHARED, "PrefillRole"]),
    ],
    ids=lambda value: f"{value.pool} pod with {'+'.join(value.roles)}" if isinstance(value, Pod) else "",
)
def test_each_part_of_a_pod_comes_after_those_it_builds_on(pod: Pod, parts: list[str]) -> None:
    assert [type(part).__name__ for part in parts_of(pod, torch.device("cpu"))] == parts


@pytest.mark.parametrize(
    ("pod", "parts"),
    [
        (pod_of("prefill", prefill=1), ["FeatureReports", "KvLinks", *SHARED, "PrefillRole"]),
        (pod_of("decode"), ["FeatureReports", *SHARED, "PrefillRole"]),
    ],
    ids=["prefill", "decode"],
)
def test_a_model_of_text_alone_has_no_tower_where_it_has_no_encoder_pool(pod: Pod, parts: list[str]) -> None:
    made = parts_of(pod, torch.device("cpu"), takes_media=False)
    assert [type(part).__name__ for part in made] == parts


def test_a_tower_yields_to_waiters_on_its_pods_native_engine() -> None:
    _, encoder, host, *_ = parts_of(pod_of("decode"), torch.device("cpu"))
    assert isinstance(encoder, EncoderRole)
    assert encoder.somebody_waits is not None
    assert isinstance(host, EngineHost)
    assert not encoder.somebody_waits(), "it has not started"
    for idle_seconds, waits in ((0.0, True), (0.0, False), (TEXT_SECONDS, True)):
        host.stats = replace(make_engine(TextModel(llama())).stats(), somebody_waits=waits)
        host.worked_at = time.monotonic() - idle_seconds
        assert encoder.somebody_waits() is (waits and not idle_seconds)


@pytest.mark.parametrize(
    "pod",
    [
        pytest.param(pod_of("encoder", encoder=1, prefill=1), id="a pod of its own"),
        pytest.param(pod_of("decode", engine="VLLM"), id="a pod for all with vLLM"),
        pytest.param(pod_of("prefill", engine="VLLM", prefill=1), id="a prefill pod with vLLM"),
    ],
)
def test_towers_without_a_native_engine_in_their_pod_yield_to_nobody(pod: Pod) -> None:
    _, encoder, *_ = parts_of(pod, torch.device("cpu"))
    assert isinstance(encoder, EncoderRole)
    assert encoder.somebody_waits is None


def test_parts_that_have_not_started_drain_at_once_and_report_nothing() -> None:
    parts = parts_of(pod_of("decode"), torch.device("cpu"))
    for part in parts:
        part.drain()
    assert all(part.drained for part in parts)
    assert sum_of(part.load() for part in parts) == PodLoad()
    assert all(part.progress() == {} for part in parts)


async def test_figures_of_the_engine_are_of_when_they_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was added to the engine after that may not be in them."""
    host = engine_host(pod_of("decode"), torch.device("cpu"), None)
    asked: list[float] = []

    async def sampled(*_: Any, **__: Any) -> Any:
        asked.append(time.time())
        await asyncio.sleep(0.01)
        return make_engine(TextModel(llama())).stats(), CacheDelta(
            [], [], begins=False, complete=True, awaited=False
        )

    monkeypatch.setattr(host, "_sampled", sampled)
    before = time.time()
    await host.sample()
    assert before <= host.sampled_at <= asked[0]


def test_a_decode_pod_reports_prompts_its_engines_figures_miss() -> None:
    *_, host, _, role = parts_of(pod_of("decode", prefill=1), torch.device("cpu"))
    host.sampled_at = 7.0
    waiting = {7.0: [100, 1000]}
    role._prompts = SimpleNamespace(waiting=waiting.__getitem__)
    assert role.load() == PodLoad(prefill_waiting_tokens=1100, decode_waiting=2)


def test_the_load_of_a_pod_is_that_of_its_parts_added_up() -> None:
    encoder = PodLoad(encode_queued_work={"image": 3}, encode_busy_fraction=0.5)
    engine = PodLoad(prefill_waiting_tokens=5, decode_running=2, itl_seconds=0.25)
    prefill = PodLoad(prefill_waiting_tokens=7, prefill_waiting_requests=1)
    assert sum_of([encoder, engine, prefill]) == PodLoad(
        encode_queued_work={"image": 3},
        encode_busy_fraction=0.5,
        prefill_waiting_tokens=12,
        prefill_waiting_requests=1,
        decode_running=2,
        itl_seconds=0.25,
    )
