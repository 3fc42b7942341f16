"""Fetching from real servers on loopback: what is refused, what is bounded, and where the connection really goes."""

import asyncio
import base64
import contextlib
import gzip
import ipaddress
import re
import socket
import string
import threading
from urllib.parse import unquote_to_bytes

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmd_api.contract.errors import FetchError, OverloadedError
from mmd_api.spec.media import ImagePolicy, MediaPolicy
from mmd_workers.media import fetch as fetch_module
from mmd_workers.media import lookup as lookup_module
from mmd_workers.media.fetch import fetch, is_public
from mmd_workers.media.lookup import MAX_LOOKUPS

OPEN = MediaPolicy(allow_private_addresses=True, image=ImagePolicy(max_bytes=4096), fetch_timeout_seconds=5)


async def unbounded(num_bytes: int) -> None:
    """There is always room."""


CLOSED = MediaPolicy(image=ImagePolicy(max_bytes=4096))


@contextlib.asynccontextmanager
async def server(answer):
    """An HTTP server whose `answer(head, writer)` writes raw bytes; yields (port, request heads seen)."""
    seen = []

    async def serve(reader, writer):
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            seen.append(head)
            await answer(head, writer)
            await writer.drain()
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield listening.sockets[0].getsockname()[1], seen
    finally:
        listening.close()


def reply(body=b"", status="200 OK", **headers):
    async def answer(head, writer):
        fields = {"Content-Length": str(len(body)), "Connection": "close"} | {
            name.replace("_", "-"): value for name, value in headers.items()
        }
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        writer.write(f"HTTP/1.1 {status}\r\n{lines}\r\n".encode() + body)

    return answer


async def test_a_file_arrives_under_its_own_host_name():
    async with server(reply(b"pixels")) as (port, seen):
        assert await fetch(f"http://localhost:{port}/a.png?x=1", OPEN, "image", unbounded) == b"pixels"
    assert f"Host: localhost:{port}" in seen[0]
    assert seen[0].startswith("GET /a.png?x=1 ")


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "localhost", "2130706433", "0x7f.1", "[::1]", "[::ffff:127.0.0.1]", "10.0.0.8", "192.168.1.1", "172.16.3.4",
     "169.254.169.254", "[fe80::1]", "[fd00::1]", "224.0.0.1", "0.0.0.0", "[::]", "100.64.0.1", "[64:ff9b::7f00:1]", "[2002:7f00:1::]",
     "168.63.129.16", "[::ffff:168.63.129.16]", "[64:ff9b::a83f:8110]", "100.100.100.200", "192.0.0.192", "169.254.170.2",
     "[fd00:ec2::254]", "[fd20:ce::254]"],
)  # fmt: skip
async def test_addresses_that_are_not_public_are_refused(host):
    with pytest.raises(FetchError, match=r"not public.*spec\.gateway\.media\.allowPrivateAddresses"):
        await fetch(f"http://{host}/", CLOSED, "image", unbounded)


def test_public_addresses_are_public():
    for text in (
        "93.184.215.14",
        "2606:2800:21f:cb07:6820:80da:af6b:8b2c",
        "::ffff:8.8.8.8",
        "64:ff9b::808:808",
    ):
        assert is_public(ipaddress.ip_address(text)), text


async def test_a_name_is_resolved_once_and_the_checked_address_is_used(monkeypatch):
    """DNS rebinding: the second answer would be another machine; nobody asks for it."""
    asked = []

    def resolve(host, port):
        asked.append(host)
        address = "127.0.0.1" if len(asked) == 1 else "127.9.9.9"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]

    async with server(reply(b"checked")) as (port, seen):
        real = socket.getaddrinfo

        def only_names(host, port, *args, **kwargs):
            return resolve(host, port) if host == "rebind.example" else real(host, port, *args, **kwargs)

        monkeypatch.setattr(socket, "getaddrinfo", only_names)
        assert await fetch(f"http://rebind.example:{port}/", OPEN, "image", unbounded) == b"checked"
    assert asked == ["rebind.example"]
    assert f"Host: rebind.example:{port}" in seen[0]


