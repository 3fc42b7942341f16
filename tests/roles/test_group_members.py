"""The processes of a group from their start to their end: what they do before they join, whose reason they report, when they are gone."""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mmd_api.contract.errors import EngineDeadError, EngineSettingsError, MmdError
from mmd_workers.model import source
from mmd_workers.process.group import Follower, Leader
from mmd_workers.process.pod import Pod
from mmd_workers.vllm_engine import host as host_module
from mmd_workers.vllm_engine.host import VllmHost
from mmd_workers.vllm_engine.ranks import follower as follower_module
from mmd_workers.vllm_engine.ranks import together
from mmd_workers.vllm_engine.ranks.follower import FollowerProcess
from mmd_workers.vllm_engine.ranks.together import MemberEndedError, StuckError, until_ended
from mmd_workers.vllm_engine.reasons import weight
from support.harness.waiting import until

from .group_pods import SECONDS, place, settings

ROLES = ("prefill", "decode")
GONE = "vLLM cannot start: Connection closed by peer [10.0.0.1]:3"
CAUSE = "vLLM cannot start: no such weights"


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a process does before its ranks start; it goes no further."""
    done: list[str] = []

    def fetch(*_: Any, weights: bool) -> Path:
        done.append("fetched" if weights else "looked")
        return Path()

    async def join(*_: Any) -> None:
        done.append("joined")
        raise EngineDeadError("as far as this test goes")

    monkeypatch.setattr(source, "resolve", fetch)
    monkeypatch.setattr(Follower, "join", join)
    monkeypatch.setattr(Leader, "gather", join)
    return done


def follower_at(address: str, port: int) -> FollowerProcess:
    return FollowerProcess(settings(1, 2, address, port), "decode", ROLES)


async def test_a_follower_fetches_its_weights_before_it_joins(steps: list[str]):
    with pytest.raises(EngineDeadError):
        await follower_at(*place()).serve()
    assert steps == ["fetched", "joined"]


async def test_a_leader_fetches_its_weights_before_it_waits_for_followers(steps: list[str]):
    with pytest.raises(EngineDeadError):
        await host_of_a_leader().load_weights()
    assert steps == ["fetched", "joined"]


async def test_a_follower_exposes_neither_roles_nor_nats(steps: list[str]):
    process = follower_at(*place())
    with pytest.raises(EngineDeadError):
        await process.serve()
    text = process._pod.metrics.expose()[0].decode()
    assert 'mmd_build_info{revision="r1",roles="follower"' in text
    for name in ("mmd_nats", "mmd_pod_state", "mmd_kv_blocks", "mmd_sequences"):
        assert name not in text
    assert "mmd_startup_seconds" in text


def host_of_a_leader() -> VllmHost:
    pod = Pod.of(settings(0, 2, *place()), "decode", ROLES)
    return VllmHost(pod, torch.device("cpu"))


@dataclass
class Running:
    """A leader with a follower's process; `ranks` makes what the follower's ranks do, in a thread."""

    leader: Leader
    process: FollowerProcess
    serving: asyncio.Task[None]
    lost: list[str] = field(default_factory=list)


@asynccontextmanager
async def running(ranks: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Running]:
    address, port = place()
    lost: list[str] = []
    process = follower_at(address, port)
    monkeypatch.setattr(process, "_make_ranks", lambda _: ranks())
    leader = Leader(settings(0, 2, address, port), lost.append, print)
    async with asyncio.timeout(SECONDS):
        serving = asyncio.create_task(process.serve())
        await leader.gather(SECONDS)
        try:
            yield Running(leader, process, serving, lost)
        finally:
            await leader.close("")
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)


def executor() -> Any:
    return SimpleNamespace(shutdown=lambda: None)


def failing(words: str, after: float = 0.0) -> Callable[[], Any]:
    def make() -> Any:
        time.sleep(after)
        raise EngineSettingsError(words)

    return make


async def test_a_follower_whose_leader_ended_well_waits_to_be_deleted(monkeypatch: pytest.MonkeyPatch):
    """A container that ends is restarted, for which the group would be recreated in the middle of a rollout."""
    async with running(executor, monkeypatch) as group:
        await group.leader.close("")
        await group.process._ended.wait()
        done, _ = await asyncio.wait({group.serving}, timeout=0.5)
        assert not done
        group.process._stopped.set()
        await group.serving


async def test_it_does_not_wait_for_that_for_ever(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(follower_module, "DELETION_SECONDS", 0.2)
    async with running(executor, monkeypatch) as group:
        await group.leader.close("")
        await group.serving


async def test_a_followers_own_reason_outweighs_its_leaders_lost_connection(
    monkeypatch: pytest.MonkeyPatch,
):
    async with running(failing(CAUSE, after=0.5), monkeypatch) as group:
        await group.leader.close(GONE)
        with pytest.raises(EngineSettingsError, match=CAUSE):
            await group.serving


async def test_the_leaders_reason_outweighs_a_followers_lost_connection(
    monkeypatch: pytest.MonkeyPatch,
):
    async with running(failing(GONE), monkeypatch) as group:
        await until(lambda: group.lost)  # it learns of the failure at once
        await group.leader.close("vLLM cannot start: no kernel")
        with pytest.raises(
            EngineDeadError, match="the leader of the group ended: vLLM cannot start: no kernel"
        ):
            await group.serving


async def test_a_follower_waits_for_a_leader_that_waits_for_its_own_failure(monkeypatch: pytest.MonkeyPatch):
    async with running(failing(GONE), monkeypatch) as group:
        await until(lambda: group.lost)
        await asyncio.sleep(together.OWN_FAILURE_SECONDS + 0.5)
        await group.leader.close(CAUSE)
        with pytest.raises(EngineDeadError, match=f"the leader of the group ended: {CAUSE}"):
            await group.serving


async def test_a_followers_hanging_thread_is_not_waited_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(together, "OWN_FAILURE_SECONDS", 0.1)
    monkeypatch.setattr(together, "END_SECONDS", 0.3)
    go_on = threading.Event()
    said: list[str] = []

    def end_now(words: str) -> None:
        said.append(words)
        raise EngineDeadError(words)

    monkeypatch.setattr(follower_module, "end_now", end_now)
    async with running(go_on.wait, monkeypatch) as group:
        await group.leader.close("no kernel")
        with pytest.raises(EngineDeadError):
            await group.serving
        go_on.set()
    assert said == ["the leader of the group ended: no kernel"]


async def test_a_leaders_hanging_thread_is_not_waited_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(together, "OWN_FAILURE_SECONDS", 0.1)
    monkeypatch.setattr(together, "END_SECONDS", 0.3)
    monkeypatch.setattr(host_module, "end_now", failing_with)
    host, go_on = host_of_a_leader(), threading.Event()
    host._member_lost("follower 1 of the group ended: no kernel")
    with pytest.raises(EngineDeadError, match=r"no kernel.* a thread that starts vLLM did not end"):
        await host._with_group(asyncio.to_thread(go_on.wait))
    go_on.set()


def failing_with(words: str) -> None:
    raise EngineDeadError(words)


@pytest.mark.parametrize(
    ("own", "others", "reason"),
    [
        (GONE, CAUSE, CAUSE),
        (CAUSE, GONE, CAUSE),
        (GONE, "its process ended without a reason", "its process ended without a reason"),
        (CAUSE, None, CAUSE),
        (GONE, None, "Connection closed by peer"),
    ],
)
async def test_a_leader_that_cannot_start_reports_what_explains_it(
    own: str, others: str | None, reason: str, monkeypatch: pytest.MonkeyPatch
):
    """The report of a follower comes a moment after what it caused."""
    monkeypatch.setattr(host_module, "SETTLE_SECONDS", 1.0)
    host = host_of_a_leader()
    if others is not None:
        words = f"follower 1 of the group ended: {others}"
        asyncio.get_running_loop().call_later(0.3, host._member_lost, words)
    with pytest.raises(MmdError) as failed:
        await host._with_group(asyncio.to_thread(failing(own)))
    assert reason in failed.value.message
    assert host._reason == failed.value.message, "for the followers"


RANK = "vLLM cannot start: a rank of vLLM ended before it had started and gave no reason"
PROCESS = "its process ended without a reason"


@pytest.mark.parametrize(
    ("seconds", "reason"), [(0.0, PROCESS), (1.0, RANK)], ids=["the follower first", "the rank first"]
)
async def test_of_two_ends_without_a_reason_the_first_is_reported(
    seconds: float, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_module, "SETTLE_SECONDS", 2.0)
    host = host_of_a_leader()
    words = f"follower 1 of the group ended: {PROCESS}"
    asyncio.get_running_loop().call_later(seconds, host._member_lost, words)

    def make() -> None:
        time.sleep(0.5)
        failing(RANK)()

    with pytest.raises(MmdError) as failed:
        await host._with_group(asyncio.to_thread(make))
    assert reason in failed.value.message


async def test_a_step_that_fails_with_a_follower_gets_the_followers_reason(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host_module, "SETTLE_SECONDS", 1.0)
    host: Any = host_of_a_leader()
    host._core = SimpleNamespace(give_up=lambda: None, shut_down=lambda: None)
    host._pod.tasks.failed(RuntimeError("cancelled"))
    words = "follower 1 of the group ended: rank 1 of vLLM was killed (SIGKILL)"
    asyncio.get_running_loop().call_later(0.3, host._member_lost, words)
    await host.stop()
    assert words in str(host._pod.tasks.failure)


async def test_ranks_that_start_after_another_pod_has_ended_are_ended_too():
    ended, made = asyncio.Event(), threading.Event()
    ended.set()

    def make() -> None:
        time.sleep(together.OWN_FAILURE_SECONDS + 0.5)
        rank = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(30,))
        rank.start()
        rank.join()
        made.set()

    async with asyncio.timeout(60):
        with pytest.raises(MemberEndedError):
            await until_ended(asyncio.to_thread(make), ended)
    assert made.is_set(), "the thread would wait for its ranks, and they for the other pod, for many minutes"


async def test_a_thread_that_outlives_its_ranks_is_given_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(together, "OWN_FAILURE_SECONDS", 0.1)
    monkeypatch.setattr(together, "END_SECONDS", 0.3)
    ended, go_on = asyncio.Event(), threading.Event()
    ended.set()
    with pytest.raises(StuckError):
        await until_ended(asyncio.to_thread(go_on.wait), ended)
    go_on.set()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (GONE, 0),
        ("[Rank 1] Watchdog caught collective operation timeout", 0),
        ("NCCL error: remote process exited or there was a network error", 0),
        ("[..] Connection reset by peer", 0),
        ("Connection was likely closed. Did the remote server shutdown or crash?", 0),
        ("The client socket has failed to connect to any network address of (10.0.0.1, 29500)", 0),
        ("rank 1 of vLLM was killed (SIGKILL), perhaps for its memory", 1),
        ("its process ended without a reason; if it was killed for its memory, give the pod more", 1),
        ("nothing was heard of it for 15 s", 1),
        ("rank 1 of vLLM exited with code 1", 1),
        (CAUSE, 2),
        ("CUDA error: MPS client failed to connect to the MPS control daemon or the MPS server", 2),
        ("spec.decode.gpus is 1, but torch found no CUDA device in this pod", 2),
    ],
)
def test_a_reason_weighs_what_it_explains(words: str, expected: int):
    assert weight(words) == expected
