"""The CustomResourceDefinition, made from the models.

The API server takes structural schemas only: no `$ref`, no null, no titles, everything bounded. Source of the rules:
Kubernetes' "Extend the API with CustomResourceDefinitions", section on structural schemas.
"""

from __future__ import annotations

from typing import Any

import yaml

from mmd_api.base import ApiModel
from mmd_api.resource import GROUP, KIND, PLURAL, SHORT_NAME, VERSION, MultimodalDeployment, ObjectMeta
from mmd_api.rule import Rule

Schema = dict[str, Any]

_KEPT = (
    "type",
    "format",
    "description",
    "enum",
    "default",
    "pattern",
    "minLength",
    "maxLength",
    "minimum",
    "maximum",
    "minItems",
    "maxItems",
    "maxProperties",
    "required",
    "x-kubernetes-list-type",
    "x-kubernetes-list-map-keys",
    "x-kubernetes-preserve-unknown-fields",
)
_COLUMNS = (
    ("Ready", "string", '.status.conditions[?(@.type=="Ready")].status'),
    ("Pools", "string", ".status.poolsSummary"),
    ("Bottleneck", "string", ".status.bottleneck"),
    ("Model", "string", ".spec.model.id"),
    ("Age", "date", ".metadata.creationTimestamp"),
)


def custom_resource_definition() -> Schema:
    """The whole object, as `kubectl apply` takes it."""
    schema = structural_schema(MultimodalDeployment)
    schema["properties"]["metadata"] = {"type": "object"}
    schema["properties"]["apiVersion"] = {"type": "string"}
    schema["properties"]["kind"] = {"type": "string"}
    schema["required"] = ["spec"]
    schema["x-kubernetes-validations"] = _metadata_rules()
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "additionalPrinterColumns": [{"name": n, "type": t, "jsonPath": p} for n, t, p in _COLUMNS],
        "subresources": {"status": {}},
        "schema": {"openAPIV3Schema": schema},
    }
    return custom_resource(KIND, PLURAL, SHORT_NAME, version)


def custom_resource(kind: str, plural: str, short_name: str, version: dict[str, Any]) -> dict[str, Any]:
    """The CustomResourceDefinition of a namespaced kind with one version, as `kubectl apply` takes it."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": kind,
                "listKind": f"{kind}List",
                "plural": plural,
                "singular": kind.lower(),
                "shortNames": [short_name],
                "categories": ["all"],
            },
            "versions": [version],
        },
    }


def structural_schema(model: type[ApiModel]) -> Schema:
    """Structural OpenAPI v3 schema of a model, with its rules as CEL."""
    raw = model.model_json_schema(by_alias=True)
    return _structural(raw, raw.get("$defs", {}), model.rules)


def crd_yaml() -> str:
    """The definition as the committed file holds it."""
    text = yaml.safe_dump(custom_resource_definition(), sort_keys=False, width=110)
    return f"# Generated from crds/mmd_api by `make crds`. Edit the models, not this file.\n{text}"


def _models() -> dict[str, type[ApiModel]]:
    models: dict[str, type[ApiModel]] = {}
    waiting = list(ApiModel.__subclasses__())
    while waiting:
        model = waiting.pop()
        models[model.__name__] = model
        waiting += model.__subclasses__()
    return models


def _structural(raw: Schema, definitions: dict[str, Schema], rules: tuple[Rule, ...]) -> Schema:
    """One node without references, null and titles; `rules` are those of the model it describes."""
    if "$ref" in raw:
        name = raw["$ref"].rpartition("/")[2]
        node = _structural(definitions[name], definitions, _models()[name].rules)
        if "description" in raw:
            node["description"] = raw["description"]
        # Written out in full: the API server evaluates the rules of a default before it fills defaults inside it.
        return node | ({"default": _without_null(raw["default"])} if "default" in raw else {})
    if "anyOf" in raw:
        (only,) = (choice for choice in raw["anyOf"] if choice.get("type") != "null")
        without = ("anyOf", "title") if raw.get("default") is not None else ("anyOf", "title", "default")
        outer = {key: value for key, value in raw.items() if key not in without}
        return _structural(only | outer, definitions, rules)
    node = {key: raw[key] for key in _KEPT if key in raw}
    if "description" in node:
        node["description"] = " ".join(node["description"].replace("`", "").split())
    if "const" in raw:
        node["enum"] = [raw["const"]]
    if raw.get("x-kubernetes-int-or-string"):
        del node["type"]
        either: Schema = {
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "x-kubernetes-int-or-string": True,
        }
        node |= either | {"minimum": 0}
    if raw.get("type") == "integer":
        node["format"] = "int64" if raw.get("maximum", 2**63) >= 2**31 else "int32"
    if "properties" in raw:
        node["properties"] = {
            name: _structural(part, definitions, ()) for name, part in raw["properties"].items()
        }
    if "items" in raw:
        node["items"] = _structural(raw["items"], definitions, ())
    if raw.get("additionalProperties") is True:
        node["x-kubernetes-preserve-unknown-fields"] = True
    elif raw.get("additionalProperties"):
        node["additionalProperties"] = _structural(raw["additionalProperties"], definitions, ())
    validations = [_validation(rule) for rule in rules if rule.cel is not None]
    # Pydantic's form for keys that match a pattern. A structural schema describes only values.
    if "patternProperties" in raw:
        ((pattern, value),) = raw["patternProperties"].items()
        node["additionalProperties"] = _structural(value, definitions, ())
        validations.append(_key_validation(pattern, raw["propertyNames"]["maxLength"]))
    return node | ({"x-kubernetes-validations": validations} if validations else {})


def _without_null(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_null(v) for key, v in value.items() if v is not None}
    return value


def _validation(rule: Rule) -> Schema:
    return {
        "rule": rule.cel,
        "message": rule.message,
        "fieldPath": f".{rule.field}",
        "reason": "FieldValueInvalid",
    }


def _key_validation(pattern: str, max_length: int) -> Schema:
    return {
        "rule": f"self.all(k, k.size() <= {max_length} && k.matches('{pattern}'))",
        "message": "a key has an invalid format; it must be a qualified name such as example.com/name",
        "reason": "FieldValueInvalid",
    }


def _metadata_rules() -> list[Schema]:
    """Rules about metadata must be at the root: the API server allows them nowhere else."""
    pattern = structural_schema(ObjectMeta)["properties"]["name"]["pattern"]
    form = {
        "rule": f"self.metadata.name.matches('{pattern}')",
        "message": f"metadata.name: the name has an invalid format; it must match {pattern}",
    }
    moved = [
        {
            "rule": str(rule.cel).replace("self.", "self.metadata."),
            "message": f"metadata.{rule.field}: {rule.message}",
        }
        for rule in ObjectMeta.rules
        if rule.cel is not None
    ]
    return [form, *moved]
