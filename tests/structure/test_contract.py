"""Names that cross a process are spelled once, in the contract."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from mmd_api.contract import annotations, environment
from mmd_api.resource import GROUP

ROOT = Path(__file__).parents[2]
PACKAGES = ("crds/mmd_api", "operator/mmd_operator", "workers/mmd_workers", "cli/mmd_cli")
VARIABLES = {value for name, value in vars(environment).items() if name.isupper() and name != "PREFIX"}


def constants(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@pytest.mark.parametrize("package", PACKAGES)
def test_no_other_module_spells_an_environment_variable_or_annotation_of_pods(package: str) -> None:
    spelled = {
        (path.relative_to(ROOT).as_posix(), text)
        for path in (ROOT / package).rglob("*.py")
        if path.name not in ("environment.py", "annotations.py")
        for text in constants(path.read_text())
        if text in VARIABLES or text == annotations.DRAIN_ANNOTATION
    }
    assert spelled == set()


def test_every_environment_variable_has_the_prefix_and_the_name_of_its_constant() -> None:
    for name, value in vars(environment).items():
        if name.isupper() and name != "PREFIX":
            assert value == environment.PREFIX + name
            assert re.fullmatch(r"MMD_[A-Z_]+", value)


def test_the_drain_annotation_belongs_to_the_api_group() -> None:
    assert f"{GROUP}/drain" == annotations.DRAIN_ANNOTATION
