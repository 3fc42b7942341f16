"""What a pod with vLLM makes of a first step that fails."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from mmd_api.contract.errors import BadLogitsError, CapacityError, EngineDeadError, EngineSettingsError
from mmd_api.spec.engine import EngineSpec
from mmd_workers.observe.metrics import Metrics
from mmd_workers.observe.startup import Startup
from mmd_workers.process.pod import Tasks
from mmd_workers.vllm_engine.host import VllmHost
from mmd_workers.worker import engine_host

from .cores import CPU

DECODE = SimpleNamespace(kv_block_tokens=16)


class Runner:
    """Runs first steps, of which the first ones fail; `during` happens in each."""

    def __init__(self, *errors: Exception, during: Any = None) -> None:
        self.errors = list(errors)
        self.during = during
        self.steps = 0

    async def call(self, command: Any) -> None:
        self.steps += 1
        if self.during is not None:
            self.during()
        if self.errors:
            raise self.errors.pop(0)


def warmed_up(runner: Runner, host: VllmHost | None = None) -> VllmHost:
    host = host or made()
    host._runner = runner  # type: ignore[assignment]
    asyncio.run(host.warm_up())
    return host


def made(start_deadline_seconds: int = 600) -> VllmHost:
    settings = SimpleNamespace(group=None)
    spec = SimpleNamespace(engine=EngineSpec(type="VLLM"), decode=DECODE)
    startup = Startup(Metrics(("decode",)))
    kv_spec = SimpleNamespace(start_deadline_seconds=start_deadline_seconds)
    pod: Any = SimpleNamespace(
        startup=startup, tasks=Tasks(), pool="decode", settings=settings, spec=spec, kv_spec=kv_spec
    )
    return VllmHost(pod, CPU)


def test_a_pod_serves_although_its_first_step_fails_once(caplog):
    runner = Runner(RuntimeError("busy"))
    warmed_up(runner)
    assert runner.steps == 2
    assert "vLLM's first step failed (busy); it is tried once more" in caplog.text


def test_a_first_step_that_fails_twice_reports_the_first_reason():
    with pytest.raises(EngineSettingsError, match=r"vLLM cannot start: no kernel; change spec\.model or"):
        warmed_up(Runner(ValueError("no kernel"), RuntimeError("Executor failed.")))


def test_a_warm_up_that_finds_no_room_is_no_refusal_of_vllm():
    warmed_up(Runner(CapacityError("the pool is small")))


def test_a_pod_whose_adapter_computes_no_numbers_does_not_become_ready():
    bad = BadLogitsError("adapter huge and the model computed logits that are not numbers")
    with pytest.raises(BadLogitsError, match="adapter huge"):
        warmed_up(Runner(bad))


def test_a_rank_that_ends_in_the_first_step_is_reported_as_such():
    host = made()
    lost = lambda: host._rank_lost("rank 1 of vLLM was killed")  # noqa: E731
    with pytest.raises(EngineDeadError, match="rank 1 of vLLM was killed; the pod restarts"):
        warmed_up(Runner(RuntimeError("cancelled"), RuntimeError("cancelled"), during=lost), host)


def test_a_core_is_made_with_what_the_tower_beside_it_needs() -> None:
    encoder: Any = SimpleNamespace(tower_bytes=0)
    spec = SimpleNamespace(engine=SimpleNamespace(type="VLLM"), decode=DECODE)
    pod: Any = SimpleNamespace(spec=spec, settings=SimpleNamespace(group=None))
    host = engine_host(pod, CPU, encoder)
    assert isinstance(host, VllmHost)
    encoder.tower_bytes = 7  # it is measured when the encoder starts
    with mock.patch("mmd_workers.vllm_engine.setup.make.make_core") as made:
        host._make_core(lambda _: None)
    assert made.call_args.args[-1] == 7


def test_a_first_step_past_the_start_deadline_prevents_serving(monkeypatch):
    monkeypatch.setattr("mmd_workers.vllm_engine.ranks.together.LEAST_JOIN_SECONDS", 0.1)
    host = made(start_deadline_seconds=0)

    async def hangs(_: Any) -> None:
        await asyncio.Event().wait()

    host._runner = SimpleNamespace(call=hangs)  # type: ignore[assignment]
    with pytest.raises(EngineSettingsError, match="first step did not end within 0 s; raise the pool's"):
        asyncio.run(host.warm_up())


def test_a_first_step_may_take_as_long_as_the_start_deadline(monkeypatch):
    monkeypatch.setattr("mmd_workers.sequences.step_thread.LIMIT_SECONDS", 0.01)

    class Slow(Runner):
        async def call(self, command: Any) -> None:
            await asyncio.sleep(0.2)
            await super().call(command)

    with pytest.raises(EngineSettingsError, match="no kernel"):
        warmed_up(Slow(ValueError("no kernel"), ValueError("no kernel")))


def test_a_long_first_step_does_not_make_the_pod_look_stuck():
    host, during = made(), list[list[str]]()
    warmed_up(Runner(during=lambda: during.append(list(host.progress()))), host)
    assert during == [[]]
    assert list(host.progress()) == ["engine"]
