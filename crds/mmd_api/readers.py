"""Which components read each spec field, and whether a change takes effect at runtime or replaces pods.

The configuration passed to each component, the hash that triggers a pod replacement and the "change" column of the reference are
all derived from this table.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from mmd_api.base import ApiModel
from mmd_api.contract.pools import POOL_NAMES, PoolName, Role
from mmd_api.spec.deployment import MultimodalDeploymentSpec
from mmd_api.spec.transfer import KvBackend

Component = Literal["gateway", "nats", "encoder", "prefill", "decode"]
Reader = Literal["gateway", "encode", "prefill", "decode"]
"""A gateway process reads as `gateway`; a worker process reads as each role of its pool."""
Wanted = Callable[[str], bool]
SpecPart = TypeVar("SpecPart", bound=ApiModel)


@dataclass(frozen=True, slots=True)
class Effect:
    """The effect of changing one field.

    `start`: readers that read the field only at startup; their pods are replaced. `live`: readers that apply it at runtime.
    `pods`: components whose pod template contains the field; their pods are replaced. `revision`: the change creates a new
    pipeline revision, whose pods start next to the current ones. If all are empty, only the operator reads the field.
    """

    start: frozenset[Reader] = frozenset()
    live: frozenset[Reader] = frozenset()
    pods: frozenset[Component] = frozenset()
    revision: bool = False

    def __or__(self, other: Effect) -> Effect:
        return Effect(
            self.start | other.start,
            self.live | other.live,
            self.pods | other.pods,
            self.revision or other.revision,
        )


def _start(*readers: Reader) -> Effect:
    return Effect(start=frozenset(readers))


def _live(*readers: Reader) -> Effect:
    return Effect(live=frozenset(readers))


def _pods(*components: Component) -> Effect:
    return Effect(pods=frozenset(components))


EVERY_READER: tuple[Reader, ...] = ("gateway", "encode", "prefill", "decode")
_WORKERS: tuple[Component, ...] = ("gateway", *POOL_NAMES)
_OPERATOR = Effect()
_REVISION = Effect(start=frozenset(EVERY_READER), revision=True)
_UNDECLARED = _start(*EVERY_READER) | _pods(*_WORKERS, "nats")
"""The default for a field missing from the table: replace every pod, which is slow but never ignores a setting.
`tests/plan/test_field_effects.py` fails for such a field."""


def _pool(pool: PoolName) -> dict[str, Effect]:
    return {
        f"{pool}.replicas": _OPERATOR,
        f"{pool}.autoscaling": _OPERATOR,
        f"{pool}.autoscaling.*": _OPERATOR,
        f"{pool}.gpus": _pods(pool),
        f"{pool}.gpuResource": _pods(pool),
        f"{pool}.resourceClaims": _pods(pool),
        f"{pool}.resources.*": _pods(pool),
        f"{pool}.nodeSelector": _pods(pool),
        f"{pool}.tolerations": _pods(pool),
        f"{pool}.schedulingDeadlineSeconds": _OPERATOR,
        f"{pool}.startDeadlineSeconds": _OPERATOR if pool == "encoder" else _live(pool),
        f"{pool}.template.*": _pods(pool),
    }


def _vllm(pool: Literal["prefill", "decode"]) -> dict[str, Effect]:
    return {
        f"engine.{pool}": _start(pool),
        f"engine.{pool}.*": _start(pool),
        f"engine.{pool}.quantization": _REVISION,
        f"engine.{pool}.kvCacheDtype": _REVISION,
        f"engine.{pool}.extraArgs": _REVISION,  # only vLLM knows what an argument changes
    }


EFFECTS: Mapping[str, Effect] = {
    "model.id": _REVISION,
    "model.revision": _REVISION,
    "model.servedName": _live("gateway"),
    "model.dtype": _REVISION,
    "model.maxImageTiles": _REVISION,
    "model.pooledVideoFrames": _REVISION,
    "model.maxModelLen": _start("gateway", "prefill", "decode"),
    "model.storage.type": _REVISION,
    "model.storage.claimName": _REVISION,
    "model.storage.subPath": _REVISION,
    "model.storage.tokenSecret": _pods(*_WORKERS),
    "model.storage.url": _REVISION,
    "model.storage.credentialsSecret": _OPERATOR,
    "model.storage.cache": _REVISION,
    "model.storage.cache.claimName": _REVISION,
    "model.storage.cache.sizeGibibytes": _OPERATOR,
    "model.storage.cache.storageClassName": _OPERATOR,
    "model.storage.cache.accessMode": _OPERATOR,
    "engine.type": _REVISION,
    **_vllm("prefill"),
    **_vllm("decode"),
    "engine.decode": _start("gateway", "decode"),
    "engine.decode.speculative": _start("gateway", "decode"),  # gateways refuse what does not work with it
    "engine.decode.speculative.*": _start("gateway", "decode"),
    "engine.stepMilliseconds": _start("prefill", "decode"),
    "engine.textSharePercent": _start("prefill", "decode"),
    "engine.promptLookupTokens": _start("prefill", "decode"),
    "engine.kvDtype": _start("prefill", "decode") | Effect(revision=True),
    "engine.adapters": _REVISION,
    "image.worker": Effect(revision=True),
    "image.nats": _pods("nats"),
    "image.pullPolicy": _pods(*_WORKERS, "nats"),
    "image.pullSecrets": _pods(*_WORKERS, "nats"),
    "gateway.replicas": _live("gateway"),
    "gateway.resources.*": _pods("gateway"),
    "gateway.nodeSelector": _pods("gateway"),
    "gateway.tolerations": _pods("gateway"),
    "gateway.template.*": _pods("gateway"),
    "gateway.media.maxItemsPerRequest": _live("gateway", "encode"),
    "gateway.media.image.maxBytes": _live("gateway", "encode"),
    "gateway.media.image.maxPixels": _live("gateway", "encode"),
    "gateway.media.video.maxBytes": _live("gateway", "encode"),
    "gateway.media.video.maxDurationSeconds": _live("gateway", "encode"),
    "gateway.media.video.maxFrames": _REVISION,
    "gateway.media.video.framesPerSecondMilli": _REVISION,
    "gateway.media.video.sampling": _live("gateway"),
    "gateway.media.video.tooLong": _live("gateway"),
    "gateway.media.audio.maxBytes": _live("gateway", "encode"),
    "gateway.media.audio.maxDurationSeconds": _live("gateway", "encode"),
    "gateway.media.audio.tooLong": _start("gateway"),
    "gateway.media.document.maxBytes": _live("gateway", "encode"),
    "gateway.media.document.maxPages": _live("gateway", "encode"),
    "gateway.media.document.dotsPerInch": _REVISION,
    "gateway.media.allowHttp": _live("gateway", "encode"),
    "gateway.media.allowedHosts": _live("gateway", "encode"),
    "gateway.media.allowPrivateAddresses": _live("gateway", "encode"),
    "gateway.media.fetchTimeoutSeconds": _live("gateway", "encode"),
    "gateway.media.decodeTimeoutSeconds": _live("gateway", "encode"),
    "gateway.media.underLoad": _live("gateway"),
    "gateway.media.underLoad.*": _live("gateway"),
    "gateway.media.failurePolicy": _live("gateway"),
    "gateway.maxBodyMebibytes": _live("gateway"),
    "gateway.maxConcurrentRequests": _live("gateway"),
    "gateway.requestTimeoutSeconds": _start("gateway") | _pods("gateway"),  # decides its grace period
    "gateway.maxRetries": _live("gateway"),
    "gateway.webPage": _live("gateway"),
    "gateway.auditLog": _live("gateway"),
    "gateway.auth": _start("gateway"),
    # The Secret's content is live: a file of its own follows it.
    "gateway.auth.keysSecret": _start("gateway"),
    "gateway.auth.prefixCache": _start("gateway"),
    "gateway.auth.oidc": _start("gateway"),
    "gateway.auth.oidc.issuer": _start("gateway"),
    "gateway.auth.oidc.audience": _start("gateway"),
    "gateway.auth.oidc.tenantClaim": _start("gateway"),
    "gateway.auth.oidc.defaultTenant": _start("gateway"),
    "gateway.tls": _start("gateway"),
    "gateway.tls.secretName": _start("gateway"),  # its content is live in the same way
    "gateway.cors": _start("gateway"),
    "gateway.cors.allowedOrigins": _start("gateway"),
    "gateway.files": _start("gateway"),
    "gateway.files.*": _start("gateway"),
    "gateway.service.*": _OPERATOR,
    "gateway.httpRoute": _OPERATOR,
    "gateway.httpRoute.*": _OPERATOR,
    "gateway.inferencePool": _start("gateway") | _pods("gateway"),  # the port of its picker
    "gateway.inferencePool.pickerTls": _start("gateway"),
    "gateway.ingress": _OPERATOR,
    "gateway.ingress.*": _OPERATOR,
    "encoder": _start("gateway", "encode", "prefill"),
    **_pool("encoder"),
    "encoder.batching.maxItems": _start("encode"),
    "encoder.batching.maxWork": _start("encode"),
    "encoder.batching.maxWaitMilliseconds": _start("encode"),
    "encoder.cacheMebibytes": _start("encode"),
    "encoder.cache.disk": _pods("encoder"),
    "encoder.cache.disk.sizeMebibytes": _pods("encoder"),
    "encoder.cache.disk.claimName": _pods("encoder"),
    "encoder.mediaMebibytes": _start("encode"),
    "encoder.maxDeliveries": _start("encode", "prefill"),
    "encoder.jobTimeoutSeconds": _start("prefill") | _live("encode"),
    "prefill": _start("gateway", "prefill", "decode"),
    **_pool("prefill"),
    "prefill.chunkTokens": _start("prefill", "decode"),
    "prefill.prefixCache": _start("prefill", "decode"),
    "prefill.localEncodeTokens": _start("prefill") | _live("gateway"),
    "prefill.featureBudgetMebibytes": _start("prefill"),
    "prefill.maxWaitingRequests": _start("prefill") | _live("gateway"),
    "prefill.kvCacheMebibytes": _start("prefill"),
    "prefill.kvCachePercent": _start("prefill"),
    **_pool("decode"),
    "decode.maxSequences": _start("prefill", "decode"),
    "decode.kvBlockTokens": _REVISION,
    "decode.localPrefillTokens": _live("gateway"),
    "decode.kvCacheMebibytes": _start("decode"),
    "decode.kvCachePercent": _start("decode"),
    "transfer.embedding.chunkKibibytes": _start("prefill"),
    "transfer.embedding.windowKibibytes": _start("prefill"),
    "transfer.embedding.timeoutSeconds": _start("prefill"),
    "transfer.kv.backend": _start("prefill", "decode") | Effect(revision=True),  # others never read it
    "transfer.kv.wireFormat": _start("prefill", "decode") | Effect(revision=True),
    "transfer.kv.leaseSeconds": _start("prefill"),
    "transfer.kv.chunkTimeoutMilliseconds": _start("prefill", "decode"),
    "nats.managed": _pods(*_WORKERS),
    "nats.replicas": _pods(*_WORKERS, "nats") | _start("gateway"),  # addresses, and copies of streams
    "nats.storage": _pods("nats"),
    "nats.storageClassName": _pods("nats"),
    "nats.url": _pods(*_WORKERS),
    "nats.credentialsSecret": _pods(*_WORKERS),
    "nats.passwordGeneration": _pods("nats"),
    "nats.storageMebibytes": _pods("nats"),
    "nats.resources.*": _pods("nats"),
    "nats.nodeSelector": _pods("nats"),
    "nats.tolerations": _pods("nats"),
    "nats.template.*": _pods("nats"),
    "network.egress": _OPERATOR,
    "slo.ttftMilliseconds": _live("gateway"),
    "slo.itlMilliseconds": _live("gateway"),
    "slo.percentile": _live("gateway"),
    "gpuBudget": _OPERATOR,
    "observability.logLevel": _live(*EVERY_READER),
    "observability.otlpEndpoint": _start(*EVERY_READER),
    "observability.heartbeatMilliseconds": _start(*EVERY_READER),
    "observability.heartbeatTimeoutMilliseconds": _start(*EVERY_READER),
    "rollout.*": _OPERATOR,
    "paused": _OPERATOR,
    "deletionProtection": _OPERATOR,
}
"""Effects by path below `spec`; `.*` matches every field of a nested object. An optional object also has its own entry, for the
components that check whether it is set."""


def effect_of(path: str) -> Effect:
    """The effect of changing the field at `path`, such as `decode.maxSequences`."""
    return declared(path) or _UNDECLARED


def declared(path: str) -> Effect | None:
    """The table entry for the field or its closest enclosing object; None if there is none."""
    if (exact := EFFECTS.get(path)) is not None:
        return exact
    parts = path.split(".")
    return next(
        (
            effect
            for n in range(len(parts) - 1, 0, -1)
            if (effect := EFFECTS.get(f"{'.'.join(parts[:n])}.*")) is not None
        ),
        None,
    )


def readers_of(component: Component, roles: Sequence[Role]) -> tuple[Reader, ...]:
    """The readers that run in a component's processes. `roles`: the roles of the pool, for a pool."""
    if component == "nats":
        return ()
    return ("gateway",) if component == "gateway" else tuple(roles)