@contextlib.contextmanager
def silent_name_server(monkeypatch):
    """Names below dead.example have no answer until the block ends. Yields the names that were asked for."""
    real, answered, asked = socket.getaddrinfo, threading.Event(), []

    def resolve(host, *args, **kwargs):
        asked.append(host)
        if host.endswith(".dead.example"):
            answered.wait()
            raise socket.gaierror("no such host")
        return real(host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    try:
        yield asked
    finally:
        answered.set()


async def abandoned(names):
    """Fetches that have begun to look up their hosts, and are cancelled."""
    tasks = [asyncio.create_task(fetch(f"http://{name}/", OPEN, "image", unbounded)) for name in names]
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


DEAD = [f"{n}.dead.example" for n in range(MAX_LOOKUPS)]


async def test_abandoned_lookups_are_bounded_and_delay_no_others(monkeypatch):
    monkeypatch.setattr(lookup_module, "MAX_WAITING", 0)
    with silent_name_server(monkeypatch):
        await abandoned(DEAD)
        with pytest.raises(OverloadedError, match=f"{MAX_LOOKUPS} host names are being resolved"):
            await fetch("http://one.dead.example/", OPEN, "image", unbounded)
        async with asyncio.timeout(30):
            assert await asyncio.get_running_loop().getaddrinfo("localhost", 4222)
    async with server(reply(b"pixels")) as (port, _), asyncio.timeout(30):
        while True:
            with contextlib.suppress(OverloadedError):
                assert await fetch(f"http://localhost:{port}/", OPEN, "image", unbounded) == b"pixels"
                return
            await asyncio.sleep(0.01)


async def test_lookups_wait_their_turn_and_one_host_is_looked_up_once(monkeypatch):
    async with server(reply(b"pixels")) as (port, _), asyncio.timeout(60):
        with silent_name_server(monkeypatch) as asked:
            await abandoned([*DEAD, *DEAD])
            url = f"http://localhost:{port}/"
            patient = OPEN.model_copy(update={"fetch_timeout_seconds": 60})
            waiting = [asyncio.create_task(fetch(url, patient, "image", unbounded)) for _ in range(3)]
            given_up = asyncio.create_task(fetch("http://127.0.0.1.nip.example/", OPEN, "image", unbounded))
            await asyncio.sleep(0.1)
            assert len(asked) == MAX_LOOKUPS
            given_up.cancel()
        assert await asyncio.gather(*waiting) == [b"pixels"] * 3
    assert "127.0.0.1.nip.example" not in asked


async def test_one_private_address_among_public_ones_refuses_the_host(monkeypatch):
    def resolve(host, port, **kwargs):
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (a, port)) for a in ("8.8.8.8", "127.0.0.1")]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with pytest.raises(
        FetchError, match=r"the host mixed\.example resolves to an address that is not public"
    ):
        await fetch("http://mixed.example/", CLOSED, "image", unbounded)


async def test_a_redirect_to_a_private_address_is_checked_again(monkeypatch):
    """The first address passes the check (as a public one would); the metadata address behind the redirect does not."""
    monkeypatch.setattr(fetch_module, "is_public", lambda a: str(a) == "127.0.0.1" or is_public(a))
    async with server(reply(status="302 Found", Location="http://169.254.169.254/latest/meta-data")) as (
        port,
        seen,
    ):
        monkeypatch.setattr(fetch_module, "PUBLIC_PORTS", (80, 443, port))
        with pytest.raises(
            FetchError, match=r"the host 169\.254\.169\.254 resolves to an address that is not public"
        ):
            await fetch(f"http://127.0.0.1:{port}/", CLOSED, "image", unbounded)
    assert len(seen) == 1


