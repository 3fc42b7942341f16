"""The page `docs/messages.md`: all that users and operators may read, taken from the code.

`python docs/make_messages_page.py` writes it. What is filled in stands as <name>. Texts that a rule, a condition, a problem, an Event, an
error or a log line is made of are listed under its name; what the command line prints under its command; every other text of two words or
more, besides what is filled in, under the component that composes messages from it. Texts for programs are left out.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmd_api.crd import custom_resource_definition

ROOT = Path(__file__).parents[1]
PAGE = Path(__file__).with_name("messages.md")
PACKAGES = tuple(
    ROOT / folder
    for folder in ("crds/mmd_api", "operator/mmd_operator", "workers/mmd_workers", "cli/mmd_cli")
)
ELSEWHERE = {
    ROOT / "operator/mmd_operator/kube/metrics.py",
    ROOT / "workers/mmd_workers/observe/metrics.py",
    ROOT / "workers/mmd_workers/gateway/page/__init__.py",
    ROOT / "workers/mmd_workers/gateway/api/openapi.py",
    *(
        ROOT / "crds/mmd_api" / f"{page}.py"
        for page in ("reference", "errors_page", "generate", "contract/errors")
    ),
}
"""Descriptions of metrics and remedies of errors, which have pages, headers of HTTP, the API's document, and programs that write pages."""
NO_PARTS = ("mmd_operator/resources/", "mmd_cli/samples.py", "mmd_cli/check/prompts.py")
"""Modules whose texts are manifests and questions to models, except for those of errors and log lines."""
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
    "Stalled",
    "Deployment",
    "Service",
    "Secret",
    "Namespace",
)
WORDS, FEWEST_WORDS = 3, 2
NOT_READ = ("field", "cel", "code", "param", "pattern")
NOT_PRINTED = ("name", "thread_name_prefix", "loc", "accept", "media_type", "key")
"""Further keywords of texts that nobody reads: names of tasks and threads, options of libraries."""
LOOKED_FOR = (
    "startswith",
    "endswith",
    "removeprefix",
    "removesuffix",
    "split",
    "partition",
    "rpartition",
    "find",
    "index",
    "replace",
)
"""Methods whose texts are sought in another text."""
NO_MESSAGES = (
    "compile",
    "cast",
    "counter",
    "gauge",
    "histogram",
    "add",
    "_counter",
    "_gauge",
    "_histogram",
    "_info",
    "sub",
    "fullmatch",
)
"""Calls whose texts are patterns or types, or, with metrics, on a page of their own."""
CODE = re.compile(
    r"\bself\.|&&|==|^\^|\$$|\(\?|^\s*(\{[\"\n{]|#)|::|\\[bwds]|%\(|<!--|\bby \(|^data:|; charset=|^\(?has\("
)
"""CEL, patterns, queries and markup."""

