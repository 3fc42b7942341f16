"""Whether a template differs because the spec changed or because another release of the operator wrote it."""

from __future__ import annotations

from typing import Any

import pytest

from mmd_operator.apply import _only_builder_changed
from mmd_operator.observed import child_of
from mmd_operator.resources.naming import BUILT_ANNOTATION

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
