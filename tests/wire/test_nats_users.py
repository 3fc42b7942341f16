"""What each user of a deployment's own NATS server may hear and say, on a real server with the planned configuration."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from nats.aio.client import Client

from mmd_api.contract.errors import DeadlineError, MmdError, OverloadedError, PeerLostError
from mmd_api.contract.subjects import GATEWAY_USER, USERS, Subjects, inbox_of, permissions_of, previous_of
from mmd_operator.resources.nats import PASSWORD_PREFIX, users_configuration, with_passwords
from mmd_workers.wire.bus import Bus
from mmd_workers.wire.codec import Frame
from mmd_workers.wire.jobs import EncodeQueue
from mmd_workers.wire.login import Login
from mmd_workers.wire.messages.prefill import Cancel
from mmd_workers.wire.server import NatsServer
from mmd_workers.wire.stored_files import FileBytes, FileLog, StoredFile, StoreLimits
from mmd_workers.wire.tenant_tokens import RecordedTokens, TokenRecords
from support.harness.waiting import until

SUBJECTS = Subjects("ai", "chat", "r1")
OTHERS = Subjects("ai", "other", "r1")
LISTENED = {
    "prefill": [
        SUBJECTS.prefill("p-0"),
        SUBJECTS.embedding("p-0"),
        SUBJECTS.encode_failed("p-0"),
        SUBJECTS.feature_report("e-0"),
        SUBJECTS.feature_wanted("e-0"),
    ],
    "decode": [
        SUBJECTS.prefill("p-0"),
        SUBJECTS.kv_offer("d-0"),
        SUBJECTS.kv_chunk("d-0"),
        SUBJECTS.kv_commit("d-0"),
        SUBJECTS.kv_release("d-0"),
    ],
    "encode": [
        SUBJECTS.encode_work("image", 64),
        SUBJECTS.feature_wanted("e-0"),
        SUBJECTS.features_given("e-0"),
        SUBJECTS.feature_offer("e-0"),
    ],
    GATEWAY_USER: [
        SUBJECTS.tokens("g-0"),
        SUBJECTS.failures("g-0"),
        SUBJECTS.phases("g-0"),
        SUBJECTS.media("g-0"),
        SUBJECTS.prefix_report("p-0"),
        SUBJECTS.feature_report("e-0"),
        SUBJECTS.embedding("p-0"),  # offered to the gateway itself: of files that are encoded on upload
        SUBJECTS.encode_failed("p-0"),
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


def login(user: str) -> Login:
    return Login(user, PASSWORDS[user])


@asynccontextmanager
async def as_user(server: NatsServer, user: str) -> Any:
    """A connection and the violations that the server told it of."""
    violations: list[str] = []

    async def refused(error: Exception) -> None:
        violations.append(str(error).lower())

    client = Client()
    await client.connect(
        server.url, user=user, password=PASSWORDS[user], inbox_prefix=inbox_of(user), error_cb=refused
    )
    try:
        yield client, violations
    finally:
        await client.close()


async def told(violations: list[str], count: int) -> None:
    """The client's error callback runs when it can: wait for what the server has said already."""
    await until(lambda: len(violations) >= count, lambda: f"{count} violations; so far {violations}")


def roles_of_user(user: str) -> set[str]:
    return {user} if user == GATEWAY_USER else set(user.split("_"))


@pytest.mark.parametrize("user", USERS)
async def test_a_user_receives_the_subjects_of_its_roles_and_no_others(server: NatsServer, user: str) -> None:
    own = {subject for role in roles_of_user(user) for subject in LISTENED[role]}
    forbidden = [s for s in dict.fromkeys(itertools.chain(*LISTENED.values())) if s not in own]
    forbidden += [f"{inbox_of(other)}.reply" for other in USERS if other != user]
    forbidden += [OTHERS.heartbeat("x"), "mmd.>", ">", "$SYS.>", "$JS.EVENT.>"]
    async with as_user(server, user) as (client, violations):
        for subject in own:
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
async def test_a_worker_cannot_create_a_stream_of_forbidden_subjects(server: NatsServer, user: str) -> None:
    async with as_user(server, user) as (client, violations):
        await client.publish("$JS.API.STREAM.CREATE.spy", b'{"name": "spy", "subjects": ["mmd.ai.chat.>"]}')
        await client.publish("$JS.API.CONSUMER.CREATE.spy.x", b"{}")
        await client.flush()
        await told(violations, 2)
    assert len(violations) == 2
    assert all("permissions violation for publish" in words for words in violations)


