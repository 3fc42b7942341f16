"""Image reference of pods: by digest once the revision's first image is known, so that a moved tag changes nothing."""

from __future__ import annotations

import re

from mmd_api.spec.pods import ImageSpec
from mmd_api.status import PinnedRevision

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def worker_image(image: ImageSpec, pinned: PinnedRevision | None) -> str:
    """The image of the spec, or the same repository with the pinned digest.

    An image loaded onto the nodes by hand keeps its tag: its ID names no repository, or one that cannot be pulled from.
    """
    spec_image = image.worker
    if "@" in spec_image or image.pull_policy == "Never" or pinned is None or pinned.image is None:
        return spec_image
    repository, _, digest = pinned.image.removeprefix("docker-pullable://").partition("@")
    spec_repository = _without_tag(spec_image)
    if not _DIGEST.fullmatch(digest) or _qualified(repository) != _qualified(spec_repository):
        return spec_image
    return f"{spec_repository}@{digest}"


def _without_tag(image: str) -> str:
    folder, slash, last = image.rpartition("/")
    return f"{folder}{slash}{last.partition(':')[0]}"


def _qualified(repository: str) -> str:
    """A repository as container runtimes name it: `worker` is `docker.io/library/worker`."""
    first, slash, rest = repository.partition("/")
    if not slash or not (set(first) & {".", ":"} or first == "localhost"):
        first, rest = "docker.io", repository
    if first in ("docker.io", "index.docker.io"):
        return f"docker.io/{rest if '/' in rest else f'library/{rest}'}"
    return f"{first}/{rest}"
