"""Configuration of the processes of a deployment: the pipeline revision, and the part of the spec that each component reads."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from mmd_api.base import STRUCTURE_ONLY, ApiModel
from mmd_api.contract.pools import POOL_NAMES, PoolName, Role
from mmd_api.contract.version import WIRE_VERSION
from mmd_api.readers import (
    EVERY_READER,
    FIRST_KV_BACKEND,
    Component,
    Reader,
    canonical,
    limited_to,
    live_for,
    read_by,
    readers_of,
    replacing,
    selected,
    selected_spec,
    with_first_kv_backend,
)
from mmd_api.spec.deployment import MultimodalDeploymentSpec
from mmd_api.spec.media import DocumentPolicy
from mmd_api.status import PinnedRevision


def roles_of(spec: MultimodalDeploymentSpec, pool: PoolName) -> tuple[Role, ...]:
    """Roles of a pool's pods, upstream first. The next pool downstream does the work of an omitted pool."""
    if pool == "encoder":
        return ("encode",)
    roles: list[Role] = []
    if spec.encoder is None and (pool == "prefill" or spec.prefill is None):
        roles.append("encode")
    if pool == "prefill":
        return (*roles, "prefill")
    if spec.prefill is None:
        roles.append("prefill")
    return (*roles, "decode")


def encodes_small_media(spec: MultimodalDeploymentSpec, component: str) -> bool:
    """Whether pods of a component have towers for small media, without the encode role.

    An encoder pool encodes the rest.
    """
    prefill = spec.prefill
    return (
        component == "prefill"
        and spec.encoder is not None
        and prefill is not None
        and prefill.local_encode_tokens > 0
    )


def active_roles(spec: MultimodalDeploymentSpec, component: Component) -> tuple[Role, ...]:
    """Roles whose work pods of a component do: those they hold, and encode if they encode small media."""
    roles = _roles(spec, component)
    return ("encode", *roles) if encodes_small_media(spec, component) else roles


_KV_FORMAT = ("Auto", "Native")
"""Data type and wire precision of KV. Only one of each is served.

They stay in the revision, so that the revisions of running deployments do not change.
"""

_FIRST_DOTS_PER_INCH = DocumentPolicy().dots_per_inch
"""The default since documents are served. It is left out of the revision too."""


def pipeline_revision(spec: MultimodalDeploymentSpec) -> str:
    """Ten hex digits that name the meaning of this pipeline's embeddings and KV blocks.

    They cover the weights and where they come from, those of adapters too, and their dtype; how video is
    sampled and documents are rendered; the tiles of images; the KV block layout and data type; the engine
    with its quantization, its KV's data type and its extra arguments; the worker image (its processors and
    adapters); and `WIRE_VERSION`. They also cover how and in which format KV travels from prefill to decode
    pods, if there are both, and into how many pods a replica is divided, so that groups of another size start
    next to those that serve. Sizes, limits, timeouts, placement and scaling leave the revision unchanged:
    pods that differ in those may pair.
    """
    video = spec.gateway.media.video
    meaning = {
        "model": [spec.model.id, spec.model.revision, spec.model.dtype],
        "storage": [spec.model.storage.type, spec.model.storage.claim_name, spec.model.storage.sub_path],
        "video": [video.max_frames, video.frames_per_second_milli],
        "kv": [spec.decode.kv_block_tokens, *_KV_FORMAT],
        "image": spec.image.worker,
        "wire": WIRE_VERSION,
    }
    if (url := spec.model.storage.url) is not None:
        meaning["url"] = url
    if (cache := spec.model.storage.cache) is not None:
        meaning["cache"] = cache.claim_name or ""
    if (tiles := spec.model.max_image_tiles) is not None:
        meaning["tiles"] = tiles
    if (frames := spec.model.pooled_video_frames) != 1:
        meaning["pooled frames"] = frames
    if (document := spec.gateway.media.document.dots_per_inch) != _FIRST_DOTS_PER_INCH:
        meaning["document"] = document
    if spec.prefill is not None and spec.kv_backend != FIRST_KV_BACKEND:  # without prefill pods no KV travels
        meaning["backend"] = spec.kv_backend
    pool_dtype, wire_format = spec.engine.kv_dtype, spec.transfer.kv.wire_format
    if pool_dtype != "Model":
        meaning["kvDtype"] = pool_dtype
    if spec.prefill is not None and wire_format not in ("Model", pool_dtype):
        meaning["wireFormat"] = wire_format
    if spec.engine.type != "Native":  # so that the revisions of running deployments do not change
        meaning["engine"] = spec.engine.type
        if formats := spec.engine.formats(prefills=spec.prefill is not None):
            meaning["formats"] = formats
        if adapters := spec.engine.adapters:
            meaning["adapters"] = sorted([a.name, a.id, a.revision] for a in adapters)
        pools = [name for name in POOL_NAMES if getattr(spec, name) is not None]
        if groups := {name: size for name in pools if (size := spec.group_size(name)) > 1}:
            meaning["groups"] = groups
    return hashlib.sha256(json.dumps(meaning, sort_keys=True).encode()).hexdigest()[:10]