_HEAD = """# Messages

<!-- Generated from the code by `make crds`. Do not edit. -->

Messages that a user or an operator may see, by origin. `‹name›` is a placeholder; a text that is composed from several
has a row for each. Descriptions of metrics are in [metrics.md](metrics.md), remedies of error codes in [errors.md](errors.md), alerts in
[runbooks.md](runbooks.md).
"""
_SECTIONS = {
    "rule": ("Validation rules of the resource", ""),
    "reason": ("Conditions and Events", "reason"),
    "error": ("Errors", "error"),
    "log": ("Log lines", "level"),
    "option": ("Options of the command line", "command"),
    "output": ("Output of the command line", "command"),
    "part": ("Parts of conditions, Events, errors and log lines", "composed by"),
    "field": ("Descriptions of fields", "field"),
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
    """Of all packages, and of the resource."""
    for package in PACKAGES:
        for file in sorted(set(package.rglob("*.py")) - ELSEWHERE):
            yield from _of_module(
                ast.parse(file.read_text()), file.relative_to(package.parents[0]).as_posix()
            )
    yield from _of_fields(
        "", custom_resource_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    )


def _of_module(tree: ast.Module, where: str) -> Iterator[Message]:
    listed: set[ast.AST] = set()
    for node, scope in _scoped(tree):
        origin, parts = _origin(node, where, scope), _parts(node)
        if origin is not None and origin[0] == "log":
            parts = _without_key(parts)
        if origin is not None:
            least = {"rule": 1, "log": FEWEST_WORDS}.get(origin[0], WORDS)  # a remedy may be short
            if texts := dict.fromkeys(_sentences(parts, least, scope, listed)):
                yield Message(*origin, "; ".join(texts))
            elif isinstance(node, ast.Call) and _called(node) == "ConditionState":
                yield Message(*origin, f"<{_name(node.args[-1])}>")  # put together elsewhere
        if isinstance(node, ast.Dict) and where.startswith("mmd_operator"):
            yield from _by_reason(node, scope, listed)
    yield from _of_options(tree, where, listed)
    if where.startswith(NO_PARTS):
        return
    kind, group = _group(where)
    for node in _literals(tree):
        if node not in listed and (text := _text(node)) and _is_composed(text):
            yield Message(kind, group, " ".join(text.split()))


def _of_options(tree: ast.Module, where: str, listed: set[ast.AST]) -> Iterator[Message]:
    """What `--help` prints: of commands, and of their options."""
    _, group = _group(where)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and where == f"mmd_cli/commands/{node.name}.py":
            yield Message(
                "option", group, (ast.get_docstring(node) or "").split("\n\n")[0].replace("\n", " ")
            )
        if isinstance(node, ast.Call):
            for keyword in node.keywords:
                if keyword.arg == "help" and (text := _text(keyword.value)):
                    listed.add(keyword.value)
                    yield Message("option", group, " ".join(text.split()))


COMMANDS = {
    "mmd_cli/local/": "up",
    "mmd_cli/check/": "check",
    "mmd_cli/plan_memory.py": "plan-memory",
    "mmd_cli/slo_report.py": "report",
    "mmd_cli/pictures.py": "report",
    "mmd_cli/report.py": "demo",
    "mmd_cli/demo.py": "demo",
    "mmd_cli/prometheus.py": "prometheus",
    "mmd_cli/top.py": "top",
    "mmd_operator/simulate/": "simulate",
    "mmd_operator/explain.py": "explain",
    "mmd_operator/operator_command.py": "operator",
    "mmd_workers/commands.py": "worker",
}
"""Modules and packages of one command, besides `mmd_cli/commands`."""


def _group(where: str) -> tuple[str, str]:
    """Kind and group of the texts of a module that are no messages of their own."""
    package, name, *inner = where.split("/")
    if (package, name) == ("mmd_cli", "commands"):
        return "output", f"`mmd {inner[0].removesuffix('.py').replace('_', '-')}`"
    for begin, command in COMMANDS.items():
        if where.startswith(begin):
            return "output", f"`mmd {command}`"
    if package == "mmd_cli":
        return "output", "`mmd`"
    component = {"mmd_api": "resource", "mmd_operator": "operator", "mmd_workers": "workers"}[package]
    return "part", f"{component}: {name.removesuffix('.py').replace('_', ' ')}"


def _is_composed(text: str) -> bool:
    """Whether a text is one for people without what is filled in, and without the markup of the terminal."""
    return _is_read(re.sub(r"<[^<>]*>|\[/?(bold|red|green|yellow|dim)\]", "-", text), FEWEST_WORDS)


def _of_fields(path: str, schema: Mapping[str, Any]) -> Iterator[Message]:
    if path and (text := schema.get("description")):
        yield Message("field", f"`{path}`", " ".join(text.split()))
    for name, inner in schema.get("properties", {}).items():
        yield from _of_fields(f"{path}.{name}".removeprefix("."), inner)
    if "items" in schema:
        yield from _of_fields(f"{path}[]", schema["items"])


Scope = Mapping[str, list[ast.expr]]
"""What names may stand for: values assigned in a function and in its module, and what functions of the module return."""


def _scoped(tree: ast.Module) -> Iterator[tuple[ast.AST, Scope]]:
    """Every node, with what the names in it may hold."""
    outside = {**_assigned(tree.body), **_returned(tree)}
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    inside: dict[ast.AST, Scope] = {}
    for function in functions:
        scope = {**outside, **_assigned(function.body)}
        inside |= dict.fromkeys(ast.walk(function), scope)
    for node in ast.walk(tree):
        yield node, inside.get(node, outside)


def _assigned(body: list[ast.stmt]) -> dict[str, list[ast.expr]]:
    found: dict[str, list[ast.expr]] = {}
    for statement in body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in targets:
                    if isinstance(target, ast.Name):
                        found.setdefault(target.id, []).append(node.value)
    return found


def _returned(tree: ast.Module) -> dict[str, list[ast.expr]]:
    """What the functions of a module return, by their name."""
    return {
        function.name: [
            n.value for n in ast.walk(function) if isinstance(n, ast.Return) and n.value is not None
        ]
        for function in tree.body
        if isinstance(function, ast.FunctionDef)
    }


def _by_reason(node: ast.Dict, scope: Scope, listed: set[ast.AST]) -> Iterator[Message]:
    """A table of texts by the reason that they belong to."""
    for key, value in zip(node.keys, node.values, strict=True):
        if isinstance(key, ast.Constant) and isinstance(key.value, str) and REASON.fullmatch(key.value):
            for text in _sentences([value], FEWEST_WORDS, scope, listed):
                yield Message("reason", key.value, text)


def _literals(tree: ast.Module) -> Iterator[ast.expr]:
    """Texts that are no docstring, no part of another text and nothing but a pattern, a type or a description of a metric."""
    passed = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _called(node) in NO_MESSAGES]
    inner = {part for call in passed for part in ast.walk(call)}
    inner |= {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    inner |= {
        part
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for value in node.values
        for part in (
            [value]
            if isinstance(value, ast.Constant)
            else ast.walk(getattr(value, "format_spec", None) or ast.Pass())
        )
    }
    inner |= {
        keyword.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg in (*NOT_READ, *NOT_PRINTED)
    }
    inner |= {part for node in ast.walk(tree) for part in _compared(node)}
    for node in ast.walk(tree):
        if node not in inner and isinstance(node, ast.Constant | ast.JoinedStr):
            yield node


def _compared(node: ast.AST) -> list[ast.expr]:
    """Texts that a program looks for in others, and what an assertion tells programmers."""
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        return [
            part for side in sides for part in ([side, *side.elts] if isinstance(side, ast.Tuple) else [side])
        ]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LOOKED_FOR:
        return list(node.args)
    return [node.msg] if isinstance(node, ast.Assert) and node.msg is not None else []


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _parts(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Call):
        return [*node.args, *(keyword.value for keyword in node.keywords if keyword.arg not in NOT_READ)]
    return node.elts if isinstance(node, ast.Tuple) else []


def _without_key(parts: list[ast.expr]) -> list[ast.expr]:
    """The arguments of a log call without the key under which a repeated line is suppressed."""
    if len(parts) < 2 or _text(parts[0]) is None or not (_text(parts[1]) or isinstance(parts[1], ast.Name)):
        return parts
    is_format = isinstance(parts[0], ast.Constant) and "%" in str(parts[0].value)
    return parts if is_format else parts[1:]


def _origin(node: ast.AST, where: str, scope: Scope) -> tuple[str, str] | None:
    """Kind and name of what a call, or a tuple that begins with a reason, stands for; None: it is no message."""
    called = node.func if isinstance(node, ast.Call) else None
    owner, name = None, ""
    if isinstance(called, ast.Attribute):
        owner, name = called.value, called.attr
    elif isinstance(called, ast.Name):
        name = called.id
    if name == "Rule":
        return "rule", ""
    if name == "ConditionState" and isinstance(node, ast.Call) and len(node.args) == 4:
        reasons = [text for part, text in _options(node.args[2], scope) if part is not None]
        return "reason", " or ".join(reasons or [_name(node.args[0])])
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


def _sentences(parts: list[ast.expr], least: int, scope: Scope, listed: set[ast.AST]) -> Iterator[str]:
    """The texts of expressions; the literals that they are in become `listed`."""
    for part in parts:
        for literal, text in _options(part, scope):
            if _is_read(text, least):
                listed.add(literal)
                yield " ".join(text.split())


def _is_read(text: str, least: int) -> bool:
    words = len(re.findall(r"[^\W\d_]{2,}", text))
    return not CODE.search(text) and words >= least and (least == 1 or " " in text.strip())


def _options(node: ast.expr, scope: Scope, depth: int = 3) -> Iterator[tuple[ast.expr, str]]:
    """What an expression may be as a text, with its literal: of each side of a choice, and of each value that a name may hold."""
    if isinstance(node, ast.IfExp | ast.BoolOp):
        choices = [node.body, node.orelse] if isinstance(node, ast.IfExp) else node.values
    elif isinstance(node, ast.Name) and depth:
        choices, depth = scope.get(node.id, []), depth - 1
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and depth:
        choices, depth = scope.get(node.func.id, []), depth - 1
    elif isinstance(node, ast.Subscript):
        choices = [node.value]
    elif isinstance(node, ast.Dict):
        choices = node.values
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) and _text(node) is None:
        choices = [node.left, node.right]
    else:
        if (text := _text(node)) is not None:
            yield node, text
        return
    for choice in choices:
        yield from _options(choice, scope, depth)


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
