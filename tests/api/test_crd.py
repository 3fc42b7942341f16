import importlib
import json
import pkgutil

import pytest
import yaml

from mmd_api import resource, spec
from mmd_api.base import ApiModel
from mmd_api.crd import crd_yaml, custom_resource_definition
from mmd_api.generate import CRD_FILE, REFERENCE_FILE
from mmd_api.reference import reference_page
from mmd_api.resource import MultimodalDeployment, ObjectMeta
from mmd_api.rule import Rule
from mmd_api.spec.model import ModelStorage

VERSION = custom_resource_definition()["spec"]["versions"][0]
SCHEMA = VERSION["schema"]["openAPIV3Schema"]


def nodes(node, path=""):
    yield path, node
    for name, child in node.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}")
    for below in ("items", "additionalProperties"):
        if below in node:
            yield from nodes(node[below], f"{path}[]")


def described(part: str):
    return [(p, n) for p, n in nodes(SCHEMA["properties"][part], part)]


def test_the_committed_definition_is_the_one_the_models_give():
    assert CRD_FILE.read_text() == crd_yaml(), "run `make crds`"


def test_the_committed_reference_is_the_one_the_models_give():
    assert REFERENCE_FILE.read_text() == reference_page(), "run `make crds`"


def test_the_definition_is_small_enough_for_a_client_side_apply():
    """kubectl stores it as JSON in an annotation, with < > & escaped as Go does."""
    text = json.dumps(custom_resource_definition(), separators=(",", ":"), ensure_ascii=False)
    assert len(text.encode()) + 5 * sum(map(text.count, "<>&")) < 262_144


def test_the_schema_is_structural():
    refused = {
        "$ref",
        "$defs",
        "anyOf",
        "oneOf",
        "title",
        "const",
        "patternProperties",
        "propertyNames",
        "nullable",
    }
    for path, node in nodes(SCHEMA):
        if node.get("x-kubernetes-int-or-string"):
            node = {**node, "type": "string"}
            assert node.pop("anyOf") == [{"type": "integer"}, {"type": "string"}], path
        assert "type" in node, path
        assert not refused & set(node), path
        assert not ("properties" in node and "additionalProperties" in node), path


def test_there_are_no_floats():
    types = {node["type"] for _, node in nodes(SCHEMA) if not node.get("x-kubernetes-int-or-string")}
    assert types == {"object", "array", "string", "integer", "boolean"}


def test_everything_in_the_spec_is_bounded():
    for path, node in described("spec"):
        match node:
            case {"enum": _} | {"type": "boolean"}:
                pass
            case {"type": "string"} | {"x-kubernetes-int-or-string": True}:
                assert "maxLength" in node, path
            case {"type": "integer"}:
                assert {"minimum", "maximum", "format"} <= set(node), path
            case {"type": "array"}:
                assert "maxItems" in node, path
            case {"type": "object"}:
                assert "properties" in node or "maxProperties" in node, path


def test_defaults_of_the_schema_and_of_the_models_are_the_same():
    """An object that the API server filled in means what `mmd up` reads from the file."""
    spec = {"model": {"id": "builtin/demo"}, "encoder": {}, "decode": {}}
    read = MultimodalDeployment.parse(
        {
            "apiVersion": "serving.multimodal.dev/v1alpha1",
            "kind": "MultimodalDeployment",
            "metadata": {"name": "a"},
            "spec": spec,
        }
    )
    assert filled(spec, SCHEMA["properties"]["spec"]) == read.spec.model_dump(
        by_alias=True, exclude_none=True
    )


def filled(value, node):
    """What the API server makes of a value: defaults from the outside in."""
    if not isinstance(value, dict) or "properties" not in node:
        return value
    whole = {n: c["default"] for n, c in node["properties"].items() if "default" in c} | value
    return {n: filled(v, node["properties"][n]) for n, v in whole.items()}


def test_every_rule_with_cel_is_in_the_schema_at_an_existing_field():
    placed = {}
    for path, node in nodes(SCHEMA):
        for entry in node.get("x-kubernetes-validations", ()):
            placed.setdefault(entry["message"], []).append(path)
            if "fieldPath" in entry:
                below = node
                for step in entry["fieldPath"].strip(".").split("."):
                    below = below["properties"][step]
    for model in models(ApiModel):
        for rule in model.rules:
            if rule.cel is not None and model is not ObjectMeta:
                assert rule.message in placed, rule
    assert len(placed["metadata.name: " + ObjectMeta.rules[0].message]) == 1


def test_every_rule_is_bound_to_a_model():
    parts = [
        importlib.import_module(f"{spec.__name__}.{part.name}")
        for part in pkgutil.iter_modules(spec.__path__)
    ]
    bound = {rule for model in models(ApiModel) for rule in model.rules}
    written = {
        rule
        for module in (resource, *parts)
        for value in vars(module).values()
        if isinstance(value, tuple)
        for rule in value
        if isinstance(rule, Rule)
    }
    assert bound == written


def test_a_renamed_model_keeps_its_rules():
    name = ModelStorage.__name__
    ModelStorage.__name__ = "Weights"
    try:
        with pytest.raises(
            ValueError, match="claimName and subPath apply only to type PersistentVolumeClaim"
        ):
            ModelStorage.model_validate({"type": "Hub", "claimName": "weights"})
    finally:
        ModelStorage.__name__ = name


def models(model):
    """A model's subclasses, the whole tree of them."""
    return [found for below in model.__subclasses__() for found in (below, *models(below))]


def test_every_pool_has_the_rules_that_pools_share():
    for pool in ("encoder", "prefill", "decode"):
        fields = [
            e.get("fieldPath")
            for e in SCHEMA["properties"]["spec"]["properties"][pool]["x-kubernetes-validations"]
        ]
        assert ".replicas" in fields, pool


def test_conditions_and_variables_are_lists_keyed_by_what_names_them():
    keyed = {
        p: n["x-kubernetes-list-map-keys"]
        for p, n in nodes(SCHEMA)
        if n.get("x-kubernetes-list-type") == "map"
    }
    assert keyed.pop(".status.conditions") == ["type"]
    assert keyed.pop(".status.pinned") == ["revision"]
    for adapters in (".spec.engine.adapters", ".status.pinned[].adapters"):
        assert keyed.pop(adapters) == ["name"]
    parts = ("gateway", "nats", "encoder", "prefill", "decode")
    for pool in ("encoder", "prefill", "decode"):
        assert keyed.pop(f".spec.{pool}.resourceClaims") == ["name"]
    keys = {
        **{field: ["name"] for field in ("env", "volumes", "sidecars", "initContainers")},
        "volumeMounts": ["mountPath"],
    }
    assert keyed == {f".spec.{p}.template.{field}": key for p in parts for field, key in keys.items()}


def test_the_columns_read_at_a_glance():
    assert [c["name"] for c in VERSION["additionalPrinterColumns"]] == [
        "Ready",
        "Pools",
        "Bottleneck",
        "Model",
        "Age",
    ]
    assert VERSION["subresources"] == {"status": {}}
    assert yaml.safe_load(crd_yaml())["spec"]["names"]["shortNames"] == ["mmd"]