def spec_paths(model: type[BaseModel] = MultimodalDeploymentSpec, prefix: str = "") -> Iterator[str]:
    """Paths of all leaf fields and of all optional objects in the spec; an object comes before its fields."""
    for name, field in model.model_fields.items():
        path = f"{prefix}{field.alias or name}"
        inner = part_of(field)
        if inner is None:
            yield path
            continue
        if type(None) in get_args(field.annotation):
            yield path
        yield from spec_paths(inner, f"{path}.")


def changed_paths(before: MultimodalDeploymentSpec, after: MultimodalDeploymentSpec) -> list[str]:
    """Paths of the fields that differ, in spec order. An object that was added or removed is listed without its fields."""
    differing: list[str] = []
    for path in spec_paths():
        if any(path.startswith(f"{part}.") for part in differing):
            continue
        old, new = (value_at(spec, path) for spec in (before, after))
        if isinstance(old, ApiModel) and isinstance(new, ApiModel):
            continue  # its fields are compared one by one
        if old != new:
            differing.append(path)
    return differing


def value_at(spec: ApiModel, path: str) -> object:
    """The value of the field at `path`; None below an object that is not set."""
    value: object = spec
    for part in path.split("."):
        if not isinstance(value, ApiModel):
            return None
        name = next(n for n, field in type(value).model_fields.items() if (field.alias or n) == part)
        value = getattr(value, name)
    return value


