"""A path that one process asks another for is spelled in the contract and nowhere else."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from mmd_api.contract import paths

ROOT = Path(__file__).parents[2]
SPELLED = {value for name, value in vars(paths).items() if name.isupper()}
SOURCES = sorted(
    source
    for package in ("crds", "operator", "workers", "cli")
    for source in (ROOT / package).rglob("*.py")
    if source != Path(paths.__file__)
)


def strings(tree: ast.AST) -> Iterator[ast.Constant]:
    """String literals, the parts of f-strings included, without docstrings."""
    docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
            yield node


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: str(source.relative_to(ROOT)))
def test_a_path_of_the_contract_is_spelled_only_there(source: Path) -> None:
    pattern = re.compile(rf"(?<![\w.])({'|'.join(map(re.escape, SPELLED))})(?![\w-])")
    found = [
        f"{source.relative_to(ROOT)}:{node.lineno}: {node.value}"
        for node in strings(ast.parse(source.read_text()))
        if pattern.match(node.value)
    ]
    assert not found
