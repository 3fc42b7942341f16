"""The image reference of pods: by digest once the revision's first image is known, so that a moved tag changes nothing."""

from __future__ import annotations

import re

from mmd_api.spec.pods import ImageSpec
from mmd_api.status import PinnedRevision

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def worker_image(image: ImageSpec, pinned: PinnedRevision | None) -> str:
    """The image of the spec, or the same repository with the pinned digest.

    An image that was loaded onto the nodes by hand keeps its tag: its id names no repository, or one that cannot be pulled from.
    """
    written = image.worker
    if "@" in written or image.pull_policy == "Never" or pinned is None or pinned.image is None:
        return written
    repository, _, found = pinned.image.removeprefix("docker-pullable://").partition("@")
    ours = _without_tag(written)
    if not _DIGEST.fullmatch(found) or _qualified(repository) != _qualified(ours):
        return written
    return f"{ours}@{found}"


def _without_tag(image: str) -> str:
    folder, slash, last = image.rpartition("/")
    return f"{folder}{slash}{last.partition(':')[0]}"


def _qualified(repository: str) -> str:
    """As container runtimes name it: `worker` is `docker.io/library/worker`."""
    first, slash, rest = repository.partition("/")
    if not slash or not (set(first) & {".", ":"} or first == "localhost"):
        first, rest = "docker.io", repository
    if first in ("docker.io", "index.docker.io"):
        return f"docker.io/{rest if '/' in rest else f'library/{rest}'}"
    return f"{first}/{rest}"
