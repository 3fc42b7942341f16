"""The connection between the pods of one replica: they start together, and the end of one is the end of all, with its reason."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import uvloop

from mmd_api.contract.errors import EngineDeadError, RevisionMismatchError
from mmd_workers.process import group as group_module
from mmd_workers.process.group import NO_MESSAGE, NO_REASON, Follower, Leader
from mmd_workers.process.settings import Group
from support.harness.waiting import until

from .group_pods import SECONDS, place, settings


@dataclass
class Started:
    """A leader with its followers. `lost`, `drains`: what the leader was told of."""

    leader: Leader
    followers: list[Follower]
    lost: asyncio.Queue[str] = field(default_factory=asyncio.Queue)
    drains: asyncio.Queue[str] = field(default_factory=asyncio.Queue)


@asynccontextmanager
async def started(size: int = 3) -> AsyncIterator[Started]:
    address, port = place()
    lost: asyncio.Queue[str] = asyncio.Queue()
    drains: asyncio.Queue[str] = asyncio.Queue()
    leader = Leader(settings(0, size, address, port), lost.put_nowait, drains.put_nowait)
    followers = [Follower(settings(rank, size, address, port)) for rank in range(1, size)]
    async with asyncio.timeout(SECONDS):
        joining = [asyncio.create_task(follower.join(SECONDS)) for follower in followers]
        await asyncio.gather(leader.gather(SECONDS), *joining)
        try:
            yield Started(leader, followers, lost, drains)
        finally:
            await leader.close("")
            for follower in followers:
                await follower.close("")


async def test_no_follower_starts_before_all_have_joined():
    address, port = place()
    leader = Leader(settings(0, 3, address, port), print, print)
    first, second = (Follower(settings(rank, 3, address, port)) for rank in (1, 2))
    async with asyncio.timeout(SECONDS):
        joining = asyncio.create_task(first.join(SECONDS))  # before there is a leader
        gathering = asyncio.create_task(leader.gather(SECONDS))
        done, _ = await asyncio.wait({joining, gathering}, timeout=1.5)
        assert not done
        await asyncio.gather(second.join(SECONDS), joining, gathering)
        await asyncio.gather(leader.close(""), first.close(""), second.close(""))


async def test_the_reason_of_a_follower_reaches_the_leader():
    async with started() as group:
        await group.followers[1].close("rank 2 of vLLM was killed (SIGKILL)")
        words = await group.lost.get()
        assert words == "follower 2 of the group ended: rank 2 of vLLM was killed (SIGKILL)"


async def test_a_follower_whose_connection_breaks_has_ended_without_a_reason():
    async with started() as group:
        peer: Any = group.followers[0]._leader
        peer._alive.cancel()
        peer._writer.transport.abort()
        assert await group.lost.get() == f"follower 1 of the group ended: {NO_REASON}"


async def test_a_follower_that_is_silent_has_ended(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(group_module, "SILENT_SECONDS", 1.5)
    async with started(size=2) as group:
        peer: Any = group.followers[0]._leader
        peer._alive.cancel()
        assert "nothing was heard of it for 2 s" in await group.lost.get()


def test_a_leader_ends_after_the_connection_to_a_follower_has_been_closed():
    """With the loop of workers, which refuses to write to a closed connection with an error of its own."""

    async def run() -> None:
        async with started() as group:
            await group.followers[0].close("no such weights")
            await group.lost.get()
            await until(lambda: len(group.leader._tasks) <= 1)
            await group.leader.close("follower 1 of the group ended: no such weights")
            assert await group.followers[1].ended() == "follower 1 of the group ended: no such weights"

    uvloop.run(run())


async def test_the_reason_of_the_leader_reaches_every_follower():
    async with started() as group:
        await group.leader.close("vLLM cannot start: no kernel")
        ended = [await follower.ended() for follower in group.followers]
        assert ended == ["vLLM cannot start: no kernel"] * 2
        assert group.lost.empty(), "they end because it does"


async def test_a_leader_that_ends_well_gives_no_reason():
    async with started() as group:
        await group.leader.close("")
        assert [await follower.ended() for follower in group.followers] == ["", ""]


async def test_a_follower_that_is_asked_to_stop_asks_the_leader_to_drain():
    async with started() as group:
        await group.followers[0].drain()
        assert await group.drains.get() == "follower 1 of the group is asked to stop"
        assert group.lost.empty(), "it goes on computing for the leader"


async def test_a_follower_of_another_revision_is_refused():
    address, port = place()
    leader = Leader(settings(0, 2, address, port), print, print)
    other = Follower(settings(1, 2, address, port, revision="r2"))
    async with asyncio.timeout(SECONDS):
        gathering = asyncio.create_task(leader.gather(SECONDS))
        with pytest.raises(
            RevisionMismatchError, match=r"this pod, which runs r2 .*: it runs another revision"
        ):
            await other.join(SECONDS)
        assert not gathering.done()
        gathering.cancel()
        await leader.close("")


@pytest.mark.parametrize("stranger", ["password", "group"])
async def test_a_process_outside_the_group_is_refused_and_learns_nothing(
    stranger: str,
):
    address, port = place()
    leader = Leader(settings(0, 2, address, port, revision="r-secret"), print, print)
    of_it = settings(
        1, 2, address, port, revision="r-other", **{"password": "x"} if stranger == "password" else {}
    )
    if stranger == "group":
        of_it = replace(of_it, group=Group(2, 1, "localhost"), pod_ip=address)
        leader._settings = replace(leader._settings, pod_ip="127.0.0.1")
    other = Follower(of_it)
    async with asyncio.timeout(SECONDS):
        gathering = asyncio.create_task(leader.gather(SECONDS))
        with pytest.raises(RevisionMismatchError, match="does not belong to this group") as refused:
            await other.join(SECONDS)
        assert "r-secret" not in refused.value.message
        gathering.cancel()
        await leader.close("")


async def test_a_rank_joins_once():
    address, port = place()
    leader = Leader(settings(0, 3, address, port), print, print)
    first, again = (Follower(settings(1, 3, address, port)) for _ in range(2))
    async with asyncio.timeout(SECONDS):
        gathering = asyncio.create_task(leader.gather(SECONDS))
        joining = asyncio.create_task(first.join(SECONDS))
        await until(lambda: leader._followers)
        with pytest.raises(RevisionMismatchError, match="follower 1 has joined the group of 3 before"):
            await again.join(SECONDS)
        gathering.cancel()
        await leader.close("")
        assert not await joining


async def test_a_leader_names_followers_still_missing_at_the_deadline():
    address, port = place()
    leader = Leader(settings(0, 4, address, port), print, print)
    joined = Follower(settings(2, 4, address, port))
    async with asyncio.timeout(SECONDS):
        joining = asyncio.create_task(joined.join(SECONDS))
        with pytest.raises(
            EngineDeadError, match="pod-0-1, pod-0-3 did not join the group within 1 s"
        ) as late:
            await leader.gather(1.0)
        assert "startDeadlineSeconds" in late.value.message
        await leader.close(late.value.message)
        with pytest.raises(EngineDeadError, match="the leader of the group ended: pod-0-1, pod-0-3 did not"):
            await joining


async def test_a_follower_waits_for_the_leader_until_a_deadline():
    address, port = place()
    with pytest.raises(EngineDeadError, match=f"the leader {address} did not start the group within 1 s"):
        await Follower(settings(1, 2, address, port)).join(1.0)


async def test_nobody_else_can_connect_once_all_have_joined():
    async with started(size=2) as group:
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(group.leader._group.leader, group.leader._settings.group_port)


async def test_anonymous_connections_are_few_and_short_and_block_no_follower(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(group_module, "HELLO_SECONDS", 1.0)
    address, port = place()
    leader = Leader(settings(0, 2, address, port), print, print)
    async with asyncio.timeout(SECONDS):
        gathering = asyncio.create_task(leader.gather(SECONDS))
        while leader._server is None:
            await asyncio.sleep(0.01)
        where = (address, leader._settings.group_port)
        strangers = [await asyncio.open_connection(*where) for _ in range(group_module.MAX_STRANGERS)]
        for reader, writer in strangers:
            assert b"challenge" in await reader.readline()
            writer.write(b"{}\n" * 3)  # signs of life do not make it longer
        extra, _ = await asyncio.open_connection(*where)
        assert await extra.read() == b"", "closed at once"
        follower = Follower(settings(1, 2, address, port))
        await asyncio.gather(follower.join(SECONDS), gathering)
        for reader, _ in strangers:
            await reader.read()  # to the end
        await asyncio.gather(leader.close(""), follower.close(""))


@pytest.mark.parametrize("line", [b"5\n", b"[]\n", b"no message\n"])
async def test_a_follower_that_sends_what_is_no_message_has_ended(line: bytes):
    async with started(size=2) as group:
        peer: Any = group.followers[0]._leader
        peer._writer.write(line)
        assert await group.lost.get() == f"follower 1 of the group ended: {NO_MESSAGE}"


@asynccontextmanager
async def one_of_two_joined(
    lost: Callable[[str], object] = print, drain: Callable[[str], object] = print
) -> AsyncIterator[tuple[Leader, Follower, asyncio.Task[None], asyncio.Task[bool]]]:
    """A leader that waits for two followers, the one that has joined, and what both wait in."""
    address, port = place()
    leader, follower = (
        Leader(settings(0, 3, address, port), lost, drain),
        Follower(settings(1, 3, address, port)),
    )
    async with asyncio.timeout(SECONDS):
        gathering = asyncio.create_task(leader.gather(SECONDS))
        joining = asyncio.create_task(follower.join(SECONDS))
        await until(lambda: leader._followers)
        yield leader, follower, gathering, joining


async def test_a_leader_stopped_before_all_joined_fails_no_follower():
    async with one_of_two_joined() as (leader, _, gathering, joining):
        gathering.cancel()
        await leader.close("")
        assert not await joining


async def test_a_follower_stopped_before_all_joined_does_not_fail_its_leader():
    drains: asyncio.Queue[str] = asyncio.Queue()
    lost: list[str] = []
    joined = one_of_two_joined(lost.append, drains.put_nowait)
    async with joined as (leader, follower, gathering, joining):
        joining.cancel()
        await follower.drain()
        await follower.close("")
        assert await drains.get() == "follower 1 of the group is asked to stop"
        while leader._tasks:
            await asyncio.sleep(0.01)
        assert lost == []
        gathering.cancel()
        await leader.close("")


async def test_a_follower_learns_that_the_leader_went_before_all_had_joined():
    async with one_of_two_joined() as (leader, _, gathering, joining):
        gathering.cancel()
        await leader.close("asked to stop")
        with pytest.raises(EngineDeadError, match="the leader of the group ended: asked to stop"):
            await joining
