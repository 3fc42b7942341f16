"""The identity of this process: its code and its weights, named by their content.

A pipeline revision names an image tag and a branch, which may move. Peers find each other by revision and identity together, so pods
of one revision that run different code or weights never exchange a message. The operator pins the identity of the first Ready pod of
a revision; any other ends with `RevisionMismatchError`.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import resources
from importlib.metadata import distributions
from pathlib import Path
from typing import Generic

from mmd_api.contract.errors import RevisionMismatchError
from mmd_api.contract.version import WIRE_VERSION
from mmd_api.pipeline import PipelineConfig
from mmd_api.spec.adapters import AdapterSpec, ModelOrAdapter
from mmd_api.spec.model import ModelSpec
from mmd_api.status import PinnedRevision
from mmd_workers.model import source
from mmd_workers.process.settings import WorkerSettings

OWN_PACKAGES = ("mmd_api", "mmd_workers")
PIECES = 256
PIECE_BYTES = 64 * 1024
"""A file larger than `PIECES` pieces is read in evenly spread pieces: 16 MiB, however large it is. A change of less than a 256th of such
a file may lie between them."""


def identified(settings: WorkerSettings) -> WorkerSettings:
    """The settings with this process's identity, and with the hub commits of model and adapters that are used from now on.

    Raises:
        RevisionMismatchError: the pipeline revision is pinned to another identity.
        UnsupportedModelError: the model or an adapter is missing.
    """
    model, pinned = settings.pipeline.spec.model, settings.pipeline.pinned
    model_in_use = _Used.of(model, pinned.commit if pinned is not None else None, source.resolve)
    commits = {adapter.name: adapter.commit for adapter in pinned.adapters} if pinned is not None else {}
    adapters = [
        _adapter(adapter, commits.get(adapter.name)) for adapter in settings.pipeline.spec.engine.adapters
    ]
    engine = settings.pipeline.spec.engine.model_copy(
        update={"adapters": [adapter.spec for adapter in adapters]}
    )
    spec = settings.pipeline.spec.model_copy(update={"model": model_in_use.spec, "engine": engine})
    identity = identity_of(
        code_fingerprint(),
        model_in_use.weights,
        {adapter.spec.name: adapter.weights for adapter in adapters},
    )
    result = replace(
        settings,
        pipeline=settings.pipeline.model_copy(update={"spec": spec}),
        identity=identity,
        commit=model_in_use.commit or "",
        adapter_commits={
            adapter.spec.name: adapter.commit for adapter in adapters if adapter.commit is not None
        },
    )
    check_pinned(result, settings.pipeline)
    return result


def check_pinned(settings: WorkerSettings, config: PipelineConfig) -> None:
    """Compare this process with the identity that its pipeline revision is pinned to.

    Raises:
        RevisionMismatchError: this process runs other code or weights.
    """
    pinned = config.pinned
    if pinned is None or not settings.identity or pinned.identity == settings.identity:
        return
    adapters = ", or of one of spec.engine.adapters," if config.spec.engine.adapters else ""
    raise RevisionMismatchError(
        f"pod {settings.pod} runs code and weights {settings.identity}, but revision {config.revision} is pinned to "
        f"{pinned.identity} ({'; '.join(_commits(settings, pinned))}): the image tag, or the branch or files of the model{adapters} "
        f"changed after the revision was pinned; set spec.image.worker to a digest ({pinned.image or 'see status.pinned'} keeps what is "
        "running) and each revision to a commit"
    )


def _commits(settings: WorkerSettings, pinned: PinnedRevision) -> Iterator[str]:
    """The commits in use by this process, and the pinned ones."""
    yield f"model commit {settings.commit or 'none'}, pinned {pinned.commit or 'none'}"
    for adapter in pinned.adapters:
        commit = settings.adapter_commits.get(adapter.name, "none")
        if commit != adapter.commit:
            yield f"commit {commit} of adapter {adapter.name}, pinned {adapter.commit}"


@dataclass(frozen=True, slots=True)
class _Used(Generic[ModelOrAdapter]):
    """A model or an adapter, with the hub commit used from now on. `weights`: the identity of its weights."""

    spec: ModelOrAdapter
    commit: str | None
    weights: str

    @classmethod
    def of(
        cls, spec: ModelOrAdapter, pinned: str | None, resolve: Callable[..., Path]
    ) -> _Used[ModelOrAdapter]:
        if pinned is not None and spec.source == "HubId":
            spec = spec.model_copy(update={"revision": pinned})
        folder = resolve(spec, weights=False)
        commit = source.commit_of(folder, spec)
        if commit is not None:  # the branch may move before the weights are fetched
            spec = spec.model_copy(update={"revision": commit})
        return cls(spec, commit, commit or weights_fingerprint(folder))


def _adapter(spec: AdapterSpec, pinned: str | None) -> _Used[AdapterSpec]:
    """Resolve an adapter, without fetching one that is pinned.

    Pods without an engine need no adapter, and start even while the hub does not have it.
    """
    if pinned is not None and spec.source == "HubId":
        return _Used(spec.model_copy(update={"revision": pinned}), pinned, pinned)
    return _Used.of(spec, None, source.resolve_adapter)


def identity_of(code: str, weights: str, adapters: Mapping[str, str] | None = None) -> str:
    """Ten hex digits that identify code, weights, and the weights of adapters by their names, together."""
    of_adapters = f" {sorted(adapters.items())}" if adapters else ""
    return hashlib.sha256(f"{WIRE_VERSION} {code} {weights}{of_adapters}".encode()).hexdigest()[:10]


@lru_cache(maxsize=1)
def code_fingerprint() -> str:
    """A hash of our own packages' content, and of the versions of Python and everything installed with them.

    Kept for the life of the process and its forks: files that change later are not what runs.
    """
    digest = hashlib.sha256(f"{sys.version_info[:3]}".encode())
    for package in OWN_PACKAGES:
        root = Path(str(resources.files(package)))
        for file in sorted(
            path for path in root.rglob("*") if path.is_file() and "__pycache__" not in path.parts
        ):
            digest.update(f"{package}/{file.relative_to(root)} ".encode())
            digest.update(hashlib.sha256(file.read_bytes()).digest())
    for name in sorted({f"{distribution.name}=={distribution.version}" for distribution in distributions()}):
        digest.update(name.encode())
    return digest.hexdigest()


def weights_fingerprint(folder: Path) -> str:
    """A hash of names, sizes and pieces of a model folder's files. Further training changes nearly every piece."""
    digest = hashlib.sha256()
    files = {path for pattern in source.WEIGHT_PATTERNS for path in folder.glob(pattern) if path.is_file()}
    for file in sorted(files):
        size = file.stat().st_size
        digest.update(f"{file.name} {size} ".encode())
        for piece in _pieces(file, size):
            digest.update(piece)
    return digest.hexdigest()


def _pieces(file: Path, size: int) -> Iterator[bytes]:
    """The whole of a small file; of a large one its beginning, its end, and pieces at equal distances between."""
    with file.open("rb") as content:
        if size <= PIECES * PIECE_BYTES:
            yield content.read()
            return
        for number in range(PIECES):
            content.seek((size - PIECE_BYTES) * number // (PIECES - 1))
            yield content.read(PIECE_BYTES)


def of_model(model: ModelSpec) -> str:
    """The identity of a process of this installation with this model."""
    folder = source.resolve(model, weights=False)
    return identity_of(code_fingerprint(), source.commit_of(folder, model) or weights_fingerprint(folder))
