"""TLS of the port for clients: real connections to a gateway whose Secret changes, breaks, or is not there yet."""

from __future__ import annotations

import asyncio
import errno
import json
import random
import ssl
from datetime import timedelta
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from mmd_api.contract.subjects import Subjects
from mmd_cli.client import AskError, Client
from mmd_cli.local.pods import free_port
from mmd_workers.gateway.access.certificate import (
    Certificate,
    InvalidCertificateError,
    LiveCertificate,
    load_pair,
)
from mmd_workers.model.frontend import HfFrontend
from mmd_workers.observe.metrics import Metrics
from mmd_workers.wire.messages.prefill import GenerateRequest
from mmd_workers.wire.server import NatsServer
from support.harness.waiting import is_closed, until
from support.servers.certificates import Authority, key_pem, serial_of
from tests.gateway.mounted import MountedSecret
from tests.gateway.running import Launch
from tests.gateway.scripted import ScriptedWorker
from tests.gateway.spawned import BODY, MESH, TEXT, running

TLS = {"secretName": "gateway-tls"}


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


async def shown(url: httpx.URL | str, trusted: ssl.SSLContext) -> int:
    """The serial number of the certificate that a new connection gets."""
    at = httpx.URL(url)
    _, writer = await asyncio.wait_for(
        asyncio.open_connection(at.host, at.port, ssl=trusted, server_hostname="127.0.0.1"), 30
    )
    certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return x509.load_der_x509_certificate(certificate).serial_number