def inputs_of(spec: MultimodalDeploymentSpec, component: Component) -> str:
    """Short hash of all parts of the spec that make the pods of a component.

    Pods are replaced when it changes, and only then. It is taken from the spec and not from the manifest, so
    that an operator that writes manifests differently replaces no pod.
    """
    roles = _roles(spec, component)
    readers = _readers(spec, component)
    content = {
        "component": component,
        "roles": roles,
        "revision": "" if component == "nats" else pipeline_revision(spec),
        "fields": selected_spec(spec, replacing(component, readers)),
    }
    return hashlib.sha256(canonical(content).encode()).hexdigest()[:16]


def _roles(spec: MultimodalDeploymentSpec, component: Component) -> tuple[Role, ...]:
    pool = next((name for name in POOL_NAMES if name == component), None)
    return () if pool is None else roles_of(spec, pool)


def _readers(spec: MultimodalDeploymentSpec, component: Component) -> tuple[Reader, ...]:
    """The readers that run in a component's processes."""
    return readers_of(component, active_roles(spec, component))


class PipelineConfig(ApiModel):
    """Configuration of one component of a pipeline revision: the fields of the spec that its processes read, and no others.

    Reading any other field raises AttributeError: a reader that `readers.EFFECTS` does not name cannot run on a default by mistake.
    """

    namespace: str
    name: str
    revision: str
    readers: tuple[Reader, ...] | None = None
    """For whom this was written; None: everybody, as tests and tools use it."""
    pinned: PinnedRevision | None = None
    """What the revision consists of, once a pod of it was Ready."""
    spec: MultimodalDeploymentSpec

    @classmethod
    def text_for(
        cls,
        spec: MultimodalDeploymentSpec,
        namespace: str,
        name: str,
        component: Component,
        pinned: PinnedRevision | None = None,
    ) -> str:
        """The configuration file of a component: canonical JSON, without fields that have their defaults."""
        readers = _readers(spec, component)
        content: dict[str, Any] = {
            "namespace": namespace,
            "name": name,
            "revision": pipeline_revision(spec),
            "readers": readers,
            "spec": selected_spec(spec, read_by(readers)),
        }
        if pinned is not None:
            content["pinned"] = pinned.model_dump(mode="json", by_alias=True, exclude_none=True)
        return canonical(content)

    @classmethod
    def of(
        cls, spec: MultimodalDeploymentSpec, namespace: str, name: str, component: Component
    ) -> PipelineConfig:
        """The configuration that the processes of a component read."""
        return cls.parse(cls.text_for(spec, namespace, name, component))

    @classmethod
    def load(cls, path: str | Path) -> PipelineConfig:
        """Read a file that holds `text_for`.

        Raises:
            OSError, ValueError: it cannot be read, or is not a configuration.
        """
        return cls.parse(Path(path).read_text())

    @classmethod
    def parse(cls, text: str) -> PipelineConfig:
        """Read the text of a configuration file.

        The operator checks rules between fields; a part of a spec need not keep them.

        Raises:
            ValueError: the text is not a configuration; the message names the fields.
        """
        config = cls.model_validate(json.loads(text), context=STRUCTURE_ONLY)
        if config.readers is not None:
            spec = limited_to(with_first_kv_backend(config.spec), read_by(config.readers))
            return config.model_copy(update={"spec": spec})
        return config

    def dump(self) -> str:
        """The whole configuration as canonical JSON."""
        return canonical(self.model_dump(mode="json", by_alias=True, exclude_none=True))

    def with_live_fields_of(self, fresh: PipelineConfig) -> PipelineConfig:
        """This configuration with the fields of `fresh` that may change while a process runs.

        The other fields stay as they are.
        """
        live = live_for(EVERY_READER if self.readers is None else self.readers)
        spec = _merged(selected(self.spec, lambda path: not live(path)), selected(fresh.spec, live))
        head = self.model_dump(mode="json", by_alias=True, exclude={"spec"})
        return PipelineConfig.parse(json.dumps({**head, "spec": spec}))


def _merged(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Both JSON objects merged; no key is in both."""
    both = {**first, **second}
    return {
        key: _merged(first[key], second[key])
        if key in first and key in second and isinstance(first[key], dict)
        else value
        for key, value in both.items()
    }
