"""Whether a template differs because the spec changed or because another release of the operator wrote it."""

from __future__ import annotations

from typing import Any

import pytest

from mmd_operator.observed.observed import child_of
from mmd_operator.resources.naming import BUILT_ANNOTATION
from mmd_operator.rollout.applier import _image_was_pinned, _only_builder_changed

from .bodies import NEW, workload


def gateway(inputs: str, built: str | None) -> dict[str, Any]:
    body = workload("Deployment", "gateway", None, template=NEW, inputs=inputs)
    body["metadata"]["annotations"] = {BUILT_ANNOTATION: built} if built else {}
    return body


@pytest.mark.parametrize(
    ("inputs", "built", "keeps"),
    [
        ("spec-1", "release-2", True),
        ("spec-2", "release-2", False),
        ("spec-1", "release-1", False),
        ("spec-1", None, False),
    ],
    ids=["only the builder", "the spec as well", "nothing", "a manifest without its builder"],
)
def test_pods_keep_their_template_when_only_its_builder_changed(
    inputs: str, built: str | None, keeps: bool
) -> None:
    present = child_of("Deployment", gateway("spec-1", "release-1"))
    assert _only_builder_changed(gateway(inputs, built), present) is keeps


DIGEST = f"registry.example/worker@sha256:{'a' * 64}"


def template(image: str, *injected: str) -> dict[str, Any]:
    containers = [{"name": name, "image": f"{name}:1"} for name in injected]
    return {"spec": {"containers": [*containers, {"name": "gateway", "image": image}]}}


@pytest.mark.parametrize(
    ("present", "wanted", "pinned"),
    [
        (template("worker:1"), template(DIGEST), True),
        (template("worker:1", "mesh"), template(DIGEST), True),
        (template(DIGEST, "mesh"), template(DIGEST), False),
        (template(f"mirror/{DIGEST}"), template(DIGEST), False),
        (template("mirror/worker:1", "mesh"), template("worker:1"), False),
        (template(DIGEST), template("worker:1"), False),
    ],
    ids=["pinned", "pinned, injected", "injected", "mirror", "mirror of a tag, injected", "no longer pinned"],
)
def test_only_an_image_that_was_pinned_since_replaces_gateways(
    present: dict[str, Any], wanted: dict[str, Any], pinned: bool
) -> None:
    assert _image_was_pinned(present, wanted) is pinned
