"""Checks the rules of the house that ruff, mypy and import-linter do not know.

`python -m ci.house` prints every violation, and exits with 1 if there is one.

- A folder has at most 20 modules, and a package no file name more than twice.
- No comment begins as a genitive, and no docstring's first sentence has more than 25 words.
- No constructor takes more than eight arguments, except those of `ci/long_constructors.txt`, a list that only
  shrinks.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (
    "charts/mmd_dashboards",
    "cli/mmd_cli",
    "crds/mmd_api",
    "operator/mmd_operator",
    "workers/mmd_workers",
    "support",
)
MOST_MODULES = 20
MOST_NAMESAKES = 2
MOST_WORDS = 25
MOST_ARGUMENTS = 8
LONG_CONSTRUCTORS = ROOT / "ci" / "long_constructors.txt"
GENITIVE = re.compile(r"#\s+(of|that|for which)\s")


def modules(root: Path, package: str) -> list[Path]:
    """The Python files of a package."""
    return sorted((root / package).rglob("*.py"))


def crowded_folders(paths: list[Path]) -> Iterator[str]:
    """Folders with too many modules."""
    by_folder: dict[Path, int] = defaultdict(int)
    for path in paths:
        by_folder[path.parent] += path.name != "__init__.py"
    for folder, number in by_folder.items():
        if number > MOST_MODULES:
            yield f"{folder}: {number} modules, more than {MOST_MODULES}; divide it into folders"


def namesakes(paths: list[Path]) -> Iterator[str]:
    """File names that occur too often in one package."""
    by_name: dict[str, list[Path]] = defaultdict(list)
    for path in paths:
        if not path.name.startswith("__"):
            by_name[path.name].append(path)
    for name, same_named in by_name.items():
        if len(same_named) > MOST_NAMESAKES:
            yield f"{name}: {', '.join(str(path.parent) for path in same_named)}; name each after what it has"


def first_sentence(docstring: str) -> str:
    """The first sentence of a docstring, as one line."""
    paragraph = " ".join(docstring.strip().split("\n\n")[0].split())
    return re.split(r"(?<=[.!?])\s+(?=[A-Z`\"(])|;\s", paragraph)[0]


def long_sentences(path: Path, tree: ast.Module) -> Iterator[str]:
    """Docstrings whose first sentence is too long."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(tree):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)):
            words = len(first_sentence(text).split())
            if words > MOST_WORDS:
                line = node.body[0].lineno
                yield f"{path}:{line}: {words} words in the first sentence, more than {MOST_WORDS}; divide it"


def genitives(path: Path, text: str) -> Iterator[str]:
    """Comments that begin as a genitive."""
    for number, line in enumerate(text.splitlines(), 1):
        if GENITIVE.search(line):
            yield f"{path}:{number}: the comment is a genitive; write a sentence, or put it into the name"


def constructors(path: Path, tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Classes, and the number of arguments of their constructors without `self`."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef):
            continue
        for method in node.body:
            if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                arguments = method.args
                number = len(arguments.posonlyargs + arguments.args + arguments.kwonlyargs) - 1
                yield f"{path}:{node.name}", number


def faults(root: Path = ROOT) -> list[str]:
    """All violations of the rules."""
    allowed = set(LONG_CONSTRUCTORS.read_text().split()) if LONG_CONSTRUCTORS.exists() else set()
    violations: list[str] = []
    long: set[str] = set()
    for package in PACKAGES:
        paths = modules(root, package)
        short = [path.relative_to(root) for path in paths]
        violations += [*crowded_folders(short), *namesakes(short)]
        for path in short:
            text = (root / path).read_text()
            tree = ast.parse(text)
            violations += [*long_sentences(path, tree), *genitives(path, text)]
            long |= {name for name, number in constructors(path, tree) if number > MOST_ARGUMENTS}
    violations += [
        f"{name}: more than {MOST_ARGUMENTS} arguments; join those that belong together"
        for name in sorted(long - allowed)
    ]
    violations += [
        f"{name}: no longer too long; remove it from {LONG_CONSTRUCTORS.name}"
        for name in sorted(allowed - long)
    ]
    return violations


def main() -> int:
    """Print all violations of the rules."""
    violations = faults()
    print("\n".join(violations) or "the house keeps its rules")
    return int(bool(violations))


if __name__ == "__main__":
    sys.exit(main())
