"""The page `docs/messages.md`: sentences that users and operators may read, taken from the code.

`python docs/make_messages_page.py` writes it. A sentence is a text of three words or more; what is filled in stands as <name>.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = Path(__file__).with_name("messages.md")
PACKAGES = tuple(
    ROOT / folder
    for folder in ("crds/mmd_api", "operator/mmd_operator", "workers/mmd_workers", "cli/mmd_cli")
)
LEVELS = ("info", "warning", "error", "exception", "critical")
REASON = re.compile(r"[A-Z][a-z]+([A-Z][a-z]+)*")
LOGGERS = ("log", "logger", "limited")
NO_REASONS = (
    "True",
    "False",
    "Unknown",
    "Ready",
    "Progressing",
    "Degraded",
    "Deployment",
    "Service",
    "Secret",
    "Namespace",
)
WORDS = 3
NOT_READ = ("field", "cel", "code", "param")
CEL = re.compile(r"\bself\b|&&|==")

_HEAD = """# Messages

<!-- Generated from the code by `make crds`. Do not edit. -->

Messages that a user or an operator may see, by origin. The list is not complete: it contains the texts found where an error, a log
line or a condition is created, but not those that are composed elsewhere. `‹name›` is a placeholder. The descriptions of fields
are in [reference.md](reference.md), those of metrics in [metrics.md](metrics.md), alerts in [runbooks.md](runbooks.md).
"""
_SECTIONS = {
    "rule": ("Validation rules of the resource", ""),
    "reason": ("Conditions and Events", "reason"),
    "error": ("Errors", "error"),
    "log": ("Log lines", "level"),
}


@dataclass(frozen=True, order=True)
class Message:
    """One sentence. `kind`: a key of `_SECTIONS`; `name`: the reason, error or level that it comes with."""

    kind: str
    name: str
    text: str


def page() -> str:
    """The whole page."""
    found = sorted(set(messages()))
    parts = [_HEAD]
    for kind, (title, column) in _SECTIONS.items():
        columns = [column, "message"] if column else ["message"]
        parts.append(f"\n## {title}\n\n{_row(columns)}{_row(['---'] * len(columns))}")
        for message in found:
            if message.kind == kind:
                parts.append(_row([message.name, _escaped(message.text)][-len(columns) :]))
    return "".join(parts)


def messages() -> Iterator[Message]:
    """Of all packages."""
    for package in PACKAGES:
        for file in sorted(package.rglob("*.py")):
            where = file.relative_to(package.parents[0]).as_posix()
            for node in ast.walk(ast.parse(file.read_text())):
                origin, parts = _origin(node, where), _parts(node)
                least = 1 if origin == ("rule", "") else WORDS  # a remedy may be short
                if origin is not None and (text := "; ".join(dict.fromkeys(_sentences(parts, least)))):
                    yield Message(*origin, text)


def _parts(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Call):
        return [*node.args, *(keyword.value for keyword in node.keywords if keyword.arg not in NOT_READ)]
    return node.elts if isinstance(node, ast.Tuple) else []


def _origin(node: ast.AST, where: str) -> tuple[str, str] | None:
    """Kind and name of what a call, or a tuple that begins with a reason, stands for; None: it is no message."""
    called = node.func if isinstance(node, ast.Call) else None
    owner, name = None, ""
    if isinstance(called, ast.Attribute):
        owner, name = called.value, called.attr
    elif isinstance(called, ast.Name):
        name = called.id
    if name == "Rule":
        return "rule", ""
    if name.endswith("Error") and name[0].isupper():
        return "error", name
    if owner is not None and name in LEVELS:
        logger = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
        return ("log", "error" if name == "exception" else name) if logger.strip("_") in LOGGERS else None
    if not where.startswith("mmd_operator"):
        return None
    constants = [p.value for p in _parts(node) if isinstance(p, ast.Constant) and isinstance(p.value, str)]
    reason = next((c for c in constants if REASON.fullmatch(c) and c not in NO_REASONS), None)
    return ("reason", reason) if reason else None


def _sentences(parts: list[ast.expr], least: int) -> Iterator[str]:
    for part in parts:
        for option in (part.body, part.orelse) if isinstance(part, ast.IfExp) else (part,):
            text = _text(option)
            if text is not None and not CEL.search(text) and len(re.findall(r"[^\W\d_]{2,}", text)) >= least:
                yield " ".join(text.split())


def _text(node: ast.expr) -> str | None:
    """A constant or an f-string as people read it."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%(\.\d+)?[sdfgr]", "<…>", node.value)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _text(node.left), _text(node.right)
        return (left or "<…>") + (right or "<…>") if left or right else None
    if not isinstance(node, ast.JoinedStr):
        return None
    parts = []
    for value in node.values:
        if isinstance(value, ast.Constant):
            parts.append(str(value.value))
        else:
            assert isinstance(value, ast.FormattedValue)
            parts.append(f"<{_name(value.value)}>")
    return "".join(parts)


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr.strip("_").replace("_", " ")
    if isinstance(node, ast.Name):
        return node.id.replace("_", " ")
    if isinstance(node, ast.Call) and node.args and not isinstance(node.args[0], ast.GeneratorExp):
        return _name(node.args[0])
    return "…"


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |\n"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "‹").replace(">", "›")


def main() -> None:
    """Write the page, or with `--check` exit 1 when it is not what the code says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    if not parser.parse_args().check:
        PAGE.write_text(page())
    elif not PAGE.exists() or PAGE.read_text() != page():
        sys.exit(f"{PAGE.name} is out of date: run make crds")


if __name__ == "__main__":
    main()