async def test_redirects_are_followed_three_times_and_no_more():
    async def answer(head, writer):
        left = int(head.split()[1].strip("/"))
        location = f"/{left - 1}"
        await (reply(b"end") if left == 0 else reply(status="307 Temporary Redirect", Location=location))(
            head, writer
        )

    async with server(answer) as (port, _):
        assert await fetch(f"http://127.0.0.1:{port}/3", OPEN, "image", unbounded) == b"end"
        with pytest.raises(FetchError, match="more than 3 times"):
            await fetch(f"http://127.0.0.1:{port}/9", OPEN, "image", unbounded)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("ftp://example.org/a", "scheme"),
        ("file:///etc/passwd", "scheme"),
        ("http://", "scheme"),
        ("http://user:secret@example.org/", "user name"),
        ("http://8.8.8.8:22/", "port 22"),
        ("http://" + "a" * 9000, "longer than"),
        ("http://exa mple.org\x00/", "invalid URL|cannot be resolved"),
        ("data:image/png;base64", "no comma"),
        ("data:image/png;base64,####", "base64"),
        ("data:image/png;base64,AAAAA", "base64"),
        ("data:image/png;base64,A=A=", "base64"),
        ("data:text/plain,%zz", "percent"),
        ("data:text/plain,\u00e9", "percent"),
        ("data:" + "a" * 9000 + ",", "no comma"),
    ],
)
async def test_malformed_and_refused_urls_say_so(url, words):
    with pytest.raises(FetchError, match=words):
        await fetch(url, CLOSED, "image", unbounded)


@given(st.text(alphabet=string.printable + "%%%"), st.integers(1, 9))
def test_percent_encoding_cut_anywhere_decodes_like_the_standard_library(text, quads):
    escaped = re.sub("%(?![0-9A-Fa-f]{2})", "%25", text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fetch_module, "PIECE_CHARACTERS", 4 * quads)
        assert fetch_module._data_url("data:," + escaped, 1 << 20, "f") == unquote_to_bytes(escaped)


@given(st.binary(), st.integers(1, 9))
def test_base64_is_decoded_wherever_cut_and_padded_only_at_its_end(data, quads):
    text = base64.b64encode(data).decode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fetch_module, "PIECE_CHARACTERS", 4 * quads)
        assert fetch_module._data_url("data:;base64," + text, 1 << 20, "f") == data
        if text.endswith("="):
            with pytest.raises(FetchError, match="base64"):
                fetch_module._data_url("data:;base64," + text + text, 1 << 20, "f")


@given(st.binary(), st.integers(1, 9))
def test_base64_may_be_in_lines_of_the_alphabet_of_urls_and_unpadded(data, quads):
    plain, of_urls = base64.b64encode(data).decode(), base64.urlsafe_b64encode(data).decode()
    lines = base64.encodebytes(data).decode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fetch_module, "PIECE_CHARACTERS", 4 * quads)
        for text in (
            of_urls,
            of_urls.rstrip("="),
            plain.rstrip("="),
            lines,
            lines.replace("\n", "\r\n"),
            f" {plain}\n",
        ):
            assert fetch_module._data_url("data:;base64," + text, 1 << 20, "f") == data


async def test_data_urls_are_decoded_and_bounded():
    assert (
        await fetch(
            "data:image/png;base64," + base64.b64encode(b"\0\xff!").decode(), CLOSED, "image", unbounded
        )
        == b"\0\xff!"
    )
    assert await fetch("data:,%00a%FF", CLOSED, "image", unbounded) == b"\0a\xff"
    assert (
        len(await fetch("data:;base64," + base64.b64encode(bytes(4096)).decode(), CLOSED, "image", unbounded))
        == 4096
    )
    for url in ("data:;base64," + base64.b64encode(bytes(4097)).decode(), "data:," + "a" * 4097):
        with pytest.raises(
            FetchError, match=r"larger than 4096 bytes.*spec\.gateway\.media\.image\.maxBytes"
        ):
            await fetch(url, CLOSED, "image", unbounded)


