"""The MultimodalDeployment in a file or from the API server, and how to read it from YAML.

Independent of the cluster; opens nothing but the file it is given.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import yaml
from pydantic import ConfigDict, Field
from pydantic.alias_generators import to_camel

from mmd_api.base import ApiModel
from mmd_api.faults import Fault, InvalidDeploymentError, parse
from mmd_api.rule import Rule
from mmd_api.spec.deployment import MultimodalDeploymentSpec
from mmd_api.spec.fields import NamespaceName
from mmd_api.status import MultimodalDeploymentStatus

GROUP = "serving.multimodal.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "MultimodalDeployment"
PLURAL = "multimodaldeployments"
SHORT_NAME = "mmd"
MAX_FILE_BYTES = 4 * 2**20

DnsLabel = Annotated[str, Field(max_length=63, pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$")]


MAX_NAME_LENGTH = 32


def _name_fits(m: ObjectMeta) -> bool:
    return len(m.name) <= MAX_NAME_LENGTH


METADATA = (
    Rule(
        field="name",
        cel=f"self.name.size() <= {MAX_NAME_LENGTH}",
        holds=_name_fits,
        problem="the name is too long for the names and labels of the pools' pods",
        remedy=f"use at most {MAX_NAME_LENGTH} characters",
    ),
)


class ObjectMeta(ApiModel, rules=METADATA):
    """The part of Kubernetes' object metadata that we read; the rest is ignored."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="ignore", frozen=True)

    name: DnsLabel
    namespace: NamespaceName | None = None
    uid: str | None = None
    generation: int | None = None
    resource_version: str | None = None
    deletion_timestamp: str | None = None
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class MultimodalDeployment(ApiModel):
    """A whole multimodal serving pipeline: one resource, from model to pools."""

    api_version: Literal["serving.multimodal.dev/v1alpha1"]
    kind: Literal["MultimodalDeployment"]
    metadata: ObjectMeta
    spec: MultimodalDeploymentSpec
    status: MultimodalDeploymentStatus | None = None

    @classmethod
    def parse(cls, data: object) -> MultimodalDeployment:
        """Read JSON-like data.

        Raises:
            InvalidDeploymentError: with every fault in it.
        """
        return parse(cls, data)


def load(path: str | Path) -> MultimodalDeployment:
    """The one MultimodalDeployment of a YAML file (`-`: standard input).

    Raises:
        InvalidDeploymentError: the file cannot be read, is not YAML, has faults, or holds more than one.
    """
    resources = load_all(path)
    if len(resources) > 1:
        names = ", ".join(d.metadata.name for d in resources)
        raise InvalidDeploymentError(
            [
                Fault(
                    "",
                    f"{len(resources)} deployments ({names}), but one is expected; put each in its own file",
                )
            ]
        )
    return resources[0]


def load_all(path: str | Path) -> list[MultimodalDeployment]:
    """Every MultimodalDeployment of a YAML file of one or more documents, at least one. Objects of other groups are skipped.

    Raises:
        InvalidDeploymentError: with the faults of all documents.
    """
    documents = [d for d in _documents(_read(path)) if d is not None]
    faults: list[Fault] = []
    deployments: list[MultimodalDeployment] = []
    for number, document in enumerate(documents):
        if _of_another_group(document):
            continue
        try:
            deployments.append(MultimodalDeployment.parse(document))
        except InvalidDeploymentError as error:
            where = f"document[{number}]." if len(documents) > 1 else ""
            faults += [Fault(f"{where}{f.field}".rstrip("."), f.message) for f in error.faults]
    if not deployments and not faults:
        faults = [Fault("", f"contains no {KIND}; start it with apiVersion: {API_VERSION}, kind: {KIND}")]
    if faults:
        raise InvalidDeploymentError(faults)
    return deployments


class UniqueKeyLoader(yaml.SafeLoader):
    """Safe YAML in which a duplicate key in a mapping is an error, and dates stay text."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """A mapping whose keys are all different."""
        keys: set[str] = set()
        for key, _ in node.value:
            if key.tag != "tag:yaml.org,2002:str":
                continue  # a number, or a list, which is refused when the mapping is built
            if key.value in keys:
                raise yaml.constructor.ConstructorError(
                    problem=f"the key {key.value!r} appears twice in one mapping", problem_mark=key.start_mark
                )
            keys.add(key.value)
        return super().construct_mapping(node, deep=deep)


def _as_text(loader: UniqueKeyLoader, node: yaml.Node) -> str:
    return str(node.value)


UniqueKeyLoader.add_constructor("tag:yaml.org,2002:timestamp", _as_text)


def _read(path: str | Path) -> str:
    try:
        if str(path) == "-":
            text = sys.stdin.read(MAX_FILE_BYTES + 1)
        else:
            with Path(path).open(encoding="utf-8") as file:
                text = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InvalidDeploymentError(
            [Fault("", f"cannot be read ({error.strerror}); check the path")]
        ) from error
    except UnicodeDecodeError as error:
        raise InvalidDeploymentError([Fault("", "is not UTF-8 text; save it as UTF-8 YAML")]) from error
    if len(text) > MAX_FILE_BYTES:
        limit = MAX_FILE_BYTES // 2**20
        raise InvalidDeploymentError(
            [Fault("", f"is larger than {limit} MiB; pass only the deployment's file")]
        )
    return text


def _documents(text: str) -> list[object]:
    try:
        # A subclass of SafeLoader: it builds plain data only.
        return cast("list[object]", list(yaml.load_all(text, Loader=UniqueKeyLoader)))
    except yaml.MarkedYAMLError as error:
        where = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise InvalidDeploymentError([Fault("", f"{where}invalid YAML: {error.problem}; fix it")]) from error
    except yaml.YAMLError as error:
        raise InvalidDeploymentError([Fault("", f"invalid YAML: {error}; fix it")]) from error
    except RecursionError as error:
        raise InvalidDeploymentError([Fault("", "is nested too deeply; flatten it")]) from error


def _of_another_group(document: object) -> bool:
    if not isinstance(document, dict):
        return False
    api_version = document.get("apiVersion")
    return isinstance(api_version, str) and api_version.partition("/")[0] != GROUP