def part_of(field: FieldInfo) -> type[ApiModel] | None:
    """The nested model type of a field, optional or not; None for scalars and lists."""
    kinds = [field.annotation]
    if get_origin(field.annotation) in (Union, UnionType):
        kinds = [kind for kind in get_args(field.annotation) if kind is not type(None)]
    return next((k for k in kinds if isinstance(k, type) and issubclass(k, ApiModel)), None)


def selected(part: ApiModel, wanted: Wanted, prefix: str = "") -> dict[str, Any]:
    """The wanted fields as JSON, omitting defaults, so that the result stays the same across releases that only add fields."""
    result: dict[str, Any] = {}
    for name, field in type(part).model_fields.items():
        if name not in part.__dict__:
            continue
        alias, value = field.alias or name, getattr(part, name)
        path = f"{prefix}{alias}"
        if isinstance(value, ApiModel):
            below = selected(value, wanted, f"{path}.")
            if below or field.is_required() or (field.default is None and wanted(path)):
                result[alias] = below
        elif wanted(path) and value != field.get_default(call_default_factory=True):
            dumped = part.model_dump(mode="json", by_alias=True, include={name}, exclude_none=True)
            result |= dumped
    return result


FIRST_KV_BACKEND: KvBackend = "Nccl"
"""The default of `transfer.kv.backend` before there was Auto.

Revisions, hashes and worker files omit it, as before: running deployments keep theirs, and releases stay compatible.
"""


