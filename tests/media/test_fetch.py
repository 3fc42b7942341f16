"""Fetching from real servers on loopback: what is refused, what is bounded, and where the connection really goes."""

import asyncio
import base64
import contextlib
import gzip
import ipaddress
import socket
import time

import pytest

from mmd_api.spec import ImagePolicy, MediaPolicy
from mmd_workers.errors import FetchError
from mmd_workers.media import fetch as fetch_module
from mmd_workers.media.fetch import fetch, is_public

OPEN = MediaPolicy(allow_private_addresses=True, image=ImagePolicy(max_bytes=4096), fetch_timeout_seconds=5)
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
        assert await fetch(f"http://localhost:{port}/a.png?x=1", OPEN, "image") == b"pixels"
    assert f"Host: localhost:{port}" in seen[0]
    assert seen[0].startswith("GET /a.png?x=1 ")


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "localhost", "2130706433", "0x7f.1", "[::1]", "[::ffff:127.0.0.1]", "10.0.0.8", "192.168.1.1", "172.16.3.4",
     "169.254.169.254", "[fe80::1]", "[fd00::1]", "224.0.0.1", "0.0.0.0", "[::]", "100.64.0.1", "[64:ff9b::7f00:1]", "[2002:7f00:1::]"],
)  # fmt: skip
async def test_addresses_that_are_not_public_are_refused(host):
    with pytest.raises(FetchError, match=r"not public.*spec\.gateway\.media\.allowPrivateAddresses"):
        await fetch(f"http://{host}/", CLOSED, "image")


def test_public_addresses_are_public():
    for text in (
        "93.184.215.14",
        "2606:2800:21f:cb07:6820:80da:af6b:8b2c",
        "::ffff:8.8.8.8",
        "64:ff9b::808:808",
    ):
        assert is_public(ipaddress.ip_address(text)), text


async def test_a_name_is_resolved_once_and_the_connection_goes_to_the_address_that_was_checked(monkeypatch):
    """DNS rebinding: the second answer would be another machine; nobody asks for it."""
    asked = []
    loop = asyncio.get_running_loop()

    async def resolve(host, port, **kwargs):
        asked.append(host)
        address = "127.0.0.1" if len(asked) == 1 else "127.9.9.9"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]

    async with server(reply(b"checked")) as (port, seen):
        real = loop.getaddrinfo

        async def only_names(host, port, **kwargs):
            return await (resolve if host == "rebind.example" else real)(host, port, **kwargs)

        monkeypatch.setattr(loop, "getaddrinfo", only_names)
        assert await fetch(f"http://rebind.example:{port}/", OPEN, "image") == b"checked"
    assert asked == ["rebind.example"]
    assert f"Host: rebind.example:{port}" in seen[0]


async def test_one_private_address_among_public_ones_refuses_the_host(monkeypatch):
    async def resolve(host, port, **kwargs):
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (a, port)) for a in ("8.8.8.8", "127.0.0.1")]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve)
    with pytest.raises(FetchError, match=r"127\.0\.0\.1, which is not public"):
        await fetch("http://mixed.example/", CLOSED, "image")


async def test_a_redirect_to_a_private_address_is_checked_again(monkeypatch):
    """The first address passes the check (as a public one would); the metadata address behind the redirect does not."""
    monkeypatch.setattr(fetch_module, "is_public", lambda a: str(a) == "127.0.0.1" or is_public(a))
    async with server(reply(status="302 Found", Location="http://169.254.169.254/latest/meta-data")) as (
        port,
        seen,
    ):
        monkeypatch.setattr(fetch_module, "PUBLIC_PORTS", (80, 443, port))
        with pytest.raises(FetchError, match=r"169\.254\.169\.254, which is not public"):
            await fetch(f"http://127.0.0.1:{port}/", CLOSED, "image")
    assert len(seen) == 1


