"""An OpenID Connect issuer on this machine: it publishes real keys over TLS, signs real tokens, and misbehaves on demand."""

from __future__ import annotations

import contextlib
import json
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

from support.servers.certificates import Authority

AUDIENCE = "mmd-gateway"
DISCOVERY = "/.well-known/openid-configuration"
KEYS = "/keys"

PrivateKey = rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey
Send = Callable[[BaseHTTPRequestHandler], None]


def rsa_key(bits: int = 2048) -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(65537, bits)


def public_jwk(kid: str, key: PrivateKey, **more: Any) -> dict[str, Any]:
    """An entry of a key set."""
    match key:
        case rsa.RSAPrivateKey():
            found = RSAAlgorithm.to_jwk(key.public_key(), as_dict=True)
        case ec.EllipticCurvePrivateKey():
            found = ECAlgorithm.to_jwk(key.public_key(), as_dict=True)
        case ed25519.Ed25519PrivateKey():
            found = OKPAlgorithm.to_jwk(key.public_key(), as_dict=True)
    return {
        **{name: value for name, value in found.items() if name != "key_ops"},
        "kid": kid,
        "use": "sig",
        **more,
    }


class LocalIssuer:
    """`keys`: what it publishes; `fetched`: how often each path was asked for; `instead`: what answers in place of a document."""

    def __init__(self, folder: Path) -> None:
        self._authority = Authority()
        folder.mkdir(exist_ok=True)
        for name, text in {**self._authority.issue(), "ca.crt": self._authority.pem}.items():
            (folder / name).write_text(text)
        self.trusted = folder / "ca.crt"
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
        self.keys: list[dict[str, Any]] = []
        self.about: dict[str, Any] = {}
        self.fetched: Counter[str] = Counter()
        self.instead: dict[str, Send] = {}
        self._server: ThreadingHTTPServer | None = None
        self._port = 0
        self.start()

    @property
    def url(self) -> str:
        return f"https://localhost:{self._port}"

    def start(self) -> None:
        """Serve, on the port that it had before if there was one."""
        self._server = server = ThreadingHTTPServer(("127.0.0.1", self._port), self._handler())
        self._port = server.server_address[1]
        server.socket = self._context.wrap_socket(
            server.socket, server_side=True, do_handshake_on_connect=False
        )
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def token(
        self, key: PrivateKey, algorithm: str = "RS256", kid: str | None = "first", **claims: Any
    ) -> str:
        """A token that is valid unless the claims say otherwise; None removes a claim."""
        now = int(time.time())
        whole = {"iss": self.url, "aud": AUDIENCE, "sub": "somebody", "tenant": "search"}
        whole = {**whole, "iat": now, "exp": now + 600, **claims}
        whole = {name: value for name, value in whole.items() if value is not None}
        return jwt.encode(whole, key, algorithm, headers={"kid": kid} if kid is not None else {})

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        issuer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                issuer.fetched[self.path] += 1
                if (send := issuer.instead.get(self.path)) is not None:
                    send(self)
                elif self.path == DISCOVERY:
                    self.send({"issuer": issuer.url, "jwks_uri": issuer.url + KEYS, **issuer.about})
                elif self.path == KEYS:
                    self.send({"keys": issuer.keys})
                else:
                    self.send_error(404)

            def send(self, document: object) -> None:
                answer(200, json.dumps(document).encode())(self)

            def log_message(self, *_: object) -> None:
                pass

            def handle(self) -> None:
                with contextlib.suppress(OSError):  # a client that gave up
                    super().handle()

        return Handler


def answer(status: int, body: bytes = b"", **headers: str) -> Send:
    """A whole answer of this kind."""

    def send(to: BaseHTTPRequestHandler) -> None:
        to.send_response(status)
        for name, value in {"content-length": str(len(body)), **headers}.items():
            to.send_header(name, value)
        to.end_headers()
        to.wfile.write(body)

    return send


@contextmanager
def running_issuer(folder: Path) -> Iterator[LocalIssuer]:
    one = LocalIssuer(folder)
    try:
        yield one
    finally:
        one.stop()
