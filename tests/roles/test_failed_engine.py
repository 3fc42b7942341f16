"""A request that an engine gave up in its last step is not placed again, although the engine ends the pod at once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch

from mmd_api.contract.errors import EngineDeadError, PeerLostError, StepFailedError
from mmd_api.pipeline import PipelineConfig
from mmd_workers.decode.local_prompts import PromptService
from mmd_workers.engine.interface import StepOutput
from mmd_workers.features.store import FeatureStore
from mmd_workers.prefill.prefill_service import PrefillService
from mmd_workers.process.pod import Pod
from mmd_workers.process.settings import WorkerSettings
from mmd_workers.sequences.native import NativeHost
from mmd_workers.sequences.sequence_events import SequenceOwner, Sequences
from mmd_workers.wire.bus import Bus
from mmd_workers.wire.peers import PeerDirectory
from support.oracles.engine_oracle import TextModel, llama, make_engine

from .media_model import request_of

Connect = Callable[[str], Awaitable[Bus]]
SPEC = {"model": {"id": "builtin/demo"}, "decode": {"replicas": 1, "gpus": 0}}


def failing_engine(culprit: str) -> Any:
    """Runs nothing until two sequences are there; gives one up then, and fails with its next step, as vLLM's core does."""
    engine = make_engine(TextModel(llama()))
    steps = 0

    def step() -> StepOutput:
        nonlocal steps
        if not steps and engine.stats().waiting_sequences < 2:
            return StepOutput()
        steps += 1
        if steps > 1:
            raise RuntimeError("the engine's state is unknown")
        return StepOutput(failed=[(culprit, StepFailedError("it broke the step"))], changed=True)

    engine.step = step  # type: ignore[method-assign]
    return engine


def prefill(pod: Pod, host: NativeHost, sequences: Sequences) -> Any:
    source: Any = None  # no request here has media
    return PrefillService(
        *(
            pod.bus,
            pod.name,
            host.engine,
            FeatureStore(1 << 20, lambda *_: None),
            source,
            sequences.book,
            None,
        ),
        max_waiting=8,
        max_in_engine=8,
        overlap_tokens=4,
        metrics=pod.metrics,
    )


def prompts(pod: Pod, host: NativeHost, sequences: Sequences) -> Any:
    return PromptService(pod.bus, pod.name, host.engine, sequences.book, lambda: 0, 8, pod.metrics)


@pytest.mark.parametrize("service_of", [prefill, prompts])
async def test_what_the_engine_gave_up_last_is_not_given_back_as_lost(
    connect: Connect, service_of: Callable[..., SequenceOwner]
) -> None:
    config = {"namespace": "test", "name": "failing", "revision": "r1", "spec": SPEC}
    settings = WorkerSettings(
        PipelineConfig.model_validate(config), "decode-0", "127.0.0.1", 0, "nats://unused", threads=1
    )
    pod = Pod.of(settings, "decode", ("prefill", "decode"))
    pod.bus = await connect("decode-0")
    pod.directory = PeerDirectory(pod.bus, 5.0)
    host = NativeHost(pod, torch.device("cpu"))
    host.run(failing_engine("poison#0"))
    sequences = Sequences(pod, host)
    await sequences.start()
    service: Any = service_of(pod, host, sequences)
    sequences.add(service)
    try:
        for name in ("poison", "other"):
            assert (await service._place(request_of(name, media=False))).accepted
        await pod.tasks.stopping.wait()
        await sequences.give_back(PeerLostError("decode-0 failed"))  # as the worker does
        codes = {
            name: tracked.failure.code
            for name, tracked in sequences.book._ended.items()
            if tracked.failure is not None
        }
        assert codes == {"poison#0": StepFailedError.code, "other#0": PeerLostError.code}
        assert all(
            task.exception() is None for task in getattr(service, "_tasks", {}).values() if task.done()
        )
        host.engine.abort("other#0")  # the engine has ended: nothing is left to free
        with pytest.raises(EngineDeadError):
            await host.engine.cached_tokens("later#0", request_of("later", media=False))
    finally:
        await pod.tasks.cancel()
        await host.stop()
