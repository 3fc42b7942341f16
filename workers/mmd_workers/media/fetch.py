"""Fetches the bytes of a medium from a data URL, or over HTTP from public addresses. Knows the policy, nothing of media.

A host is resolved once and the connection goes to the very address that was checked, so a name that changes between check and
use (DNS rebinding) gains nothing. Every redirect is checked as if it were the first URL.
"""

from __future__ import annotations

import asyncio
import binascii
import io
import ipaddress
import re
import ssl
from collections.abc import Awaitable, Callable, Iterator
from functools import cache

import httpx
import pybase64

from mmd_api.contract.errors import FetchError
from mmd_api.spec.media import MediaPolicy
from mmd_workers.media.lookup import lookup
from mmd_workers.media.medium import MediumKind
from mmd_workers.media.probe import FIELD

MAX_REDIRECTS = 3
MAX_URL_CHARACTERS = 8192
MAX_ADDRESSES_TRIED = 4
PIECE_CHARACTERS = 1 << 20  # part of a data URL decoded at a time, in a few milliseconds
RESERVE_STEP_BYTES = 1 << 20
PUBLIC_PORTS = (80, 443)
_METADATA = frozenset(
    ipaddress.ip_address(address)
    for address in (
        "168.63.129.16",  # Azure's wire server, the only one in the public range
        "169.254.169.254",  # nearly all clouds
        "169.254.170.2",  # Amazon ECS
        "169.254.0.23",  # Tencent
        "100.100.100.200",  # Alibaba
        "192.0.0.192",  # Oracle, formerly
        "fd00:ec2::254",  # Amazon
        "fd20:ce::254",  # Google
    )
)
"""Addresses at which clouds serve metadata to their machines, secrets included. Most are not public anyway."""
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_UNUSUAL = "-_ \t\r\n"
_PLAIN = str.maketrans("-_", "+/", " \t\r\n")
_BAD_PERCENT = re.compile(r"%(?![0-9A-Fa-f]{2})")

Reserve = Callable[[int], Awaitable[None]]
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


async def fetch(url: str, policy: MediaPolicy, kind: MediumKind, reserve: Reserve) -> bytes:
    """Fetch the bytes behind a `data:`, `http:` or `https:` URL, never more than the `maxBytes` of its kind.

    A download calls `reserve(more_bytes)` before it holds more. The time this takes does not count against the deadline, and an
    error from it ends the download.

    Raises:
        FetchError: malformed or refused URL or address, status, size or time; the message names the field that decides.
        OverloadedError: too many host names are being resolved.
    """
    limit = int(getattr(policy, kind).max_bytes)
    field = f"{FIELD}.{kind}.maxBytes"
    if url[:5].lower() == "data:":
        return await asyncio.to_thread(_data_url, url, limit, field)
    if not policy.allow_http:
        raise FetchError(f"fetching URLs is not enabled; send a data URL, or set {FIELD}.allowHttp")
    try:
        async with asyncio.timeout(policy.fetch_timeout_seconds) as clock:
            return await _download(url, policy, limit, field, _off_the_clock(clock, reserve))
    except TimeoutError as error:
        raise FetchError(
            f"the download took longer than {policy.fetch_timeout_seconds} seconds; use a faster server, or raise "
            f"{FIELD}.fetchTimeoutSeconds"
        ) from error