async def test_hosts_outside_the_list_are_refused():
    policy = CLOSED.model_copy(update={"allowed_hosts": ["cdn.example.org"]})
    with pytest.raises(FetchError, match=r"evil\.org is not allowed.*allowedHosts"):
        await fetch("https://evil.org/a.png", policy, "image", unbounded)
    with pytest.raises(FetchError, match="allowHttp"):
        await fetch(
            "https://evil.org/a.png", policy.model_copy(update={"allow_http": False}), "image", unbounded
        )


async def test_a_body_over_the_limit_is_cut_even_without_a_length():
    async def endless(head, writer):
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while not writer.is_closing():
            writer.write(b"x" * 65536)
            await writer.drain()

    async with server(reply(b"x" * 5000)) as (port, _):
        with pytest.raises(FetchError, match="maxBytes"):
            await fetch(f"http://127.0.0.1:{port}/", OPEN, "image", unbounded)
    async with server(endless) as (port, _):
        with pytest.raises(FetchError, match="maxBytes"):
            await fetch(f"http://127.0.0.1:{port}/", OPEN, "image", unbounded)


async def test_a_length_that_lies_is_noticed():
    async with server(reply(b"short", Content_Length="4000")) as (port, _):
        with pytest.raises(FetchError, match="was interrupted"):
            await fetch(f"http://127.0.0.1:{port}/", OPEN, "image", unbounded)


async def test_a_compressed_body_is_refused_unopened():
    async with server(reply(gzip.compress(bytes(3_000_000)), Content_Encoding="gzip")) as (port, seen):
        with pytest.raises(FetchError, match="gzip-encoded"):
            await fetch(f"http://127.0.0.1:{port}/", OPEN, "image", unbounded)
    assert "accept-encoding: identity" in seen[0].lower()


async def test_room_is_reserved_before_bytes_and_never_beyond_the_announced_length():
    reserved = []

    async def note(num_bytes: int) -> None:
        reserved.append(num_bytes)

    policy = OPEN.model_copy(update={"image": ImagePolicy(max_bytes=64 << 20)})
    async with server(reply(b"x" * (3 << 20))) as (port, _):
        data = await fetch(f"http://127.0.0.1:{port}/", policy, "image", note)
    assert len(data) == 3 << 20 == sum(reserved)
    assert len(reserved) == 3


async def test_waiting_for_room_does_not_count_against_the_server():
    async def wait(num_bytes: int) -> None:
        await asyncio.sleep(1.5)

    policy = OPEN.model_copy(update={"fetch_timeout_seconds": 1})
    async with server(reply(b"pixels")) as (port, _):
        assert await fetch(f"http://127.0.0.1:{port}/", policy, "image", wait) == b"pixels"


async def test_a_slow_drip_ends_with_the_total_timeout():
    async def drip(head, writer):
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4000\r\n\r\n")
        while not writer.is_closing():
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.05)

    async with server(drip) as (port, _):
        with pytest.raises(FetchError, match="fetchTimeoutSeconds"):
            await fetch(
                f"http://127.0.0.1:{port}/",
                OPEN.model_copy(update={"fetch_timeout_seconds": 1}),
                "image",
                unbounded,
            )


async def test_a_status_other_than_ok_and_a_dead_port_are_errors():
    async with server(reply(status="404 Not Found")) as (port, _):
        with pytest.raises(FetchError, match="status 404"):
            await fetch(f"http://127.0.0.1:{port}/", OPEN, "image", unbounded)
    with pytest.raises(FetchError, match="cannot be reached"):
        await fetch(f"http://127.0.0.1:{port}/", OPEN, "image", unbounded)


async def test_certificate_authorities_are_read_once_and_not_for_each_download(monkeypatch):
    fetch_module._authorities.cache_clear()
    read = []
    create = httpx.create_ssl_context
    monkeypatch.setattr(httpx, "create_ssl_context", lambda **how: read.append(how) or create(**how))
    async with server(reply(b"pixels")) as (port, _):
        for _ in range(3):
            await fetch(f"http://localhost:{port}/a.png", OPEN, "image", unbounded)
    assert read == [{"trust_env": False}]
