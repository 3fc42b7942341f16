"""The model and where its weights are."""

from __future__ import annotations

from typing import Annotated, Literal, Protocol

from pydantic import Field

from mmd_api.base import ApiModel
from mmd_api.rule import Rule
from mmd_api.spec.fields import Name

Dtype = Literal["Auto", "Float32", "BFloat16", "Float16"]


ModelSource = Literal["Builtin", "HubId", "AbsolutePath", "RelativePath"]


ServedName = Annotated[
    str, Field(min_length=1, max_length=256, pattern=r"^[A-Za-z0-9]([A-Za-z0-9._:/-]*[A-Za-z0-9])?$")
]


ModelId = Annotated[str, Field(max_length=512, pattern=r"^(/|\./|\.\./)?[A-Za-z0-9._][A-Za-z0-9._/-]*$")]


RevisionName = Annotated[str, Field(max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$")]


MODELS_FOLDER = "/models"


DEMO_MODEL = "builtin/demo"


class Located(Protocol):
    """What has an id like that of a model."""

    @property
    def source(self) -> ModelSource:
        """Kind of name that its id is."""

    @property
    def revision(self) -> str | None:
        """Commit, tag or branch of a hub repository."""


RELATIVE = ("./", "../")
PATH = ("/", *RELATIVE)
NO_HUB_ID = (*PATH, "builtin/")
"""What ids begin with that are relative paths, paths, and no ids of the hub."""


def begins_with(name: str, prefixes: tuple[str, ...]) -> str:
    """CEL: a string begins with one of these."""
    return " || ".join(f"{name}.startsWith('{prefix}')" for prefix in prefixes)


REVISION_OF_HUB_ID_CEL = f"!has(self.revision) || !({begins_with('self.id', NO_HUB_ID)})"


def revision_of_hub_id(named: Located) -> bool:
    """Whether only an id of the hub has a revision."""
    return named.revision is None or named.source == "HubId"


def _known_to_pods(named: Located) -> bool:
    return named.source != "RelativePath"


KNOWN_TO_PODS = Rule(
    field="id",
    cel="!self.id.startsWith('./') && !self.id.startsWith('../')",
    holds=_known_to_pods,
    problem="relative paths work only with `mmd up`",
    remedy="use a hub id, or an absolute path in the image or on a claim",
    cluster_only=True,
)


def source_of(name: str) -> ModelSource:
    """Kind of name that an id is, by its prefix."""
    if name.startswith(RELATIVE):
        return "RelativePath"
    if name.startswith("/"):
        return "AbsolutePath"
    return "Builtin" if name.startswith("builtin/") else "HubId"


def _claim_named(s: ModelStorage) -> bool:
    return s.type != "PersistentVolumeClaim" or s.claim_name is not None


def _claim_used(s: ModelStorage) -> bool:
    return s.type == "PersistentVolumeClaim" or (s.claim_name is None and s.sub_path is None)


def _sub_path_stays_inside(s: ModelStorage) -> bool:
    return s.sub_path is None or not (s.sub_path.startswith("/") or ".." in s.sub_path.split("/"))


def _token_used(s: ModelStorage) -> bool:
    return s.type == "Hub" or s.token_secret is None


def _builtin_known(m: ModelSpec) -> bool:
    return m.source != "Builtin" or (m.id == DEMO_MODEL and m.storage.type == "Image")


def _hub_id(m: ModelSpec) -> bool:
    return m.storage.type != "Hub" or m.source == "HubId"


def _path_on_claim(m: ModelSpec) -> bool:
    return (
        m.storage.type != "PersistentVolumeClaim"
        or m.id == MODELS_FOLDER
        or m.id.startswith(f"{MODELS_FOLDER}/")
    )


def _served_names_unique(m: ModelSpec) -> bool:
    return len(set(m.served_name)) == len(m.served_name)


MODEL_STORAGE = (
    Rule(
        field="claimName",
        cel="self.type != 'PersistentVolumeClaim' || has(self.claimName)",
        holds=_claim_named,
        problem="type PersistentVolumeClaim requires claimName",
        remedy="set claimName, or another type",
    ),
    Rule(
        field="claimName",
        cel="self.type == 'PersistentVolumeClaim' || (!has(self.claimName) && !has(self.subPath))",
        holds=_claim_used,
        problem="claimName and subPath apply only to type PersistentVolumeClaim",
        remedy="remove them, or set type: PersistentVolumeClaim",
    ),
    Rule(
        field="subPath",
        cel="!has(self.subPath) || (!self.subPath.startsWith('/') && !self.subPath.matches('(^|/)[.][.](/|$)'))",
        holds=_sub_path_stays_inside,
        problem="subPath points outside the claim",
        remedy="use a relative path without '..'",
    ),
    Rule(
        field="tokenSecret",
        cel="self.type == 'Hub' || !has(self.tokenSecret)",
        holds=_token_used,
        problem="a token is used only for downloads from the hub",
        remedy="remove tokenSecret, or set type: Hub",
    ),
)


MODEL = (
    Rule(
        field="id",
        cel=f"!self.id.startsWith('builtin/') || (self.id == '{DEMO_MODEL}' && self.storage.type == 'Image')",
        holds=_builtin_known,
        problem=f"the only built-in model is {DEMO_MODEL}, and it is part of the worker image",
        remedy=f"set id: {DEMO_MODEL} with storage.type: Image, or another model's id",
    ),
    Rule(
        field="id",
        cel=f"self.storage.type != 'Hub' || !({begins_with('self.id', NO_HUB_ID)})",
        holds=_hub_id,
        problem="a path cannot be downloaded from the hub",
        remedy="set storage.type: Image or PersistentVolumeClaim, or a hub id such as org/model",
    ),
    Rule(
        field="id",
        cel=f"self.storage.type != 'PersistentVolumeClaim' || self.id == '{MODELS_FOLDER}'"
        f" || self.id.startsWith('{MODELS_FOLDER}/')",
        holds=_path_on_claim,
        problem=f"the id is not under {MODELS_FOLDER}, where the claim is mounted",
        remedy=f"set id: {MODELS_FOLDER}/<folder on the claim>",
    ),
    Rule(
        field="revision",
        cel=REVISION_OF_HUB_ID_CEL,
        holds=revision_of_hub_id,
        problem="only models from the hub have revisions",
        remedy="remove revision",
    ),
    KNOWN_TO_PODS,
    Rule(
        field="servedName",
        cel=None,
        holds=_served_names_unique,
        problem="duplicate served name",
        remedy="keep one of them",
    ),
)


class ModelStorage(ApiModel, rules=MODEL_STORAGE):
    """Location of the model weights."""

    type: Literal["Hub", "PersistentVolumeClaim", "Image"] = "Image"
    """Hub downloads the weights when a pod starts, PersistentVolumeClaim mounts them at /models, Image has them in the worker image."""
    claim_name: Name | None = None
    """Name of the PersistentVolumeClaim that holds the weights."""
    sub_path: Annotated[str, Field(max_length=1024)] | None = None
    """Directory of the claim to mount. Defaults to the root of the claim."""
    token_secret: Name | None = None
    """Name of a Secret whose key `token` authenticates downloads of gated models."""


class ModelSpec(ApiModel, rules=MODEL):
    """Model to serve: a hub id, an absolute path (on the claim mounted at /models, or in the image), or `builtin/demo`.

    Paths that start with `./` or `../` are valid only with `mmd up` and are relative to the directory of the file.
    """

    id: ModelId
    """Hub id, path, or `builtin/demo`."""
    revision: RevisionName | None = None
    """Commit, tag or branch of a hub model. Only a commit is immutable."""
    served_name: Annotated[
        list[ServedName],
        Field(max_length=16, json_schema_extra={"x-kubernetes-list-type": "set"}),
    ] = []
    """Names under which clients request the model. Defaults to the last component of a path, else to the id."""
    dtype: Dtype = "Auto"
    """Data type of weights, embeddings and KV. Auto uses the data type of the checkpoint."""
    max_model_len: Annotated[int, Field(ge=16, le=10_000_000)] | None = None
    """Maximum number of tokens in prompt and answer together. Defaults to the limit of the model."""
    storage: ModelStorage = ModelStorage()
    """Location of the model weights."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the model in the API, the preferred one first. A path of the server is none."""
        return tuple(self.served_name) or (self.own_name,)

    @property
    def own_name(self) -> str:
        """Name of the model where `served_name` gives it none."""
        is_path = self.source in ("RelativePath", "AbsolutePath")
        return self.id.rstrip("/").rpartition("/")[2] if is_path else self.id

    @property
    def source(self) -> ModelSource:
        """Kind of name that `id` is, by its prefix."""
        return source_of(self.id)
