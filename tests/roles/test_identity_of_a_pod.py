"""What a process runs is named by content: equal for equal code and weights, another for anything else, and checked against the pin."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from mmd_api.contract.errors import RevisionMismatchError, UnsupportedModelError
from mmd_api.pipeline import PipelineConfig
from mmd_api.resource import MultimodalDeployment
from mmd_api.spec.model import ModelSpec
from mmd_api.status import PinnedAdapter, PinnedRevision
from mmd_workers.model import source
from mmd_workers.process import identity
from mmd_workers.process.identity import (
    check_pinned,
    code_fingerprint,
    identified,
    of_model,
    weights_fingerprint,
)
from mmd_workers.process.settings import WorkerSettings

DEMO = Path(str(resources.files("mmd_workers.model"))) / "demo"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DEMO, tmp_path / "model"))


def settings(
    model: Path, pinned: PinnedRevision | None = None, adapters: dict[str, str] | None = None
) -> WorkerSettings:
    body: dict[str, Any] = {
        "apiVersion": "serving.multimodal.dev/v1alpha1",
        "kind": "MultimodalDeployment",
        "metadata": {"name": "sample"},
        "spec": {"model": {"id": str(model)}, "decode": {"gpus": 0}},
    }
    if adapters is not None:
        listed = [{"name": name, "id": where} for name, where in adapters.items()]
        body["spec"]["engine"] = {"type": "VLLM", "adapters": listed}
    spec = MultimodalDeployment.parse(body).spec
    text = PipelineConfig.text_for(spec, "default", "sample", "decode", pinned)
    return WorkerSettings(
        PipelineConfig.parse(text), "sample-decode-0", "127.0.0.1", 1, "nats://127.0.0.1:1", 1
    )


def pin(name: str, revision: str = "0123456789") -> PinnedRevision:
    return PinnedRevision(revision=revision, identity=name, image="registry/worker@sha256:1")


def test_equal_code_and_weights_have_one_name_wherever_they_lie(model: Path):
    assert identified(settings(model)).identity == of_model(ModelSpec(id=str(DEMO)))
    assert identified(settings(model)).mesh.endswith(f"-{identified(settings(model)).identity}")


@pytest.mark.parametrize("at", [0.0, 0.3, 0.5, 0.999])
def test_weights_that_were_trained_on_have_another_name(model: Path, at: float):
    before = weights_fingerprint(model)
    (weights,) = model.glob("*.safetensors")
    content = bytearray(weights.read_bytes())
    position = int(at * (len(content) - 1))
    content[position] ^= 1
    weights.write_bytes(content)
    assert weights_fingerprint(model) != before


def test_of_large_files_pieces_are_read_and_their_ends_are_among_them(tmp_path: Path):
    file = tmp_path / "model.safetensors"
    size = 3 * identity.PIECES * identity.PIECE_BYTES
    with file.open("wb") as content:
        content.truncate(size)
    names = {weights_fingerprint(tmp_path)}
    for position in (0, size - 1):
        with file.open("r+b") as content:
            content.seek(position)
            content.write(b"x")
        names.add(weights_fingerprint(tmp_path))
    assert len(names) == 3


def test_settings_files_count(model: Path):
    before = weights_fingerprint(model)
    file = model / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "another": 1}))
    assert weights_fingerprint(model) != before


def test_another_version_of_any_library_is_other_code(monkeypatch: pytest.MonkeyPatch):
    code_fingerprint.cache_clear()
    before = code_fingerprint()
    found = list(identity.distributions())
    monkeypatch.setattr(identity, "distributions", lambda: [d for d in found if d.name != "msgpack"])
    code_fingerprint.cache_clear()
    assert code_fingerprint() != before
    code_fingerprint.cache_clear()


def test_a_process_that_differs_from_its_pin_exits_with_a_remedy(model: Path):
    own = identified(settings(model)).identity
    assert identified(settings(model, pin(own))).identity == own
    with pytest.raises(
        RevisionMismatchError, match=r"spec.image.worker to a digest \(registry/worker@sha256:1"
    ):
        identified(settings(model, pin("ffffffffff")))


def test_a_pin_that_comes_later_ends_a_process_that_is_something_else(model: Path):
    running = identified(settings(model))
    check_pinned(running, settings(model, pin(running.identity)).pipeline)
    with pytest.raises(RevisionMismatchError):
        check_pinned(running, settings(model, pin("ffffffffff")).pipeline)


def test_a_hub_models_commit_names_it_and_pins_later_pods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    commits = {None: "a" * 40, "b" * 40: "b" * 40}

    def fetched(model_id: str, revision: str | None, **_: object) -> str:
        folder = tmp_path / "models--org--m" / "snapshots" / commits[revision]
        if not folder.exists():
            shutil.copytree(DEMO, folder)
        return str(folder)

    monkeypatch.setattr(source, "snapshot_download", fetched)
    first = identified(settings(Path("org/m")))
    assert (first.commit, first.pipeline.spec.model.revision) == ("a" * 40, "a" * 40)
    commits[None] = "c" * 40  # the branch has moved
    monkeypatch.setitem(commits, "a" * 40, "a" * 40)
    pinned = PinnedRevision(revision="0123456789", identity=first.identity, commit=first.commit)
    later = identified(settings(Path("org/m"), pinned))
    assert (later.commit, later.mesh) == (first.commit, first.mesh)
    assert identified(settings(Path("org/m"))).identity != first.identity


def adapter(folder: Path, content: bytes = b"weights") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(content)
    return folder


def test_an_adapters_weights_and_name_are_part_of_the_identity(model: Path, tmp_path: Path):
    one, other = adapter(tmp_path / "one"), adapter(tmp_path / "other", b"others")

    def name(**adapters: Path) -> str:
        return identified(settings(model, adapters={n: str(f) for n, f in adapters.items()})).identity

    names = [name(), name(a=one), name(a=other), name(b=one), name(a=one, b=other), name(a=other, b=one)]
    assert len(set(names)) == len(names)
    assert name() == of_model(ModelSpec(id=str(DEMO)))
    adapter(one, b"trained on")
    assert name(a=one) != names[1]


@pytest.mark.parametrize("where", ["/nowhere/adapter", "nowhere"])
def test_an_adapter_that_is_not_there_is_named_with_its_entry(model: Path, where: str):
    with pytest.raises(UnsupportedModelError, match=r"^spec\.engine\.adapters\[sql\]\.id: "):
        identified(settings(model, adapters={"sql": where}))


def test_a_hub_adapters_commit_names_it_and_pins_later_pods(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    commits = {None: "a" * 40}

    def fetched(repository: str, revision: str | None, **_: object) -> str:
        assert repository == "org/sql"
        return str(
            adapter(tmp_path / "models--org--sql" / "snapshots" / commits.get(revision, str(revision)))
        )

    monkeypatch.setattr(source, "snapshot_download", fetched)
    adapters = {"sql": "org/sql"}
    first = identified(settings(model, adapters=adapters))
    assert first.adapter_commits == {"sql": "a" * 40}
    assert [one.revision for one in first.pipeline.spec.engine.adapters] == ["a" * 40]
    commits[None] = "c" * 40  # the branch has moved
    pinned = PinnedRevision(
        revision="0123456789",
        identity=first.identity,
        adapters=[PinnedAdapter(name="sql", commit=first.adapter_commits["sql"])],
    )
    later = identified(settings(model, pinned, adapters))
    assert (later.adapter_commits, later.mesh) == (first.adapter_commits, first.mesh)
    assert identified(settings(model, adapters=adapters)).identity != first.identity


def test_a_pinned_adapter_is_not_fetched_for_its_name_alone(model: Path, monkeypatch: pytest.MonkeyPatch):
    def fetched(*_: object, **__: object) -> str:
        raise AssertionError("its repository may be gone")

    monkeypatch.setattr(source, "snapshot_download", fetched)
    weights = identity.identity_of(code_fingerprint(), weights_fingerprint(model), {"sql": "a" * 40})
    pinned = PinnedRevision(
        revision="0123456789", identity=weights, adapters=[PinnedAdapter(name="sql", commit="a" * 40)]
    )
    found = identified(settings(model, pinned, {"sql": "org/sql"}))
    assert found.adapter_commits == {"sql": "a" * 40}
    assert [one.revision for one in found.pipeline.spec.engine.adapters] == ["a" * 40]


def test_the_adapter_whose_commit_differs_from_the_pinned_one_is_named(model: Path, tmp_path: Path):
    running = replace(
        identified(settings(model, adapters={"sql": str(adapter(tmp_path / "sql"))})),
        adapter_commits={"sql": "a" * 40, "poems": "c" * 40},
    )
    pinned = PinnedRevision(
        revision="0123456789",
        identity="ffffffffff",
        adapters=[PinnedAdapter(name="sql", commit="b" * 40), PinnedAdapter(name="poems", commit="c" * 40)],
    )
    with pytest.raises(RevisionMismatchError) as other:
        check_pinned(running, settings(model, pinned, {"sql": "org/sql"}).pipeline)
    assert f"commit {'a' * 40} of adapter sql, pinned {'b' * 40}" in other.value.message
    assert "of adapter poems" not in other.value.message
    assert "or of one of spec.engine.adapters" in other.value.message
