"""Downloads of weights against a real HTTP server, and one that answers as the hub does: whole, cut, damaged, refused, too large."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import resource
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from mmd_api.contract import environment as env
from mmd_api.contract.errors import UnsupportedModelError
from mmd_api.contract.logs import last_reason
from mmd_api.contract.weights import EXIT_STATUS, WeightsError, WeightsProgress
from mmd_api.spec.model import ModelSpec, ModelStorage, WeightsCache
from mmd_api.weights import Download, folder_of
from mmd_workers.model import source
from mmd_workers.weights import download as downloading
from mmd_workers.weights.cache import MANIFEST, PARTIAL, CachedFiles
from mmd_workers.weights.download import prefetch
from mmd_workers.weights.names import check_names
from mmd_workers.weights.progress import DownloadProgress
from support.servers.weights_server import CHECKSUMS, WeightsServer

PIECE = 64 * 1024
WEIGHTS = "model.safetensors"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
TENSORS = {"layers.0.weight": np.arange(256 * 1024, dtype=np.float32).reshape(512, 512)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_file(TENSORS, folder / WEIGHTS)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"the same weights in another format")
    return folder


@pytest.fixture
def server() -> Iterator[WeightsServer]:
    with WeightsServer() as made:
        yield made


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(downloading, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(downloading, "PAUSE_SECONDS", (0.0, 0.0))
    monkeypatch.setattr(downloading, "LOCK_POLL_SECONDS", 0.01)


def fetched(url: str, root: Path, progress: DownloadProgress | None = None) -> Path:
    """The folder of a download of `url`."""
    wanted = Download("spec.model", url)
    prefetch([wanted], root, progress or DownloadProgress(), "claim weights of 5 GiB")
    return root / wanted.folder


def failed(url: str, root: Path) -> WeightsError:
    with pytest.raises(WeightsError) as error:
        fetched(url, root)
    return error.value


def refused(url: str, root: Path) -> WeightsError:
    error = failed(url, root)
    assert not [path for path in root.glob("*") if path.name != PARTIAL], "an incomplete model appeared"
    return error


def test_a_model_appears_whole_under_its_name_and_loads(server: WeightsServer, model: Path, tmp_path: Path):
    progress = DownloadProgress()
    folder = fetched(server.put(model, "llava"), tmp_path, progress)
    assert np.array_equal(load_file(folder / WEIGHTS)["layers.0.weight"], TENSORS["layers.0.weight"])
    total = sum(file.stat().st_size for file in model.iterdir())
    done = progress.snapshot()
    assert (done.state, done.bytes, done.total_bytes) == ("Complete", total, total)
    before = len(server.served)
    assert fetched(f"{server.url}/llava", tmp_path) == folder
    assert len(server.served) == before, "a complete model was downloaded again"


def test_a_connection_that_is_cut_continues_at_the_byte_where_it_ended(
    server: WeightsServer, model: Path, tmp_path: Path
):
    url, size = server.put(model, "llava"), (model / WEIGHTS).stat().st_size
    server.cuts = 3
    fetched(url, tmp_path)
    assert server.bytes_of(WEIGHTS) <= size + 3 * PIECE


def test_a_download_that_ended_early_is_continued_by_the_next_one(
    server: WeightsServer, model: Path, tmp_path: Path
):
    url, size = server.put(model, "llava"), (model / WEIGHTS).stat().st_size
    server.failing = 9
    assert refused(url, tmp_path).reason == "WeightsUnreachable"
    before = server.bytes_of(WEIGHTS)
    assert before >= PIECE
    server.failing = None
    fetched(url, tmp_path)
    assert server.bytes_of(WEIGHTS) == size, "bytes that were there were downloaded again"


def test_a_file_with_another_digest_is_deleted_and_downloaded_again(
    server: WeightsServer, model: Path, tmp_path: Path
):
    url, good = server.put(model, "llava"), server.files[f"/llava/{WEIGHTS}"]
    server.files[f"/llava/{WEIGHTS}"] = good[:-1] + bytes([good[-1] ^ 1])
    error = refused(url, tmp_path)
    assert error.reason == "WeightsDamaged"
    assert WEIGHTS in error.message
    server.files[f"/llava/{WEIGHTS}"] = good
    folder = fetched(url, tmp_path)
    assert hashlib.sha256((folder / WEIGHTS).read_bytes()).digest() == hashlib.sha256(good).digest()


def test_a_partial_download_of_another_version_is_not_continued(
    server: WeightsServer, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(downloading, "FILES_AT_ONCE", 1)
    url, first = server.put(model, "llava"), server.files["/llava/config.json"]
    server.failing = 5
    assert refused(url, tmp_path).reason == "WeightsUnreachable"
    partial = tmp_path / PARTIAL / folder_of(url)
    assert (partial / "config.json").read_bytes() == first
    assert 0 < (partial / f"{WEIGHTS}.part").stat().st_size < (model / WEIGHTS).stat().st_size
    server.failing = None
    second = tmp_path / "second"
    second.mkdir()
    for file in model.iterdir():
        (second / file.name).write_bytes(file.read_bytes()[::-1])
    server.put(second, "llava")
    folder = fetched(url, tmp_path)
    for file in second.iterdir():
        assert (folder / file.name).read_bytes() == file.read_bytes()


def test_the_digest_is_computed_from_the_file_and_not_the_stream(
    server: WeightsServer, model: Path, tmp_path: Path
):
    """As where a node that lost its lock still writes to the same file."""
    url, errors = server.put(model, "llava"), []
    server.gate.clear()
    thread = threading.Thread(target=lambda: errors.append(refused(url, tmp_path)))
    thread.start()
    assert server.held.wait(30)
    (tmp_path / PARTIAL / folder_of(url) / f"{WEIGHTS}.part").write_bytes(bytes(2 * PIECE * 16 + 8192))
    server.gate.set()
    thread.join(30)
    assert [error.reason for error in errors] == ["WeightsDamaged"]


def test_a_volume_without_locks_is_refused(
    server: WeightsServer, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(downloading.fcntl, "flock", flock)
    error = refused(server.put(model, "llava"), tmp_path)
    assert (error.reason, "use a volume with them" in error.message) == ("WeightsDenied", True)


def test_a_hub_that_lists_a_file_outside_its_repository_is_refused(
    server: WeightsServer, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    server.repositories["org/llava"] = (COMMIT, model)
    server.siblings = [{"rfilename": "../../victim/config.json", "size": 1, "blobId": "0" * 40}]
    error = refused("hf://org/llava", tmp_path)
    assert (error.reason, "../../victim" in error.message) == ("WeightsNotFound", True)
    server.siblings = [{"rfilename": "more.json", "size": -1, "blobId": "0" * 40}]
    assert "reports -1 bytes" in refused("hf://org/llava", tmp_path).message


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["a.json", "b/c.json", "x" * 250, "...", "b/..c", "a.part"], None),
        (["/etc/passwd"], "relative path"),
        (["../a"], "relative path"),
        (["a/../../b"], "relative path"),
        (["a//b"], "relative path"),
        (["."], "relative path"),
        (["a/"], "relative path"),
        (["a\x00b"], "control characters"),
        (["a\nb"], "control characters"),
        (["x" * 251], "longer"),
        (["/".join(["x" * 200] * 6)], "longer"),
        ([MANIFEST], "list of the cache"),
        ([f"{MANIFEST}.new"], "list of the cache"),
        (["a", "a.part"], "beside a.part"),
        (["a", "a/b"], "folder too"),
        (["a", "a.part/b"], "beside a.part"),
        ([str(n) for n in range(10_001)], "more than 10000"),
    ],
)
def test_a_name_that_would_be_written_elsewhere_or_over_another_is_refused(
    names: list[str], words: str | None
):
    one = Download("spec.model", "hf://org/llava")
    if words is None:
        check_names(one, names)
        return
    with pytest.raises(WeightsError, match=words):
        check_names(one, names)


def test_a_model_that_lost_a_file_gets_that_file_again(server: WeightsServer, model: Path, tmp_path: Path):
    folder, before = fetched(server.put(model, "llava"), tmp_path), server.bytes_of(WEIGHTS)
    (folder / "config.json").unlink()
    assert fetched(f"{server.url}/llava", tmp_path) == folder
    assert (folder / "config.json").read_bytes() == (model / "config.json").read_bytes()
    assert server.bytes_of(WEIGHTS) == before


def test_a_model_larger_than_the_claim_names_the_claim_and_sizes(
    server: WeightsServer, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(downloading, "SPARE_BYTES", 2**60)
    error = refused(server.put(model, "llava"), tmp_path)
    assert error.reason == "WeightsTooLarge"
    assert "claim weights of 5 GiB has" in error.message
    assert "enlarge it" in error.message


def test_a_download_that_cannot_fit_deletes_nothing_of_others(
    server: WeightsServer, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    abandoned, wanted = (server.put(model, name) for name in ("abandoned", "wanted"))
    server.failing = 12
    assert failed(abandoned, tmp_path).reason == "WeightsUnreachable"
    server.failing = None
    monkeypatch.setattr(downloading, "SPARE_BYTES", 2**60)
    assert failed(wanted, tmp_path).reason == "WeightsTooLarge"
    assert list((tmp_path / PARTIAL / folder_of(abandoned)).rglob("*"))


def test_a_model_of_which_nothing_is_missing_needs_no_room(
    server: WeightsServer, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    url = server.put(model, "llava")
    folder = fetched(url, tmp_path)
    folder.rename(tmp_path / PARTIAL / folder.name)
    monkeypatch.setattr(downloading, "SPARE_BYTES", 2**60)
    assert CachedFiles.of(fetched(url, tmp_path)) is not None


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[Path]:
    """A volume with room for two of the models, and no more."""
    folder = tmp_path / "volume"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2500k", "tmpfs", folder], check=False)
    if made.returncode:
        pytest.skip("a volume of a given size needs the right to mount")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_on_a_full_volume_incomplete_downloads_go_and_models_stay(
    server: WeightsServer, model: Path, volume: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(downloading, "SPARE_BYTES", 0)
    served, abandoned, wanted = (server.put(model, name) for name in ("served", "abandoned", "wanted"))
    fetched(served, volume)
    server.failing = 12
    assert failed(abandoned, volume).reason == "WeightsUnreachable"
    assert (volume / PARTIAL / folder_of(abandoned)).is_dir()
    server.failing = None
    fetched(wanted, volume)
    assert not (volume / PARTIAL / folder_of(abandoned)).exists()
    error = failed(abandoned, volume)
    assert (error.reason, "claim weights of 5 GiB has" in error.message) == ("WeightsTooLarge", True)
    for url in (served, wanted):
        assert CachedFiles.of(volume / folder_of(url)) is not None


@pytest.mark.parametrize(
    ("change", "reason", "words"),
    [
        (lambda s: setattr(s, "token", "secret"), "WeightsDenied", "spec.model.storage.tokenSecret"),
        (lambda s: s.files.pop("/llava/SHA256SUMS"), "WeightsNotFound", CHECKSUMS),
        (lambda s: s.files.pop("/llava/config.json"), "WeightsNotFound", "config.json"),
        (lambda s: s.files.update({"/llava/SHA256SUMS": b"0  x"}), "WeightsNotFound", "line 1"),
        (lambda s: s.files.update({"/llava/SHA256SUMS": b"a" * 64 + b"  ../x"}), "WeightsNotFound", "'../x'"),
        (lambda s: s.files.update({"/llava/SHA256SUMS": b""}), "WeightsNotFound", "no files"),
        (lambda s: setattr(s, "failing", 0), "WeightsUnreachable", "spec.network.egress"),
        (lambda s: s.__exit__(), "WeightsUnreachable", "spec.network.egress"),
    ],
)
def test_what_a_server_refuses_is_named_with_its_remedy(
    server: WeightsServer, model: Path, tmp_path: Path, change, reason: str, words: str
):
    url = server.put(model, "llava")
    change(server)
    error = refused(url, tmp_path)
    assert (error.reason, words in error.message) == (reason, True), error.message


def test_a_token_is_sent_as_bearer_token(
    server: WeightsServer, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(env.WEIGHTS_TOKEN, "secret")
    server.token = "secret"
    assert fetched(server.put(model, "llava"), tmp_path).is_dir()


def test_a_hub_repository_comes_with_its_commit_and_without_other_formats(
    server: WeightsServer, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    server.repositories["org/llava"] = (COMMIT, model)
    folder = fetched("hf://org/llava@main", tmp_path)
    manifest = CachedFiles.of(folder)
    assert manifest is not None
    assert manifest.version == COMMIT
    assert sorted(manifest.files) == ["config.json", WEIGHTS, "tokenizer.json"]
    assert manifest.files["config.json"][1].startswith("git:")
    for url, reason in (("hf://org/llava@v9", "revision"), ("hf://org/other", "tokenSecret")):
        error = refused(url, tmp_path / "other")
        assert error.reason == "WeightsNotFound"
        assert reason in error.message


def test_a_model_in_an_object_store_is_read_with_its_credentials(
    server: WeightsServer, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("obstore")
    server.put(model, "bucket/llava")
    server.signed = True
    variables = {
        "AWS_ENDPOINT_URL": server.url,
        "AWS_REGION": "here",
        "AWS_ACCESS_KEY_ID": "reader",
        "AWS_SECRET_ACCESS_KEY": "secret",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    server.cuts = 2
    folder = fetched("s3://bucket/llava", tmp_path)
    assert np.array_equal(load_file(folder / WEIGHTS)["layers.0.weight"], TENSORS["layers.0.weight"])
    assert refused("s3://bucket/other", tmp_path / "other").reason == "WeightsNotFound"
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "stranger")
    error = refused("s3://bucket/llava", tmp_path / "other")
    assert (error.reason, "credentialsSecret" in error.message) == ("WeightsDenied", True), error.message


def test_two_deployments_that_share_a_claim_download_once(server: WeightsServer, model: Path, tmp_path: Path):
    url, size = server.put(model, "llava"), (model / WEIGHTS).stat().st_size
    server.gate.clear()
    first, second = (threading.Thread(target=fetched, args=(url, tmp_path)) for _ in range(2))
    first.start()
    assert server.held.wait(30)
    second.start()
    server.gate.set()
    for one in (first, second):
        one.join(30)
    assert server.bytes_of(WEIGHTS) == size
    assert CachedFiles.of(tmp_path / folder_of(url)) is not None


@pytest.mark.processes
def test_the_jobs_pod_reports_its_progress_and_why_it_ended(
    server: WeightsServer, model: Path, tmp_path: Path
):
    """On a disk that is full: a process may write no file as large as the weights."""
    server.repositories["org/llava"] = (COMMIT, model)
    last_words, root = tmp_path / "termination", tmp_path / "claim"
    with WeightsServer() as own:
        port = own._server.server_address[1]
    variables = {
        **os.environ,
        "HF_ENDPOINT": server.url,
        env.WEIGHTS: str(root),
        env.HTTP_PORT: str(port),
    }
    command = [
        *(sys.executable, "-m", "mmd_cli", "fetch-weights", "--item=spec.model=hf://org/llava"),
        *("--claim=claim weights of 1 GiB", f"--last-words={last_words}"),
    ]

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (PIECE, PIECE))

    full = subprocess.run(
        command, env=variables, preexec_fn=limit, capture_output=True, text=True, timeout=60, check=False
    )
    assert full.returncode == EXIT_STATUS["WeightsTooLarge"], full.stderr
    assert "claim weights of 1 GiB is full" in (last_reason(full.stderr) or full.stderr)
    server.gate.clear()
    with subprocess.Popen(command, env=variables, stderr=subprocess.PIPE, text=True) as pod:
        assert server.held.wait(60)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/state", timeout=10) as answer:
            progress = WeightsProgress.parse(answer.read().decode())
        assert progress.state == "Downloading"
        assert progress.total_bytes > (model / WEIGHTS).stat().st_size
        server.gate.set()
        assert pod.wait(60) == 0
    done = WeightsProgress.parse(last_words.read_text())
    assert (done.state, done.bytes) == ("Complete", done.total_bytes)


def test_mmd_prefetch_fills_the_cache_that_a_local_deployment_starts_from(
    server: WeightsServer, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from mmd_cli.program import build

    monkeypatch.setenv("HOME", str(tmp_path))
    spec = ModelSpec(
        id="org/llava",
        storage=ModelStorage(
            type="Url", url=server.put(model, "llava"), cache=WeightsCache(claim_name="weights")
        ),
    )
    with pytest.raises(UnsupportedModelError, match="mmd prefetch"):
        source.resolve(spec, weights=True)
    file = tmp_path / "demo.yaml"
    body = {
        "apiVersion": "serving.multimodal.dev/v1alpha1",
        "kind": "MultimodalDeployment",
        "metadata": {"name": "demo"},
        "spec": {
            "model": spec.model_dump(mode="json", by_alias=True, exclude_none=True),
            "decode": {"gpus": 0},
        },
    }
    file.write_text(json.dumps(body))
    result = CliRunner().invoke(build("prefetch").app, ["prefetch", "-f", str(file)])
    assert result.exit_code == 0, result.output
    assert source.resolve(spec, weights=True) == tmp_path / ".cache/mmd/weights" / folder_of(spec.storage.url)


def test_a_pod_with_a_cache_never_asks_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(env.WEIGHTS, str(tmp_path))
    monkeypatch.setattr(source, "snapshot_download", lambda *_, **__: pytest.fail("the hub was asked"))
    spec = ModelSpec(id="org/llava", storage=ModelStorage(type="Hub"))
    with pytest.raises(UnsupportedModelError, match="delete that Job"):
        source.resolve(spec, weights=True)
    folder = tmp_path / folder_of("hf://org/llava")
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    with pytest.raises(UnsupportedModelError, match="not in the cache"):
        source.resolve(spec, weights=True)
    (folder / MANIFEST).write_text("{}")
    with pytest.raises(UnsupportedModelError, match="not in the cache"):
        source.resolve(spec, weights=True)
    CachedFiles("hf://org/llava", "", {"config.json": (2, "sha256:0")}).write(folder)
    assert source.resolve(spec, weights=True) == folder
    (folder / "config.json").unlink()
    with pytest.raises(UnsupportedModelError, match="not in the cache"):
        source.resolve(spec, weights=True)


def test_the_rate_is_that_of_the_last_seconds():
    now = [0.0]
    progress = DownloadProgress(lambda: now[0])
    progress.expect(1_000)
    progress.present(100)
    progress.enter("Downloading")
    now[0] = 2.0
    progress.received(200)
    seen = progress.snapshot()
    assert (seen.bytes, seen.bytes_per_second, seen.remaining_seconds) == (300, 100, 7)
    now[0] = 30.0
    stalled = progress.snapshot()
    assert (stalled.bytes_per_second, stalled.remaining_seconds) == (0, None)


@settings(max_examples=25)
@given(
    st.lists(st.from_regex(r"https://[a-z]{1,9}(/[A-Za-z0-9._~+=-]{1,40}){0,4}", fullmatch=True), unique=True)
)
def test_every_url_has_a_folder_of_its_own(urls: list[str]):
    folders = {folder_of(url) for url in urls}
    assert len(folders) == len(urls)
    assert all(not f.startswith(".") and "/" not in f and len(f) < 128 for f in folders)