async def test_the_gateway_makes_the_queue_and_encoders_pull_from_it(server: NatsServer) -> None:
    gateway, encoder = [
        await Bus.connect(server.url, f"{user}-0", SUBJECTS, inbox=inbox_of(user), login=login(user))
        for user in (GATEWAY_USER, "encode")
    ]
    made, pulled = EncodeQueue(gateway), EncodeQueue(encoder)
    await made.ensure()
    assert set(await made.depth()) == {"image", "video", "audio"}
    assert await pulled.pull(["image"], batch=1, wait=0.3) == []
    with pytest.raises(PeerLostError):
        await pulled.ensure()
    await pulled.close()
    for bus in (gateway, encoder):
        await bus.close()


async def test_the_gateway_records_tokens_of_tenants_and_workers_cannot(server: NatsServer) -> None:
    gateway, decode = [
        await Bus.connect(server.url, f"{user}-0", SUBJECTS, inbox=inbox_of(user), login=login(user))
        for user in (GATEWAY_USER, "decode")
    ]
    records = TokenRecords(gateway)
    await records.ensure()
    assert await records.write(1, "search", 5, await records.read(1, "search"))
    assert (await records.read(1, "search")).total == 5
    with pytest.raises(PeerLostError):
        await TokenRecords(decode).write(1, "search", 0, RecordedTokens(5, 1))
    for bus in (gateway, decode):
        await bus.close()


async def test_the_gateway_stores_files_and_workers_cannot_read_them(server: NatsServer) -> None:
    gateway, encode = [
        await Bus.connect(server.url, f"{user}-0", SUBJECTS, inbox=inbox_of(user), login=login(user))
        for user in (GATEWAY_USER, "encode")
    ]
    limits = StoreLimits(1 << 20, 1 << 20, 60.0)
    entries, contents = FileLog(gateway, limits), FileBytes(gateway, limits)
    await entries.catch_up()
    assert await entries.append(StoredFile("file-1", "search", "ready", 1.0, 2.0, 3))
    await contents.write("file-1", 0, b"abc")
    assert await contents.read("file-1", 0) == b"abc"
    strangers = FileBytes(encode, limits)
    for refused in (strangers.read("file-1", 0), strangers.write("file-1", 0, b"x")):
        with pytest.raises((PeerLostError, TimeoutError)):
            async with asyncio.timeout(1):
                await refused
    with pytest.raises((PeerLostError, TimeoutError)):
        async with asyncio.timeout(1):
            await FileLog(encode, limits).append(StoredFile("file-1", "other", "ready", 1.0, 2.0))
    assert await contents.read("file-1", 0) == b"abc"
    await contents.remove("file-1")
    await entries.forget("file-1")
    for bus in (gateway, encode):
        await bus.close()


@pytest.mark.parametrize(("user", "password"), [("encode", "wrong"), ("root", "x"), ("encode", "")])
async def test_no_client_connects_without_the_password(server: NatsServer, user: str, password: str) -> None:
    given = Login(user, password) if password else None
    with pytest.raises(PeerLostError, match=r"(?i)authorization") as refused:
        await Bus.connect(server.url, "stranger", SUBJECTS, timeout=2.0, login=given)
    assert not password or f":{password}@" not in str(refused.value)


def test_every_password_is_its_own_and_new_each_time() -> None:
    again = with_passwords({})["stringData"]
    assert set(again) == {*USERS, *map(previous_of, USERS)}
    assert len({*again.values(), *PASSWORDS.values()}) == 4 * len(USERS)


def test_no_user_may_speak_for_another_deployment() -> None:
    for user in USERS:
        may = permissions_of(user, "ai", "chat")
        own = ("mmd.ai.chat.", "_INBOX.", "$JS.")
        assert all(subject.startswith(own) for subject in (*may.publish, *may.subscribe))


def test_encoders_of_the_last_release_may_requeue_their_jobs() -> None:
    """The server has its new permissions before the encoders are replaced."""
    work = Subjects("ai", "chat", "*").encode_work("*", "*")
    assert work in permissions_of("encode", "ai", "chat").publish