async def test_redirects_are_followed_three_times_and_no_more():
    async def answer(head, writer):
        left = int(head.split()[1].strip("/"))
        location = f"/{left - 1}"
        await (reply(b"end") if left == 0 else reply(status="307 Temporary Redirect", Location=location))(
            head, writer
        )

    async with server(answer) as (port, _):
        assert await fetch(f"http://127.0.0.1:{port}/3", OPEN, "image") == b"end"
        with pytest.raises(FetchError, match="more than 3 times"):
            await fetch(f"http://127.0.0.1:{port}/9", OPEN, "image")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("ftp://example.org/a", "scheme"),
        ("file:///etc/passwd", "scheme"),
        ("http://", "scheme"),
        ("http://user:secret@example.org/", "user name"),
        ("http://8.8.8.8:22/", "port 22"),
        ("http://" + "a" * 9000, "longer than"),
        ("http://exa mple.org\x00/", "not a URL|cannot be resolved"),
        ("data:image/png;base64", "no comma"),
        ("data:image/png;base64,####", "base64"),
        ("data:image/png;base64,AAA", "base64"),
        ("data:text/plain,%zz", "percent"),
    ],
)
async def test_malformed_and_refused_urls_say_so(url, words):
    with pytest.raises(FetchError, match=words):
        await fetch(url, CLOSED, "image")


async def test_data_urls_are_decoded_and_bounded():
    assert (
        await fetch("data:image/png;base64," + base64.b64encode(b"\0\xff!").decode(), CLOSED, "image")
        == b"\0\xff!"
    )
    assert await fetch("data:,%00a%FF", CLOSED, "image") == b"\0a\xff"
    assert len(await fetch("data:;base64," + base64.b64encode(bytes(4096)).decode(), CLOSED, "image")) == 4096
    for url in ("data:;base64," + base64.b64encode(bytes(4097)).decode(), "data:," + "a" * 4097):
        with pytest.raises(
            FetchError, match=r"larger than 4096 bytes.*spec\.gateway\.media\.image\.maxBytes"
        ):
            await fetch(url, CLOSED, "image")


async def test_hosts_outside_the_list_are_refused():
    policy = CLOSED.model_copy(update={"allowed_hosts": ["cdn.example.org"]})
    with pytest.raises(FetchError, match=r"evil\.org is not allowed.*allowedHosts"):
        await fetch("https://evil.org/a.png", policy, "image")
    with pytest.raises(FetchError, match="allowHttp"):
        await fetch("https://evil.org/a.png", policy.model_copy(update={"allow_http": False}), "image")


async def test_a_body_over_the_limit_is_cut_whether_its_length_is_told_or_not():
    async def endless(head, writer):
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while not writer.is_closing():
            writer.write(b"x" * 65536)
            await writer.drain()

    async with server(reply(b"x" * 5000)) as (port, _):
        with pytest.raises(FetchError, match="maxBytes"):
            await fetch(f"http://127.0.0.1:{port}/", OPEN, "image")
    async with server(endless) as (port, _):
        with pytest.raises(FetchError, match="maxBytes"):
            await fetch(f"http://127.0.0.1:{port}/", OPEN, "image")


async def test_a_length_that_lies_is_noticed():
    async with server(reply(b"short", Content_Length="4000")) as (port, _):
        with pytest.raises(FetchError, match="broke off"):
            await fetch(f"http://127.0.0.1:{port}/", OPEN, "image")


async def test_a_compressed_body_is_refused_unopened():
    async with server(reply(gzip.compress(bytes(3_000_000)), Content_Encoding="gzip")) as (port, seen):
        with pytest.raises(FetchError, match="gzip-encoded"):
            await fetch(f"http://127.0.0.1:{port}/", OPEN, "image")
    assert "accept-encoding: identity" in seen[0].lower()


async def test_a_slow_drip_ends_with_the_total_timeout():
    async def drip(head, writer):
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4000\r\n\r\n")
        while not writer.is_closing():
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.05)

    start = time.monotonic()
    async with server(drip) as (port, _):
        with pytest.raises(FetchError, match="fetchTimeoutSeconds"):
            await fetch(
                f"http://127.0.0.1:{port}/", OPEN.model_copy(update={"fetch_timeout_seconds": 1}), "image"
            )
    assert time.monotonic() - start < 10


async def test_a_status_other_than_ok_and_a_dead_port_are_errors():
    async with server(reply(status="404 Not Found")) as (port, _):
        with pytest.raises(FetchError, match="status 404"):
            await fetch(f"http://127.0.0.1:{port}/", OPEN, "image")
    with pytest.raises(FetchError, match="cannot be reached"):
        await fetch(f"http://127.0.0.1:{port}/", OPEN, "image")
