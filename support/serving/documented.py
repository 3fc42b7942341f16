"""Compares answers with an OpenAPI document: their statuses, content types and bodies."""

from __future__ import annotations

import json
import re
from functools import cached_property
from typing import Any

import jsonschema_rs


class Documented:
    """The responses that a document has."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.document = document
        self._validators: dict[str, Any] = {}  # by reference to their schema

    @cached_property
    def _paths(self) -> list[tuple[re.Pattern[str], str]]:
        """Patterns of paths. Names in them may have slashes, and those without a name come first."""
        paths = sorted(self.document["paths"], key=lambda path: ("{" in path, -len(path)))
        return [
            (re.compile(re.sub(r"\\\{\w+\\\}", ".+", re.escape(path)), re.DOTALL), path) for path in paths
        ]

    def path(self, path: str) -> str | None:
        """The path of the document that a request's path is, or None."""
        path = path.partition("?")[0]
        if len(path) > 1:
            path = path.removesuffix("/")
        return next((found for pattern, found in self._paths if pattern.fullmatch(path)), None)

    def wrong(self, method: str, path: str, status: int, content_type: str, body: bytes) -> str:
        """What differs from the document in an answer; empty if nothing does. The bodies of streams and files are not compared."""
        operation = self.document["paths"].get(self.path(path) or "", {}).get(method.lower())
        if operation is None:
            return ""
        response = operation["responses"].get(str(status))
        if response is None:
            return f"status {status} is not documented"
        kind = content_type.partition(";")[0]
        if kind not in response["content"]:
            return f"content type {content_type!r} is not documented for status {status}"
        if kind != "application/json":
            return ""
        reference = response["content"][kind]["schema"]["$ref"]
        errors = self._validator(reference).iter_errors(json.loads(body))
        return next((f"not as {reference}: {str(error)[:500]}" for error in errors), "")

    def _validator(self, reference: str) -> Any:
        if reference not in self._validators:
            schema = {"$ref": reference, "components": self.document["components"]}
            self._validators[reference] = jsonschema_rs.Draft202012Validator(schema)
        return self._validators[reference]
