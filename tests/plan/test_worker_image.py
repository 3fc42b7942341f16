"""Which name of its image a pod is made with, as a table."""

from __future__ import annotations

import pytest

from mmd_api.spec.pods import ImageSpec
from mmd_api.status import PinnedRevision
from mmd_operator.resources.image import worker_image

DIGEST = f"sha256:{'a' * 64}"
OTHER = f"sha256:{'b' * 64}"


def named(written: str, found: str | None, policy: str = "IfNotPresent") -> str:
    image = ImageSpec.model_validate({"worker": written, "pullPolicy": policy})
    return worker_image(image, PinnedRevision(revision="0123456789", identity="0123456789", image=found))


@pytest.mark.parametrize(
    ("written", "found", "name"),
    [
        ("ghcr.io/team/worker:v1", f"ghcr.io/team/worker@{DIGEST}", f"ghcr.io/team/worker@{DIGEST}"),
        ("ghcr.io/team/worker", f"ghcr.io/team/worker@{DIGEST}", f"ghcr.io/team/worker@{DIGEST}"),
        ("host:5000/worker:v1", f"host:5000/worker@{DIGEST}", f"host:5000/worker@{DIGEST}"),
        ("host:5000/worker", f"docker-pullable://host:5000/worker@{DIGEST}", f"host:5000/worker@{DIGEST}"),
        ("localhost/worker:v1", f"localhost/worker@{DIGEST}", f"localhost/worker@{DIGEST}"),
        ("worker:v1", f"docker.io/library/worker@{DIGEST}", f"worker@{DIGEST}"),
        ("team/worker:v1", f"docker.io/team/worker@{DIGEST}", f"team/worker@{DIGEST}"),
    ],
)
def test_a_registry_image_is_named_by_the_pinned_digest(written, found, name):
    assert named(written, found) == name


@pytest.mark.parametrize(
    ("written", "found"),
    [
        ("worker:v1", None),
        ("worker:v1", DIGEST),
        ("worker:v1", f"docker://{DIGEST}"),
        ("worker:v1", "docker.io/library/worker:v1"),
        ("worker:v1", f"docker.io/library/import-2026-11-23@{DIGEST}"),
        ("ghcr.io/team/worker:v1", f"docker.io/team/worker@{DIGEST}"),
        ("ghcr.io/team/worker:v1", "ghcr.io/team/worker@sha256:aa"),
        (f"ghcr.io/team/worker@{DIGEST}", f"ghcr.io/team/worker@{OTHER}"),
    ],
)
def test_any_other_keeps_the_name_that_the_spec_gives_it(written, found):
    assert named(written, found) == written


def test_an_image_that_is_never_pulled_keeps_its_name():
    assert (
        named("ghcr.io/team/worker:v1", f"ghcr.io/team/worker@{DIGEST}", "Never") == "ghcr.io/team/worker:v1"
    )


def test_an_unpinned_revision_uses_the_image_name_of_the_spec():
    assert worker_image(ImageSpec(worker="ghcr.io/team/worker:v1"), None) == "ghcr.io/team/worker:v1"
