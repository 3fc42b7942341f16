"""The base of every model of the resource: camelCase on the wire, closed, immutable, and true to its rules."""

from __future__ import annotations

from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationInfo, model_validator
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

from mmd_api.rule import Rule

STRUCTURE_ONLY: dict[str, Any] = {"structure_only": True}
"""Validation context without the rules, so that a reader of a broken file can evaluate them one by one."""


class ApiModel(BaseModel):
    """A part of the resource. Unknown fields are refused, so a typing error never passes silently.

    A model names the rules between its fields as `class Pool(ApiModel, rules=POOL)`; its subclasses have them too.
    """

    rules: ClassVar[tuple[Rule, ...]] = ()

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
    )

    def __init_subclass__(cls, rules: tuple[Rule, ...] = (), **settings: Any) -> None:
        super().__init_subclass__(**settings)
        cls.rules = (*cls.rules, *rules)

    def broken_rules(self, *, in_cluster: bool = False) -> list[Rule]:
        """Rules that this part of a resource breaks.

        Rules for clusters alone are included only with `in_cluster`.
        """
        return [r for r in self.rules if (in_cluster or not r.cluster_only) and not r.holds(self)]

    @model_validator(mode="after")
    def _keep_the_rules(self, info: ValidationInfo) -> Self:
        broken = [] if info.context == STRUCTURE_ONLY else self.broken_rules()
        if broken:
            context: dict[str, Any] = {"rules": broken, "text": " / ".join(r.message for r in broken)}
            raise PydanticCustomError("rule", "{text}", context)
        return self
