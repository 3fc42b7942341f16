"""One word, one meaning: no two modules of the product give the same name to a class or a type."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("charts", "cli", "crds", "operator", "workers")


def defined(module: ast.Module) -> list[str]:
    """Public classes and aliases of types."""
    classes = [node.name for node in module.body if isinstance(node, ast.ClassDef)]
    assigned = [node.targets[0] for node in module.body if isinstance(node, ast.Assign)]
    names = [target.id for target in assigned if isinstance(target, ast.Name)]
    return classes + [name for name in names if name[0].isupper() and not name.isupper()]


def test_a_name_stands_for_one_class_or_type() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for package in PACKAGES:
        for source in sorted((ROOT / package).rglob("*.py")):
            for name in defined(ast.parse(source.read_text())):
                if not name.startswith("_"):
                    places[name].append(str(source.relative_to(ROOT)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
