"""Which parts a pod has, in which order they start, and what the pod reports of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mmd_api.contract.load import PodLoad
from mmd_api.pipeline import PipelineConfig, roles_of
from mmd_workers.pod import Pod, sum_of
from mmd_workers.settings import WorkerSettings
from mmd_workers.worker import parts_of


def pod_of(pool: Any, **pools: Any) -> Pod:
    spec = {"model": {"id": "builtin/demo"}, "transfer": {"kv": {"backend": "Gloo"}}}
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
        (pod_of("encoder", encoder=1, prefill=1), ["EncoderRole"]),
        (pod_of("prefill", encoder=1, prefill=1), ["KvLinks", *SHARED, "PrefillRole"]),
        (pod_of("decode", encoder=1, prefill=1), ["KvLinks", *SHARED, "DecodeRole"]),
        (pod_of("prefill", prefill=1), ["EncoderRole", "KvLinks", *SHARED, "PrefillRole"]),
        (pod_of("decode", encoder=1), [*SHARED, "PrefillRole"]),
        (pod_of("decode"), ["EncoderRole", *SHARED, "PrefillRole"]),
    ],
    ids=lambda value: f"{value.pool} pod with {'+'.join(value.roles)}" if isinstance(value, Pod) else "",
)
def test_a_pod_has_its_roles_and_what_they_share_each_after_those_it_builds_on(
    pod: Pod, parts: list[str]
) -> None:
    assert [type(part).__name__ for part in parts_of(pod, torch.device("cpu"))] == parts


def test_parts_that_have_not_started_drain_at_once_and_report_nothing() -> None:
    parts = parts_of(pod_of("decode"), torch.device("cpu"))
    for part in parts:
        part.drain()
    assert all(part.drained for part in parts)
    assert sum_of(part.load() for part in parts) == PodLoad()
    assert all(part.progress() == {} for part in parts)


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
