"""Writes the page of errors from the table in the contract."""

from __future__ import annotations

import inspect

from mmd_api.contract.errors import ERRORS, MmdError

_HEAD = """\
<!-- Generated from crds/mmd_api/contract/errors.py by `make crds`. Edit the types, not this page. -->
# Errors

Codes of the errors that pods raise: in responses of the gateway ([api.md](api.md#errors)), in logs, traces and the label `code` of metrics. A client sees
those with a status; the others are exchanged between pods; if one reaches a client, it is shown as `internal`. *Retryable*: another pod, or
the same one later, may succeed; the gateway retries before a client sees the error.

| code | status | retryable | meaning | remedy |
|---|---|---|---|---|
"""


def errors_page() -> str:
    """The page as Markdown."""
    return _HEAD + "".join(f"{_row(kind)}\n" for kind in ERRORS.values())


def _row(kind: type[MmdError]) -> str:
    meaning = " ".join(inspect.cleandoc(kind.__doc__ or "").partition("\n\n")[0].split())
    cells = (
        f"`{kind.code}`",
        "" if kind.status is None else str(kind.status),
        "yes" if kind.retryable else "no",
        meaning,
        kind.remedy,
    )
    return f"| {' | '.join(cells)} |"