def _data_url(url: str, limit: int, field: str) -> bytes:
    """Decode a data URL in pieces: each keeps the event loop's thread waiting, which may run before the next."""
    begin = url.find(",", 0, MAX_URL_CHARACTERS) + 1
    if not begin:
        raise FetchError("the data URL has no comma; use the form data:<type>;base64,<data>")
    in_base64 = url[:begin].lower().endswith(";base64,")
    if in_base64 and ((len(url) - begin) % 4 or any(url.find(one, begin) >= 0 for one in _UNUSUAL)):
        text = plain_base64(url[begin:])
        url, begin = text + "=" * (-len(text) % 4), 0
    if len(url) - begin > (4 * (limit // 3 + 1) if in_base64 else 3 * limit):
        raise _too_large(limit, field)
    if in_base64:
        try:
            pieces = [pybase64.b64decode(piece, validate=True) for piece in _pieces(url, begin)]
        except (binascii.Error, ValueError) as error:
            raise FetchError(
                f"the data is not valid base64 ({error}); encode the file's bytes again"
            ) from error
        if any(len(piece) % 3 for piece in pieces[:-1]):
            raise FetchError("the data is not valid base64 (padding inside); encode the file's bytes again")
    else:
        pieces = [_unquoted(piece) for piece in _pieces(url, begin)]
    data = b"".join(pieces)
    if len(data) > limit:
        raise _too_large(limit, field)
    return data


def plain_base64(text: str) -> str:
    """Base64 in the standard alphabet without white space. Encoders of MIME fold lines, others use the alphabet of URLs."""
    if not any(character in text for character in _UNUSUAL):
        return text
    pieces = range(0, len(text), PIECE_CHARACTERS)
    return "".join(text[at : at + PIECE_CHARACTERS].translate(_PLAIN) for at in pieces)


def _pieces(url: str, begin: int) -> Iterator[str]:
    """Cut the text from `begin` on at multiples of four characters, and not inside %xx."""
    while begin < len(url):
        end = begin + PIECE_CHARACTERS
        escape = url.rfind("%", end - 2, end) if end < len(url) else -1
        end = end if escape < 0 else escape
        yield url[begin:end]
        begin = end


def _unquoted(text: str) -> bytes:
    """Decode percent encoding as quoted-printable, which differs only in its escape character and is decoded in C."""
    if not text.isascii() or _BAD_PERCENT.search(text):
        raise FetchError("the data URL is not valid percent encoding; encode the file's bytes again")
    return binascii.a2b_qp(text.replace("=", "=3D").replace("%", "="))


def _too_large(limit: int, field: str) -> FetchError:
    return FetchError(f"the medium is larger than {limit} bytes; send a smaller file, or raise {field}")


def _off_the_clock(clock: asyncio.Timeout, reserve: Reserve) -> Reserve:
    """`reserve`, with `clock` stopped while it waits."""

    async def wait(num_bytes: int) -> None:
        now = asyncio.get_running_loop().time
        remaining = (clock.when() or now()) - now()
        clock.reschedule(None)
        await reserve(num_bytes)
        clock.reschedule(now() + remaining)

    return wait


@cache
def _authorities() -> ssl.SSLContext:
    """Certificate authorities trusted by downloads. Reading them takes 30 ms, in which the event loop would serve nobody."""
    return httpx.create_ssl_context(trust_env=False)


async def _download(url: str, policy: MediaPolicy, limit: int, field: str, reserve: Reserve) -> bytes:
    # No proxy, cookie, netrc or other setting of the environment may change where the request goes.
    timeout = httpx.Timeout(policy.fetch_timeout_seconds)
    client = httpx.AsyncClient(
        trust_env=False, follow_redirects=False, timeout=timeout, verify=_authorities()
    )
    async with client:
        for _ in range(MAX_REDIRECTS + 1):
            target = _checked_url(url, policy)
            addresses = await _checked_addresses(target, policy)
            response = await _connect(client, target, addresses)
            try:
                if not response.has_redirect_location:
                    return await _read(response, limit, field, reserve)
                url = _next(target, response.headers["location"])
            except httpx.HTTPError as error:
                raise FetchError(
                    f"the download from {target.host} was interrupted ({type(error).__name__}); retry"
                ) from error
            finally:
                await response.aclose()
    raise FetchError(f"the URL redirects more than {MAX_REDIRECTS} times; use the final URL")


def _next(target: httpx.URL, location: str) -> str:
    try:
        return str(target.join(location))
    except httpx.InvalidURL as error:
        raise FetchError(f"{target.host} redirects to an invalid URL; use the final URL") from error


def _checked_url(url: str, policy: MediaPolicy) -> httpx.URL:
    if len(url) > MAX_URL_CHARACTERS:
        raise FetchError(
            f"the URL is longer than {MAX_URL_CHARACTERS} characters; send the file as a data URL"
        )
    try:
        target = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise FetchError(f"invalid URL ({error}); use http(s)://host/path or a data URL") from error
    if target.scheme not in ("http", "https") or not target.host:
        raise FetchError(
            f"the scheme {target.scheme or 'none'!r} is not supported; use an http(s) or data URL"
        )
    if target.userinfo:
        raise FetchError("URLs with a user name or password are not allowed; remove them")
    host = target.host.lower().rstrip(".")
    if policy.allowed_hosts and host not in {allowed.lower().rstrip(".") for allowed in policy.allowed_hosts}:
        raise FetchError(
            f"the host {host[:253]} is not allowed; use another, or add it to {FIELD}.allowedHosts"
        )
    if _port(target) not in PUBLIC_PORTS and not policy.allow_private_addresses:
        raise FetchError(
            f"port {target.port} is not allowed; use 80 or 443, or set {FIELD}.allowPrivateAddresses"
        )
    return target


def _port(target: httpx.URL) -> int:
    return target.port or (443 if target.scheme == "https" else 80)


async def _checked_addresses(target: httpx.URL, policy: MediaPolicy) -> list[Address]:
    """Addresses of a host; all of them must be public, or the host is refused."""
    try:
        entries = await lookup(target.host, _port(target))
    except (OSError, UnicodeError) as error:
        raise FetchError(f"the host {target.host[:253]} cannot be resolved; check the URL") from error
    addresses = list(dict.fromkeys(ipaddress.ip_address(entry.partition("%")[0]) for entry in entries))
    if not policy.allow_private_addresses:
        for address in addresses:
            if not is_public(address):
                raise FetchError(
                    f"the host {target.host[:253]} resolves to an address that is not public; "
                    f"use a public host, or set {FIELD}.allowPrivateAddresses"
                )
    return addresses[:MAX_ADDRESSES_TRIED]


def is_public(address: Address) -> bool:
    """Whether anyone on the internet could reach an address: global unicast, also wrapped in IPv6 (mapped, 6to4, Teredo, NAT64)."""
    if isinstance(address, ipaddress.IPv6Address):
        inner: list[Address] = [
            a for a in (address.ipv4_mapped, address.sixtofour, *(address.teredo or ())) if a
        ]
        if address in _NAT64:
            inner.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        if inner:
            return all(is_public(a) for a in inner)
        if address.is_site_local:
            return False
    if address in _METADATA:
        return False
    refused = address.is_private or address.is_loopback or address.is_link_local or address.is_multicast
    return address.is_global and not (refused or address.is_reserved or address.is_unspecified)


async def _connect(client: httpx.AsyncClient, target: httpx.URL, addresses: list[Address]) -> httpx.Response:
    """Send the request to the checked addresses in turn, under the host's own name (Host header, TLS server name)."""
    failure = "no address"
    for address in addresses:
        request = client.build_request(
            "GET",
            target.copy_with(host=str(address)),
            headers={
                "Host": target.netloc.decode("ascii"),
                "Accept-Encoding": "identity",
                "User-Agent": "mmd-gateway",
            },
            extensions={"sni_hostname": target.host},
        )
        try:
            return await client.send(request, stream=True)
        except httpx.ConnectError as error:
            failure = str(error) or type(error).__name__
        except httpx.HTTPError as error:
            raise FetchError(
                f"{target.host} did not respond ({type(error).__name__}); check the URL"
            ) from error
    raise FetchError(f"{target.host} cannot be reached ({failure}); check the URL")


async def _read(response: httpx.Response, limit: int, field: str, reserve: Reserve) -> bytes:
    if response.status_code != 200:
        raise FetchError(f"the server returned status {response.status_code}; check the URL")
    encoding = response.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise FetchError(
            f"the server sent the file {encoding[:32]}-encoded although identity was requested; serve it unencoded"
        )
    announced = response.headers.get("content-length", "")
    size = int(announced[:19]) if announced.isdecimal() else limit
    if size > limit:
        raise _too_large(limit, field)
    received, room = io.BytesIO(), 0  # a BytesIO returns its value without a copy
    async for chunk in response.aiter_raw():
        after = received.tell() + len(chunk)
        if after > limit:
            raise _too_large(limit, field)
        if after > room:
            step = max(after, min(size, room + RESERVE_STEP_BYTES)) - room
            await reserve(step)
            room += step
        received.write(chunk)
    return received.getvalue()
