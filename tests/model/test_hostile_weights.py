"""Servers of weights that redirect to signed URLs, send without end or packed; and lists as people make them. Over real HTTP."""

from __future__ import annotations

import hashlib
import threading
import zlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from mmd_api.contract.weights import WeightsError
from mmd_api.weights import Download
from mmd_workers.weights import download as downloading
from mmd_workers.weights import sources
from mmd_workers.weights.progress import DownloadProgress

CONFIG = b'{"model_type": "llama"}'
SIGNATURE = "X-Amz-Signature=5ec2e7"
PACKED = zlib.compress(bytes(2**24))


class Handler(BaseHTTPRequestHandler):
    """The first part of the path says what the server does."""

    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        _, what, name = self.path.split("/", 2)
        sums = f"{hashlib.sha256(CONFIG).hexdigest()}  config.json\n"
        if what == "lacking":
            sums += f"{'0' * 64}  model.safetensors \n"  # with a space at its end
        if what == "twice":
            sums += f"{hashlib.sha256(b'').hexdigest()}  SHA256SUMS\n"
        if name == "SHA256SUMS":
            if what == "endless":
                self.send_without_end()
            else:
                self.answer(200, sums.encode())
        elif what == "signed":
            self.answer(302, b"", Location=f"/bucket/config.json?{SIGNATURE}")
        elif what == "bucket":
            self.answer(200 if self.command == "HEAD" else 503, CONFIG)
        elif what == "packed" and self.command == "GET":
            self.answer(206, PACKED, **{"Content-Encoding": "deflate"})
        elif name != "config.json":
            self.answer(404, b"")
        elif self.headers.get("Authorization") in (None, "Bearer secret"):
            self.answer(200, CONFIG)
        else:
            self.answer(401, b"")

    def answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def send_without_end(self) -> None:
        self.close_connection = True
        self.send_response(200)
        self.end_headers()
        try:
            while True:
                self.wfile.write(bytes(2**16))
        except OSError:
            pass

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(downloading, "PAUSE_SECONDS", (0.0, 0.0))
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def fetch(url: str, root: Path) -> None:
    downloading.prefetch([Download("spec.model", url)], root, DownloadProgress())


def test_a_signed_url_behind_a_redirect_is_in_no_message(url: str, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="status 503") as refused:
        fetch(f"{url}/signed", tmp_path)
    assert SIGNATURE not in str(refused.value)


def test_of_a_body_without_end_no_more_is_read_than_a_piece(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "LARGEST_ANSWER_BYTES", 2**20)
    with pytest.raises(WeightsError, match="more than 1048576 bytes for a piece"):
        fetch(f"{url}/endless", tmp_path)


def test_a_packed_body_is_not_unpacked(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "LARGEST_ANSWER_BYTES", 2 * len(PACKED))
    with pytest.raises(WeightsError) as refused:
        fetch(f"{url}/packed", tmp_path)
    assert refused.value.reason == "WeightsDamaged"


def test_no_name_is_left_out_for_what_it_ends_with(url: str, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"model\.safetensors"):
        fetch(f"{url}/lacking", tmp_path)


def test_a_list_naming_itself_and_a_token_with_a_newline_are_accepted(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MMD_WEIGHTS_TOKEN", "secret\n")
    fetch(f"{url}/twice", tmp_path)
    (config,) = tmp_path.rglob("config.json")
    assert config.read_bytes() == CONFIG
