"""Types of fields that several parts of the spec share."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from pydantic.types import JsonValue


def keyed_by(field: str) -> dict[str, JsonValue]:
    """Entries in the schema of a list that is keyed by this field.

    `kubectl apply` merges the list's entries one by one, and none may be there twice.
    """
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [field]}


Name = Annotated[str, Field(max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")]


def _with_quotes(value: Any) -> Any:
    """A quantity that YAML reads as a whole number, as Kubernetes takes it, too."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


_WHOLE_OR_TEXT: dict[str, JsonValue] = {"x-kubernetes-int-or-string": True}
CpuQuantity = Annotated[
    str,
    Field(max_length=32, pattern=r"^([0-9]+(\.[0-9]{1,3})?|[0-9]+m)$", json_schema_extra=_WHOLE_OR_TEXT),
    BeforeValidator(_with_quotes),
]


Quantity = Annotated[
    str,
    Field(
        max_length=32,
        pattern=r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?$",
        json_schema_extra=_WHOLE_OR_TEXT,
    ),
    BeforeValidator(_with_quotes),
]


UNITS = {
    **{"": 1, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12},
    **{"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40},
}
"""Units of a quantity, by its suffix."""


def amount_of(quantity: str) -> float:
    """The number that a `Quantity` stands for."""
    number = quantity.rstrip("mkKMGTi")
    return float(number) * UNITS[quantity[len(number) :]]


NamespaceName = Annotated[str, Field(max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]


TenantName = Annotated[str, Field(max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]


QualifiedName = Annotated[
    str,
    Field(
        max_length=317,
        pattern=r"^([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$",
    ),
]


LabelValue = Annotated[str, Field(max_length=63, pattern=r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$")]


Labels = Annotated[dict[QualifiedName, LabelValue], Field(max_length=32)]


Annotations = Annotated[dict[QualifiedName, Annotated[str, Field(max_length=4096)]], Field(max_length=32)]