def selected_spec(spec: MultimodalDeploymentSpec, wanted: Wanted) -> dict[str, Any]:
    """The wanted fields of a spec as JSON, in the form that earlier releases hash and read.

    Auto is resolved: the pods of a pool do not read the GPUs of another pool.
    """
    backend = spec.transfer.kv.backend
    if backend == "Auto" and spec.prefill is not None:
        backend = spec.kv_backend
    return selected(_with_kv_backend(spec, "Auto" if backend == FIRST_KV_BACKEND else backend), wanted)


def with_first_kv_backend(spec: MultimodalDeploymentSpec) -> MultimodalDeploymentSpec:
    """The spec of a worker's file, with the transport of KV that the file leaves out."""
    return _with_kv_backend(spec, FIRST_KV_BACKEND) if spec.transfer.kv.backend == "Auto" else spec


def _with_kv_backend(
    spec: MultimodalDeploymentSpec, backend: Literal["Auto", KvBackend]
) -> MultimodalDeploymentSpec:
    kv = spec.transfer.kv.model_copy(update={"backend": backend})
    return spec.model_copy(update={"transfer": spec.transfer.model_copy(update={"kv": kv})})


def read_by(readers: Sequence[Reader]) -> Wanted:
    """Selects the fields that any of these readers reads, at startup or at runtime."""
    return lambda path: bool(frozenset(readers) & (effect_of(path).start | effect_of(path).live))