async def test_messages_without_permission_do_not_arrive(server: NatsServer) -> None:
    async with as_user(server, "decode") as (decode, _), as_user(server, "encode") as (encode, violations):
        heard = await decode.subscribe(SUBJECTS.kv_offer("d-0"))
        await decode.flush()
        await encode.publish(SUBJECTS.kv_offer("d-0"), b"let me in")
        await encode.flush()
        with pytest.raises(asyncio.TimeoutError):
            await heard.next_msg(timeout=0.3)
        await told(violations, 1)
    assert any("kv-offer" in words for words in violations)


async def test_no_error_of_a_lost_connection_contains_the_password(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The send buffer overflows and a request fails while the server is gone: each has its message."""
    caplog.set_level(logging.DEBUG)
    server = NatsServer(
        tmp_path,
        configuration=users_configuration("ai", "chat"),
        environment={f"{PASSWORD_PREFIX}{user}": password for user, password in PASSWORDS.items()},
    ).start()
    bus = await Bus.connect(
        server.url, "g-0", SUBJECTS, inbox=inbox_of(GATEWAY_USER), login=login(GATEWAY_USER)
    )
    await bus.bulk()
    await asyncio.to_thread(server.kill)
    await until(lambda: not bus.is_connected)
    words = [repr(bus._login), repr(vars(bus))]

    async def fill() -> None:
        for _ in range(64):
            await bus.publish(SUBJECTS.cancel, Frame(Cancel("r", 0), b"x" * 100_000))

    with pytest.raises(OverloadedError) as full:
        await fill()
    with pytest.raises(MmdError) as unanswered:
        await bus.request(SUBJECTS.prefill("p-0"), Cancel("r", 0), Cancel, timeout=0.1)
    await bus.close()
    words += [str(failure.value) for failure in (full, unanswered)]
    words += [record.getMessage() for record in caplog.records]
    assert [line for line in words if PASSWORDS[GATEWAY_USER] in line] == []


@pytest.mark.parametrize("url", ["nats://gateway:s3cret@n:4222", "nats://n:1,tls://gateway:s3cret@m:2"])
async def test_a_url_with_credentials_is_refused_without_repeating_them(url: str) -> None:
    with pytest.raises(ValueError, match="MMD_NATS_PASSWORD") as refused:
        await Bus.connect(url, "g-0", SUBJECTS, timeout=0.5)
    assert "s3cret" not in str(refused.value)


async def test_two_rotations_lock_out_no_bus_and_end_the_first_password(tmp_path: Path) -> None:
    """The server restarts with the new password and the last, the file that a pod reads follows later, and requests wait meanwhile."""
    server = NatsServer(
        tmp_path / "server",
        configuration=users_configuration("ai", "chat"),
        environment={f"{PASSWORD_PREFIX}{user}": password for user, password in PASSWORDS.items()},
    ).start()
    file = tmp_path / "password"
    file.write_text(PASSWORDS["prefill"])
    reread = Login("prefill", PASSWORDS["prefill"], previous_of("prefill"), tmp_path)
    bus = await Bus.connect(server.url, "p-0", SUBJECTS, inbox=inbox_of("prefill"), login=reread)

    async def echo(said: Cancel) -> Cancel:
        return said

    await bus.serve(SUBJECTS.embedding("p-0"), Cancel, echo)
    for _ in range(2):
        passwords = with_passwords({})["stringData"]
        passwords |= {previous_of(user): server.environment[f"{PASSWORD_PREFIX}{user}"] for user in USERS}
        await asyncio.to_thread(server.kill)
        server.environment = {f"{PASSWORD_PREFIX}{user}": value for user, value in passwords.items()}
        server.start()
        encoder = await Bus.connect(
            server.url, "e-0", SUBJECTS, inbox_of("encode"), login=Login("encode", passwords["encode"])
        )
        said = await until(
            lambda encoder=encoder: encoder.request(SUBJECTS.embedding("p-0"), Cancel("r", 0), Cancel, 2.0),
            "the other pod has connected again",
            retried=(PeerLostError, DeadlineError),
        )
        assert said == Cancel("r", 0)
        await encoder.close()
        file.write_text(passwords["prefill"])
    for user in ("prefill", previous_of("prefill")):
        login = Login(user, PASSWORDS["prefill"])
        with pytest.raises(PeerLostError, match=r"(?i)authorization"):
            await Bus.connect(server.url, "stranger", SUBJECTS, timeout=2.0, login=login)
    await bus.close()
    await asyncio.to_thread(server.stop)