async def test_clients_are_answered_over_tls_and_the_admin_port_stays_plain(
    launch: Launch, authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = MountedSecret(tmp_path / "tls")
    secret.update(pair := authority.issue())
    gateway = await launch(tls=TLS, tls_folder=str(secret.folder), trusted=authority.trusted())
    await gateway.worker(TEXT)
    answer = await gateway.openai.chat.completions.create(
        model=BODY["model"], messages=BODY["messages"], temperature=0
    )
    assert answer.choices[0].message.content == TEXT
    assert await shown(gateway.url, authority.trusted()) == serial_of(pair["tls.crt"])
    assert (await gateway.admin.get("/readyz")).json()["ready"] is True
    state = (await gateway.admin.get("/debug/state")).json()["tls"]
    expires = x509.load_pem_x509_certificate(pair["tls.crt"].encode()).not_valid_after_utc
    assert state == {"enabled": True, "expires": expires.isoformat(), "fault": ""}
    assert await gateway.metric("mmd_gateway_certificate_expiry_timestamp_seconds") == expires.timestamp()
    async with httpx.AsyncClient() as plain:
        with pytest.raises(httpx.HTTPError):
            await plain.get(gateway.url.replace("https", "http") + "/health")
    with pytest.raises(AskError, match="SSL_CERT_FILE"):
        _ = await asyncio.to_thread(lambda: Client(gateway.url).model)
    trusted = tmp_path / "ca.crt"
    trusted.write_text(authority.pem)
    monkeypatch.setenv("SSL_CERT_FILE", str(trusted))
    assert await asyncio.to_thread(lambda: Client(gateway.url).model) == BODY["model"]


async def test_old_versions_of_tls_are_refused(launch: Launch, authority: Authority, tmp_path: Path) -> None:
    secret = MountedSecret(tmp_path / "tls")
    secret.update(authority.issue())
    gateway = await launch(tls=TLS, tls_folder=str(secret.folder), trusted=authority.trusted())
    old = authority.trusted()
    with pytest.warns(DeprecationWarning, match="TLSv1"):
        old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
    old.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.raises((ssl.SSLError, ConnectionResetError)):
        await shown(gateway.url, old)
    newer = authority.trusted()
    newer.maximum_version = ssl.TLSVersion.TLSv1_2
    assert await shown(gateway.url, newer)


@pytest.mark.processes
async def test_certificates_rotate_under_a_live_stream_and_broken_pairs_are_ignored(
    own_nats_server: NatsServer, tmp_path: Path, frontend: HfFrontend, authority: Authority
) -> None:
    secret = MountedSecret(tmp_path / "tls")
    secret.update(first := authority.issue())
    second, third = authority.issue(), authority.issue()
    ids = frontend.tokenizer.encode(TEXT, add_special_tokens=False)
    go_on, admin_port = asyncio.Event(), free_port()

    async def answer_in_halves(worker: ScriptedWorker, request: GenerateRequest) -> None:
        await worker.tokens(request, [0])
        await go_on.wait()
        await worker.tokens(request, list(range(1, len(worker.answer))))

    environment = {"MMD_TLS_FOLDER": str(secret.folder), "MMD_ADMIN_PORT": str(admin_port)}
    async with (
        running(own_nats_server, tmp_path, {"tls": TLS}, authority.trusted(), **environment) as (
            child,
            client,
        ),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{admin_port}", timeout=30) as admin,
    ):
        worker = await ScriptedWorker.start(
            own_nats_server.url, Subjects("test", "own", MESH), "decode-0", ids, answer_in_halves
        )

        async def until_shown(pair: dict[str, str]) -> None:
            async def is_shown() -> bool:
                return await shown(client.base_url, authority.trusted()) == serial_of(pair["tls.crt"])

            await until(is_shown, pause_seconds=0.1)

        async def until_fault(words: str) -> None:
            async def is_reported() -> bool:
                return words in (await admin.get("/demand")).json()["tls_fault"]

            await until(is_reported, f"a fault with {words!r} is reported")

        try:
            async with client.stream("POST", "/v1/chat/completions", json={**BODY, "stream": True}) as answer:
                lines = answer.aiter_lines()
                text = ""
                async for line in lines:
                    if line.startswith("data: {"):
                        text += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
                    if text:
                        break
                assert await shown(client.base_url, authority.trusted()) == serial_of(first["tls.crt"])
                secret.update(second)
                await until_shown(second)
                secret.update({"tls.crt": third["tls.crt"], "tls.key": first["tls.key"]})
                await until_fault("is not the key of the first certificate")
                assert await shown(client.base_url, authority.trusted()) == serial_of(second["tls.crt"])
                assert "mmd_gateway_certificate_rejected_state 1.0" in (await admin.get("/metrics")).text
                assert (await admin.get("/readyz")).status_code == 200
                go_on.set()
                async for line in lines:
                    if line.startswith("data: {"):
                        text += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
            assert text == TEXT
            secret.update(third)
            await until_shown(third)
            assert (await admin.get("/demand")).json()["tls_fault"] == ""
            assert child.returncode is None
        finally:
            await worker.close()


async def test_without_a_valid_certificate_pair_the_client_port_stays_closed(
    launch: Launch, authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmd_workers.process.live.CHECK_SECONDS", 0.02)
    secret = MountedSecret(tmp_path / "tls")
    secret.update({"tls.crt": "", "tls.key": ""})
    starting = asyncio.create_task(
        launch(tls=TLS, tls_folder=str(secret.folder), trusted=authority.trusted())
    )
    try:
        frame = starting.get_stack()[-1]
        while "settings" not in frame.f_locals:
            await asyncio.sleep(0.02)
            frame = starting.get_stack()[-1]
        settings = frame.f_locals["settings"]
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{settings.admin_port}") as admin:
            async with asyncio.timeout(30):
                reason = ""
                while "TLS" not in reason:
                    await asyncio.sleep(0.02)
                    try:
                        ready = await admin.get("/readyz")
                    except httpx.HTTPError:
                        continue
                    reason = ready.json()["reason"]
            assert ready.status_code == 503
            assert "tls.crt is no chain of PEM certificates" in reason
            assert (await admin.get("/livez")).status_code == 200
        assert await is_closed("127.0.0.1", settings.http_port)
    finally:
        secret.update(authority.issue())
        gateway = await asyncio.wait_for(starting, 30)
    assert (await gateway.http.get("/health")).status_code == 200


# --- what is wrong with a pair ------------------------------------------------------------------------------------------


VERSION_3, VERSION_5 = (bytes([0xA0, 3, 2, 1, number]) for number in (2, 4))


def changed(pem: str, before: bytes, after: bytes) -> str:
    """The first certificate with other bytes."""
    der = x509.load_pem_x509_certificate(pem.encode()).public_bytes(serialization.Encoding.DER)
    assert before in der
    return ssl.DER_cert_to_PEM_cert(der.replace(before, after, 1))


def _pairs(authority: Authority) -> dict[str, tuple[dict[str, str], str]]:
    good, other = authority.issue(), authority.issue()
    locked = key_pem(ec.generate_private_key(ec.SECP256R1()), b"secret")
    first, rest = good["tls.crt"].split("-----END CERTIFICATE-----\n", 1)
    turned = rest + first + "-----END CERTIFICATE-----\n"
    return {
        "no certificate": ({**good, "tls.crt": "hello"}, "tls.crt is no chain of PEM certificates"),
        "a cut certificate": ({**good, "tls.crt": good["tls.crt"][:300]}, "tls.crt is no chain"),
        "files exchanged": ({"tls.crt": good["tls.key"], "tls.key": good["tls.crt"]}, "tls.crt is no chain"),
        "no key": ({**good, "tls.key": ""}, "tls.key is no PEM private key"),
        "a cut key": ({**good, "tls.key": good["tls.key"][:100]}, "tls.key is no PEM private key"),
        "an encrypted key": ({**good, "tls.key": locked}, "tls.key is encrypted"),
        "another key": ({**good, "tls.key": other["tls.key"]}, "is not the key of the first certificate"),
        "the issuer first": ({**good, "tls.crt": turned}, "is not the key of the first certificate"),
        "expired": (authority.issue(timedelta(days=-1)), "tls.crt has expired"),
        "not valid yet": (
            authority.issue(begins=timedelta(hours=1)),
            "tls.crt is not valid before .*check the clock",
        ),
        "another version of X.509": (
            {**good, "tls.crt": changed(good["tls.crt"], VERSION_3, VERSION_5)},
            "tls.crt is no chain",
        ),
    }


@pytest.mark.parametrize("name", list(_pairs(Authority())))
def test_refusing_an_unusable_pair_names_file_and_remedy_but_no_key(name: str, authority: Authority) -> None:
    pair, words = _pairs(authority)[name]
    with pytest.raises(InvalidCertificateError, match=words) as refused:
        load_pair(pair["tls.crt"].encode(), pair["tls.key"].encode())
    assert not set(pair["tls.key"].splitlines()) & set(str(refused.value).splitlines())
    assert refused.value.__cause__ is None


def test_a_key_that_openssl_finds_too_weak_is_refused_in_its_words(authority: Authority) -> None:
    pair = authority.issue(key=rsa.generate_private_key(65537, 1024))
    with pytest.raises(InvalidCertificateError, match="ee key too small"):
        load_pair(pair["tls.crt"].encode(), pair["tls.key"].encode())


@pytest.mark.filterwarnings("ignore:Parsed a serial number")
def test_whatever_bytes_a_certificate_has_it_is_used_or_refused(authority: Authority) -> None:
    pair, chance = authority.issue(), random.Random(1)
    der = ssl.PEM_cert_to_DER_cert(pair["tls.crt"].split("-----END")[0] + "-----END CERTIFICATE-----")
    refused = 0
    for _ in range(1000):
        mutant = bytearray(der)
        for _ in range(chance.choice((1, 1, 2))):
            mutant[chance.randrange(len(mutant))] = chance.randrange(256)
        try:
            load_pair(ssl.DER_cert_to_PEM_cert(bytes(mutant)).encode(), pair["tls.key"].encode())
        except InvalidCertificateError:
            refused += 1
    assert refused > 100


class Following:
    """A certificate that follows the files of a folder, checked by hand."""

    def __init__(self, folder: Path) -> None:
        self.folder, metrics = folder, Metrics(("gateway",))
        self.certificate = Certificate(metrics)
        self.live = LiveCertificate(folder, self.certificate, metrics)

    async def after(self, pair: dict[str, str]) -> ssl.SSLContext | None:
        """What new connections get once the files have been this pair at two checks."""
        for name, text in pair.items():
            (self.folder / name).write_text(text)
        await self.live.check()
        await self.live.check()
        return self.certificate.context()


async def test_an_unreadable_certificate_leaves_the_last_valid_one_in_force(
    tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Following(tmp_path)
    good, other = authority.issue(), authority.issue()
    before = await one.after(good)
    assert before is not None
    assert await one.after({"tls.crt": changed(good["tls.crt"], VERSION_3, VERSION_5)}) is before
    assert "no chain of PEM certificates" in one.certificate.fault

    def fail(*_: object, **__: object) -> None:
        raise KeyError(good["tls.key"])

    with monkeypatch.context() as patch:
        patch.setattr("mmd_workers.gateway.access.certificate.serialization.load_pem_private_key", fail)
        assert await one.after(other) is before
    assert one.certificate.fault == "cannot read tls.crt and tls.key (KeyError); create them anew"
    assert await one.after(authority.issue()) not in (None, before)


async def test_a_certificate_is_taken_once_it_is_valid_and_loadable(
    tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Following(tmp_path)
    before = await one.after(authority.issue())
    early = authority.issue(begins=timedelta(seconds=2))
    assert await one.after(early) is before
    assert "is not valid before" in one.certificate.fault
    async with asyncio.timeout(30):
        while one.certificate.fault:
            await asyncio.sleep(0.1)
            await one.live.check()
    assert (since := one.certificate.context()) not in (None, before)

    def no_descriptor(_: str) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr("mmd_workers.gateway.access.certificate.os.memfd_create", no_descriptor)
        assert await one.after(authority.issue()) is since
    assert one.certificate.fault == "cannot load tls.crt and tls.key (Too many open files)"
    await one.live.check()
    assert (one.certificate.context() not in (None, since), one.certificate.fault) == (True, "")


async def test_a_pair_is_taken_only_after_both_files_have_changed(
    tmp_path: Path, authority: Authority
) -> None:
    first, second = authority.issue(), authority.issue()
    for name, text in first.items():
        (tmp_path / name).write_text(text)
    certificate = Certificate(metrics := Metrics(("gateway",)))
    live = LiveCertificate(tmp_path, certificate, metrics)
    await live.check()
    before = certificate.context()
    assert before is not None
    (tmp_path / "tls.crt").write_text(second["tls.crt"])
    await live.check()
    assert (certificate.context(), certificate.fault) == (before, "")
    (tmp_path / "tls.key").write_text(second["tls.key"])
    await live.check()
    assert (certificate.context(), certificate.fault) == (before, "")
    await live.check()
    assert certificate.context() not in (None, before)
    (tmp_path / "tls.key").unlink()
    await live.check()
    assert certificate.fault == "No such file or directory"
    assert certificate.context() is not None