def live_for(readers: Sequence[Reader]) -> Wanted:
    """Selects the fields that any of these readers applies at runtime."""
    return lambda path: bool(frozenset(readers) & effect_of(path).live)


def replacing(component: Component, readers: Sequence[Reader]) -> Wanted:
    """Selects the fields whose change replaces a component's pods."""

    def wanted(path: str) -> bool:
        effect = effect_of(path)
        return component in effect.pods or bool(frozenset(readers) & effect.start)

    return wanted


def canonical(content: object) -> str:
    """Serializes JSON content deterministically."""
    return json.dumps(content, sort_keys=True, indent=1)


def limited_to(part: SpecPart, wanted: Wanted, prefix: str = "") -> SpecPart:
    """A copy without the unwanted fields. Reading one raises AttributeError rather than returning a default."""
    # A shallow copy. Nested objects are copied below, because instances share default objects.
    copy = part.model_copy()
    for name, field in type(part).model_fields.items():
        if name not in part.__dict__:
            continue
        path, value = f"{prefix}{field.alias or name}", part.__dict__[name]
        if isinstance(value, ApiModel):
            copy.__dict__[name] = limited_to(value, wanted, f"{path}.")
        elif not wanted(path) and (part_of(field) is None or not _any_below(field, wanted, path)):
            del copy.__dict__[name]
    return copy


def _any_below(field: FieldInfo, wanted: Wanted, path: str) -> bool:
    """Whether an unset optional object could contain a wanted field, so that its absence is itself wanted."""
    inner = part_of(field)
    return inner is not None and any(wanted(below) for below in spec_paths(inner, f"{path}."))
