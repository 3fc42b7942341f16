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


WeightsUrl = Annotated[
    str,
    Field(max_length=1024, pattern=r"^(https?|s3|gs)://[A-Za-z0-9][A-Za-z0-9.:_-]*(/[A-Za-z0-9._~+=/-]*)?$"),
]


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
"""Prefixes of model ids: relative paths, all paths, and everything that is not a hub id."""


def begins_with(name: str, prefixes: tuple[str, ...]) -> str:
    """CEL for a string that begins with one of these prefixes."""
    return " || ".join(f"{name}.startsWith('{prefix}')" for prefix in prefixes)


REVISION_OF_HUB_ID_CEL = f"!has(self.revision) || !({begins_with('self.id', NO_HUB_ID)})"


def revision_of_hub_id(named: Located) -> bool:
    """Whether a revision is set only for an id of the hub."""
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
    return s.type in ("Hub", "Url") or s.token_secret is None


def _url_given(s: ModelStorage) -> bool:
    return (s.type == "Url") == (s.url is not None)


def _credentials_used(s: ModelStorage) -> bool:
    return s.type == "Url" or s.credentials_secret is None


def _url_cached(s: ModelStorage) -> bool:
    return s.type != "Url" or s.cache is not None


def _cache_used(s: ModelStorage) -> bool:
    return s.type in ("Hub", "Url") or s.cache is None


def _one_claim(c: WeightsCache) -> bool:
    return (c.claim_name is None) != (c.size_gibibytes is None)


def _class_of_made_claim(c: WeightsCache) -> bool:
    return c.size_gibibytes is not None or (c.storage_class_name is None and c.access_mode is None)


def _builtin_known(m: ModelSpec) -> bool:
    return m.source != "Builtin" or (m.id == DEMO_MODEL and m.storage.type == "Image")


def _hub_id(m: ModelSpec) -> bool:
    return m.storage.type != "Hub" or m.source == "HubId"


def _name_for_url(m: ModelSpec) -> bool:
    return m.storage.type != "Url" or (m.source == "HubId" and m.revision is None)


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
        cel="self.type in ['Hub', 'Url'] || !has(self.tokenSecret)",
        holds=_token_used,
        problem="a token is used only for downloads",
        remedy="remove tokenSecret, or set type: Hub or Url",
    ),
    Rule(
        field="url",
        cel="(self.type == 'Url') == has(self.url)",
        holds=_url_given,
        problem="url and type Url require each other",
        remedy="set both, or neither",
    ),
    Rule(
        field="credentialsSecret",
        cel="self.type == 'Url' || !has(self.credentialsSecret)",
        holds=_credentials_used,
        problem="credentialsSecret is for object stores",
        remedy="remove it, or set type: Url",
    ),
    Rule(
        field="cache",
        cel="self.type != 'Url' || has(self.cache)",
        holds=_url_cached,
        problem="pods start only from a cache of what a URL has",
        remedy="set cache.claimName or cache.sizeGibibytes",
    ),
    Rule(
        field="cache",
        cel="self.type in ['Hub', 'Url'] || !has(self.cache)",
        holds=_cache_used,
        problem="only downloads have a cache",
        remedy="remove cache, or set type: Hub or Url",
    ),
)


WEIGHTS_CACHE = (
    Rule(
        field="claimName",
        cel="has(self.claimName) != has(self.sizeGibibytes)",
        holds=_one_claim,
        problem="a cache is one claim: claimName names yours, sizeGibibytes makes one",
        remedy="set exactly one of them",
    ),
    Rule(
        field="storageClassName",
        cel="has(self.sizeGibibytes) || (!has(self.storageClassName) && !has(self.accessMode))",
        holds=_class_of_made_claim,
        problem="storageClassName and accessMode apply only to a claim that the operator makes",
        remedy="remove them, or set sizeGibibytes instead of claimName",
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
        cel=f"self.storage.type != 'Url' || (!has(self.revision) && !({begins_with('self.id', NO_HUB_ID)}))",
        holds=_name_for_url,
        problem="storage.url says where the model is: its id is a name alone, and it has no revision",
        remedy="set an id such as org/model, and remove revision",
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


class WeightsCache(ApiModel, rules=WEIGHTS_CACHE):
    """PersistentVolumeClaim that a Job downloads the weights to once, before the pods that mount it start."""

    claim_name: Name | None = None
    """Name of an existing PersistentVolumeClaim. Deployments may share it."""
    size_gibibytes: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Size of the PersistentVolumeClaim that the operator creates, in GiB. It is deleted with the deployment."""
    storage_class_name: Name | None = None
    """StorageClass of the claim that the operator creates. Defaults to that of the cluster."""
    access_mode: Literal["ReadWriteMany", "ReadWriteOnce"] | None = None
    """Access mode of the claim that the operator creates. Defaults to ReadWriteMany; with ReadWriteOnce, all pods run on one node."""


class ModelStorage(ApiModel, rules=MODEL_STORAGE):
    """Location of the model weights."""

    type: Literal["Hub", "Url", "PersistentVolumeClaim", "Image"] = "Image"
    """Hub downloads the weights, to the cache or else when a pod starts; Url downloads them to the cache; PersistentVolumeClaim mounts them at
    /models; Image has them in the worker image."""
    url: WeightsUrl | None = None
    """Folder with the model's files and a file SHA256SUMS, as `https://`, `s3://` or `gs://` URL without credentials."""
    cache: WeightsCache | None = None
    """Shared cache of downloaded weights."""
    claim_name: Name | None = None
    """Name of the PersistentVolumeClaim that holds the weights."""
    sub_path: Annotated[str, Field(max_length=1024)] | None = None
    """Directory of the claim to mount. Defaults to the root of the claim."""
    token_secret: Name | None = None
    """Name of a Secret whose key `token` authenticates downloads of gated models, and as bearer token those from an HTTP URL."""
    credentials_secret: Name | None = None
    """Name of a Secret whose keys are environment variables of the download, such as AWS_ACCESS_KEY_ID and AWS_ENDPOINT_URL."""


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
    max_image_tiles: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Maximum number of tiles that the model's processor cuts an image into, an overview of the whole image not counted. Defaults to that of the
    checkpoint. Only for models that read images as tiles."""
    pooled_video_frames: Annotated[int, Field(ge=1, le=16)] = 1
    """Number of successive frames of a video whose embeddings are averaged to those of one frame, which divides the video's tokens by it. Only for
    models that read frames one by one. Models were trained without: compare answers before use."""
    max_model_len: Annotated[int, Field(ge=16, le=10_000_000)] | None = None
    """Maximum number of tokens in prompt and answer together. Defaults to the limit of the model."""
    storage: ModelStorage = ModelStorage()
    """Location of the model weights."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the model in the API, the preferred one first. A path of the server is not one of them."""
        return tuple(self.served_name) or (self.own_name,)

    @property
    def own_name(self) -> str:
        """Name of the model if `served_name` gives it none."""
        is_path = self.source in ("RelativePath", "AbsolutePath")
        return self.id.rstrip("/").rpartition("/")[2] if is_path else self.id

    @property
    def source(self) -> ModelSource:
        """Kind of name that `id` is, by its prefix."""
        return source_of(self.id)
