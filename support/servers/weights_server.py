"""A real HTTP server with folders of weights.

It serves them by URL with ranges and, at the paths of the hub's API, as repositories. It can refuse, cut and
damage.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

CHECKSUMS = "SHA256SUMS"
MODIFIED = "Thu, 01 Jan 2026 00:00:00 GMT"
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")


@dataclass
class WeightsServer:
    """A server that runs until the block ends.

    `files`: content by URL path. `repositories`: commit and folder by id on the hub. `cuts`: how many answers
    end after half of their bytes. `failing`: how many answers may still succeed before all are 503; None:
    all. `token`: needed by everybody.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    repositories: dict[str, tuple[str, Path]] = field(default_factory=dict)
    token: str | None = None
    siblings: list[dict[str, object]] = field(default_factory=list)
    """Further files that repositories of the hub list."""
    signed: bool = False
    """Whether only requests are answered that the user `reader` has signed as S3's clients do."""
    cuts: int = 0
    failing: int | None = None
    served: list[tuple[str, int, int]] = field(default_factory=list)
    """Path, first byte and number of bytes of each answer with the content of a file."""
    gate: threading.Event = field(default_factory=threading.Event)
    held: threading.Event = field(default_factory=threading.Event)
    """While `gate` is clear, content of safetensors waits, and `held` is set."""

    def __enter__(self) -> WeightsServer:
        self.gate.set()
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.gate.set()
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def put(self, folder: Path, at: str) -> str:
        """Serve a folder with its digests; returns its URL."""
        lines = []
        for file in sorted(path for path in folder.rglob("*") if path.is_file()):
            name, content = str(file.relative_to(folder)), file.read_bytes()
            self.files[f"/{at}/{name}"] = content
            lines.append(f"{hashlib.sha256(content).hexdigest()}  {name}")
        self.files[f"/{at}/{CHECKSUMS}"] = "\n".join([*lines, ""]).encode()
        return f"{self.url}/{at}"

    def bytes_of(self, name: str) -> int:
        """Bytes sent of a file, in all answers together."""
        return sum(size for path, _, size in self.served if path.endswith(name))

    def _takes(self, counter: str) -> bool:
        with self._lock:
            remaining = getattr(self, counter)
            if remaining:
                setattr(self, counter, remaining - 1)
            return bool(remaining)


def _handler(server: WeightsServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, *, body: bool) -> None:
            path = unquote(urlsplit(self.path).path)
            if server.token is not None and self.headers.get("Authorization") != f"Bearer {server.token}":
                return self._send(401, b"", {})
            signed = self.headers.get("Authorization", "").startswith("AWS4-HMAC-SHA256 Credential=reader/")
            if server.signed and not signed:
                return self._send(403, b"", {})
            if path.startswith("/api/models/"):
                return self._repository(path)
            content, headers = server.files.get(path), {"ETag": f'"{path}"', "Last-Modified": MODIFIED}
            if "/resolve/" in path:
                content, headers = self._resolved(path)
            if content is None:
                return self._send(404, b"", {})
            if body and server.failing is not None and not server._takes("failing"):
                return self._send(503, b"", {})
            first, last, status = 0, len(content) - 1, 200
            if range_match := _RANGE.fullmatch(self.headers.get("Range", "")):
                first, last, status = int(range_match[1]), min(last, int(range_match[2] or last)), 206
                headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
            if body and path.endswith(".safetensors") and not server.gate.is_set():
                server.held.set()
                server.gate.wait(60)
            return self._send(status, content[first : last + 1], headers, path, first, body=body)

        def _send(
            self,
            status: int,
            content: bytes,
            headers: dict[str, str],
            path: str = "",
            first: int = 0,
            *,
            body: bool = True,
        ) -> None:
            self.send_response(status)
            for name, value in {
                "Accept-Ranges": "bytes",
                "Content-Length": str(len(content)),
                **headers,
            }.items():
                self.send_header(name, value)
            self.end_headers()
            if not body or self.command == "HEAD":
                return
            if path.endswith(".safetensors") and server._takes("cuts"):
                content, self.close_connection = content[: len(content) // 2], True
            if path:
                server.served.append((path, first, len(content)))
            self.wfile.write(content)

        def _repository(self, path: str) -> None:
            match = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path)
            if match is None or match[1] not in server.repositories:
                return self._send(401, b"", {"X-Error-Code": "RepoNotFound"})
            commit, folder = server.repositories[match[1]]
            if match[2] not in (None, "main", commit):
                return self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
            siblings = [_sibling(file, folder) for file in sorted(folder.rglob("*")) if file.is_file()]
            siblings += server.siblings
            body = json.dumps({"id": match[1], "sha": commit, "siblings": siblings}).encode()
            return self._send(200, body, {"Content-Type": "application/json"})

        def _resolved(self, path: str) -> tuple[bytes | None, dict[str, str]]:
            name, _, rest = path.strip("/").partition("/resolve/")
            commit, _, file = rest.partition("/")
            repository = server.repositories.get(name)
            if repository is None or repository[0] != commit or not (repository[1] / file).is_file():
                return None, {}
            return (repository[1] / file).read_bytes(), {"X-Repo-Commit": commit, "ETag": f'"{file}"'}

        def log_message(self, *_: object) -> None:
            pass

    return Handler


def _sibling(file: Path, folder: Path) -> dict[str, object]:
    content = file.read_bytes()
    blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    entry: dict[str, object] = {
        "rfilename": str(file.relative_to(folder)),
        "size": len(content),
        "blobId": blob,
    }
    if file.suffix == ".safetensors":
        digest = hashlib.sha256(content).hexdigest()
        entry["lfs"] = {"sha256": digest, "size": len(content), "pointerSize": 134}
    return entry
