"""What each user of a deployment's own NATS server may hear and say, on a real server with the planned configuration."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from nats.aio.client import Client

from mmd_api.subjects import GATEWAY_USER, USERS, Subjects, inbox_of, permissions_of
from mmd_operator.resources.nats import PASSWORD_PREFIX, users_configuration, with_passwords
from mmd_workers.errors import PeerLostError
from mmd_workers.wire.bus import Bus
from mmd_workers.wire.jobs import EncodeQueue
from mmd_workers.wire.server import NatsServer

SUBJECTS = Subjects("ai", "chat", "r1")
OTHERS = Subjects("ai", "other", "r1")
LISTENED = {
    "prefill": [SUBJECTS.prefill("p-0"), SUBJECTS.embedding("p-0"), SUBJECTS.encode_failed("p-0")],
    "decode": [
        SUBJECTS.kv_offer("d-0"),
        SUBJECTS.kv_chunk("d-0"),
        SUBJECTS.kv_commit("d-0"),
        SUBJECTS.kv_release("d-0"),
    ],
    "encode": [SUBJECTS.encode_work("image", 64)],
    GATEWAY_USER: [
        SUBJECTS.tokens("g-0"),
        SUBJECTS.failures("g-0"),
        SUBJECTS.phases("g-0"),
        SUBJECTS.media("g-0"),
    ],
}
PASSWORDS: dict[str, str] = with_passwords({})["stringData"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    server = NatsServer(
        tmp_path_factory.mktemp("guarded"),
        configuration=users_configuration("ai", "chat"),
        environment={f"{PASSWORD_PREFIX}{user}": password for user, password in PASSWORDS.items()},
    ).start()
    yield server
    server.stop()


def url_of(server: NatsServer, user: str, password: str | None = None) -> str:
    return server.url.replace("nats://", f"nats://{user}:{password or PASSWORDS[user]}@")


@asynccontextmanager
async def as_user(server: NatsServer, user: str) -> Any:
    """A connection and the violations that the server told it of."""
    violations: list[str] = []

    async def refused(error: Exception) -> None:
        violations.append(str(error).lower())

    client = Client()
    await client.connect(url_of(server, user), inbox_prefix=inbox_of(user), error_cb=refused)
    try:
        yield client, violations
    finally:
        await client.close()


async def told(violations: list[str], count: int) -> None:
    """The client's error callback runs when it can: wait for what the server has said already."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(3):
            while len(violations) < count:
                await asyncio.sleep(0.01)


def roles_of_user(user: str) -> set[str]:
    return {user} if user == GATEWAY_USER else set(user.split("_"))


@pytest.mark.parametrize("user", USERS)
async def test_a_user_hears_the_subjects_of_its_roles_and_no_others(server: NatsServer, user: str) -> None:
    forbidden = [s for role, heard in LISTENED.items() if role not in roles_of_user(user) for s in heard]
    forbidden += [f"{inbox_of(other)}.reply" for other in USERS if other != user]
    forbidden += [OTHERS.heartbeat("x"), "mmd.>", ">", "$SYS.>", "$JS.EVENT.>"]
    async with as_user(server, user) as (client, violations):
        for role in roles_of_user(user):
            for subject in LISTENED[role]:
                await client.subscribe(subject)
        await client.subscribe(SUBJECTS.heartbeat("*"))
        await client.subscribe(SUBJECTS.cancel)
        await client.flush()
        assert violations == []
        for subject in forbidden:
            await client.subscribe(subject)
        await client.flush()
        await told(violations, len(forbidden))
    refused = [subject for subject in forbidden if any(f'"{subject.lower()}"' in v for v in violations)]
    assert refused == forbidden


@pytest.mark.parametrize("user", [user for user in USERS if user != GATEWAY_USER])
async def test_a_worker_cannot_make_a_stream_of_what_it_may_not_hear(server: NatsServer, user: str) -> None:
    async with as_user(server, user) as (client, violations):
        await client.publish("$JS.API.STREAM.CREATE.spy", b'{"name": "spy", "subjects": ["mmd.ai.chat.>"]}')
        await client.publish("$JS.API.CONSUMER.CREATE.spy.x", b"{}")
        await client.flush()
        await told(violations, 2)
    assert len(violations) == 2
    assert all("permissions violation for publish" in words for words in violations)


async def test_the_gateway_makes_the_queue_and_encoders_pull_from_it(server: NatsServer) -> None:
    gateway = await Bus.connect(url_of(server, GATEWAY_USER), "g-0", SUBJECTS, inbox=inbox_of(GATEWAY_USER))
    encoder = await Bus.connect(url_of(server, "encode"), "e-0", SUBJECTS, inbox=inbox_of("encode"))
    made, pulled = EncodeQueue(gateway), EncodeQueue(encoder)
    await made.ensure()
    assert set(await made.depth()) == {"image", "video", "audio"}
    assert await pulled.pull(["image"], batch=1, wait=0.3) == []
    with pytest.raises(PeerLostError):
        await pulled.ensure()
    await pulled.close()
    for bus in (gateway, encoder):
        await bus.close()


@pytest.mark.parametrize(("user", "password"), [("encode", "wrong"), ("root", "x"), ("encode", "")])
async def test_nobody_comes_in_without_the_password(server: NatsServer, user: str, password: str) -> None:
    url = server.url.replace("nats://", f"nats://{user}:{password}@" if password else "nats://")
    with pytest.raises(PeerLostError, match=r"(?i)authorization"):
        await Bus.connect(url, "stranger", SUBJECTS, timeout=2.0)


def test_every_password_is_its_own_and_new_each_time() -> None:
    again = with_passwords({})["stringData"]
    assert set(again) == set(USERS)
    assert len({*again.values(), *PASSWORDS.values()}) == 2 * len(USERS)


def test_no_user_may_speak_for_another_deployment() -> None:
    for user in USERS:
        may = permissions_of(user, "ai", "chat")
        own = ("mmd.ai.chat.", "_INBOX.", "$JS.")
        assert all(subject.startswith(own) for subject in (*may.publish, *may.subscribe))


async def test_what_is_said_without_leave_does_not_arrive(server: NatsServer) -> None:
    async with as_user(server, "decode") as (decode, _), as_user(server, "encode") as (encode, violations):
        heard = await decode.subscribe(SUBJECTS.kv_offer("d-0"))
        await decode.flush()
        await encode.publish(SUBJECTS.kv_offer("d-0"), b"let me in")
        await encode.flush()
        with pytest.raises(asyncio.TimeoutError):
            await heard.next_msg(timeout=0.3)
        await told(violations, 1)
    assert any("kv-offer" in words for words in violations)
