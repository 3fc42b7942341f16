"""Rules that one field alone cannot state, each written once: pydantic evaluates `holds`, the API server evaluates `cel`.

Knows the models only by name, so that their base class can use it. A rule about a value that this version does not
serve yet goes away when a later version serves it; the field stays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import BaseModel

    from mmd_api.resource import ObjectMeta
    from mmd_api.spec import (
        Autoscaling,
        DecodeSpec,
        EmbeddingTransfer,
        EncoderSpec,
        KvTransfer,
        MediaPolicy,
        ModelSpec,
        ModelStorage,
        MultimodalDeploymentSpec,
        NatsSpec,
        ObservabilitySpec,
        PodTemplate,
        Pool,
        SloSpec,
        Toleration,
    )

MODELS_FOLDER = "/models"
DEMO_MODEL = "builtin/demo"
RESERVED_LABEL_DOMAINS = ("app.kubernetes.io/", "serving.multimodal.dev/")


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule of the model class `model` and of its subclasses; `field` is where a reader should look, below that model.

    `cel` sees the same part of the resource as `self`. It is None where the schema itself already says it (unique list
    keys). `cluster_only` rules are for the API server alone: the local runner serves what they refuse.
    """

    model: str
    field: str
    cel: str | None
    holds: Callable[[Any], bool]
    problem: str
    remedy: str
    cluster_only: bool = False

    @property
    def message(self) -> str:
        """What is wrong and what to do, in the words that both evaluators use."""
        return f"{self.problem}; {self.remedy}"


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


def _revision_of_hub_id(m: ModelSpec) -> bool:
    return m.revision is None or m.source == "HubId"


def _path_known_to_pods(m: ModelSpec) -> bool:
    return m.source != "RelativePath"


def _toleration_value(t: Toleration) -> bool:
    return t.operator != "Exists" or t.value is None


def _toleration_key(t: Toleration) -> bool:
    return t.operator == "Exists" or t.key is not None


def _toleration_seconds(t: Toleration) -> bool:
    return t.toleration_seconds is None or t.effect == "NoExecute"


def _labels_free(t: PodTemplate) -> bool:
    return not any(k.startswith(RESERVED_LABEL_DOMAINS) for k in t.labels)


def _annotations_free(t: PodTemplate) -> bool:
    return not any(k.startswith(RESERVED_LABEL_DOMAINS) for k in t.annotations)


def _env_unique(t: PodTemplate) -> bool:
    return len({e.name for e in t.env}) == len(t.env)


def _env_free(t: PodTemplate) -> bool:
    return not any(e.name.startswith("MMD_") for e in t.env)


def _min_below_max(a: Autoscaling) -> bool:
    return a.min_replicas <= a.max_replicas


def _schedules_below_max(a: Autoscaling) -> bool:
    return all(s.min_replicas <= a.max_replicas for s in a.schedules)


def _replicas_or_autoscaling(p: Pool) -> bool:
    return p.replicas is None or p.autoscaling is None


def _tensor_parallel_fits(p: Pool) -> bool:
    return p.gpus % p.tensor_parallel_size == 0 if p.gpus else p.tensor_parallel_size == 1


def _tensor_parallel_served(p: Pool) -> bool:
    return p.tensor_parallel_size == 1


def _failure_policy_served(e: EncoderSpec) -> bool:
    return e.failure_policy == "Fail"


def _kv_dtype_served(d: DecodeSpec) -> bool:
    return d.kv_dtype == "Auto"


def _wire_precision_served(k: KvTransfer) -> bool:
    return k.wire_precision == "Native"


def _layer_pipelining_served(k: KvTransfer) -> bool:
    return k.layer_pipelining == "Chunk"


def _lease_outlives_chunk(k: KvTransfer) -> bool:
    return k.lease_seconds * 1000 > k.chunk_timeout_milliseconds


def _hosts_used(m: MediaPolicy) -> bool:
    return m.allow_http or not m.allowed_hosts


def _chunk_in_window(e: EmbeddingTransfer) -> bool:
    return e.chunk_kibibytes <= e.window_kibibytes


def _nats_url_given(n: NatsSpec) -> bool:
    return n.managed or n.url is not None


def _nats_url_used(n: NatsSpec) -> bool:
    return not n.managed or (n.url is None and n.credentials_secret is None)


def _nats_url_without_password(n: NatsSpec) -> bool:
    return n.url is None or "@" not in n.url


def _slo_order(s: SloSpec) -> bool:
    return (
        s.ttft_milliseconds is None or s.itl_milliseconds is None or s.itl_milliseconds <= s.ttft_milliseconds
    )


def _heartbeat_timeout(o: ObservabilitySpec) -> bool:
    return o.heartbeat_timeout_milliseconds >= 2 * o.heartbeat_milliseconds


def _minimum(p: Pool) -> int:
    if p.autoscaling is not None:
        return p.autoscaling.min_replicas
    return 1 if p.replicas is None else p.replicas


def _pools(s: MultimodalDeploymentSpec) -> list[Pool]:
    return [p for p in (s.encoder, s.prefill, s.decode) if p is not None]


def _zero_from_upstream(s: MultimodalDeploymentSpec) -> bool:
    return _minimum(s.decode) > 0 or all(_minimum(p) == 0 for p in _pools(s))


def _budget_covers_minima(s: MultimodalDeploymentSpec) -> bool:
    return s.gpu_budget is None or sum(_minimum(p) * p.gpus for p in _pools(s)) <= s.gpu_budget


def _nccl_has_gpus(s: MultimodalDeploymentSpec) -> bool:
    return s.prefill is None or s.transfer.kv.backend != "Nccl" or min(s.prefill.gpus, s.decode.gpus) >= 1


def _job_outlives_transfer(s: MultimodalDeploymentSpec) -> bool:
    return s.encoder is None or s.encoder.job_timeout_seconds >= s.transfer.embedding.timeout_seconds


def _job_outlives_decoding(s: MultimodalDeploymentSpec) -> bool:
    return s.encoder is None or s.encoder.job_timeout_seconds >= s.gateway.media.decode_timeout_seconds


def _windows_see_samples(s: MultimodalDeploymentSpec) -> bool:
    heartbeat = s.observability.heartbeat_milliseconds
    windows = [p.autoscaling.panic_window_seconds for p in _pools(s) if p.autoscaling is not None]
    return all(w == 0 or w * 1000 >= 2 * heartbeat for w in windows)


def _name_fits(m: ObjectMeta) -> bool:
    return len(m.name) <= MAX_NAME_LENGTH


MAX_NAME_LENGTH = 32
_CEL_MINIMUM = "(has({p}.autoscaling) ? {p}.autoscaling.minReplicas : has({p}.replicas) ? {p}.replicas : 1)"
_CEL_GPUS = f"{_CEL_MINIMUM} * {{p}}.gpus"
_CEL_WINDOW = (
    "(!has({p}.autoscaling) || {p}.autoscaling.panicWindowSeconds == 0"
    " || {p}.autoscaling.panicWindowSeconds * 1000 >= 2 * self.observability.heartbeatMilliseconds)"
)


def _each_pool(template: str, absent: str, joiner: str) -> str:
    """One CEL expression over all pools; `absent` stands for the optional ones that are left out."""
    parts = [f"(has(self.{p}) ? {template.format(p=f'self.{p}')} : {absent})" for p in ("encoder", "prefill")]
    return joiner.join([*parts, template.format(p="self.decode")])


RULES: tuple[Rule, ...] = (
    Rule(
        "ObjectMeta",
        "name",
        f"self.name.size() <= {MAX_NAME_LENGTH}",
        _name_fits,
        "the name is too long for the names and labels of the pools' pods",
        f"use at most {MAX_NAME_LENGTH} characters",
    ),
    Rule(
        "ModelStorage",
        "claimName",
        "self.type != 'PersistentVolumeClaim' || has(self.claimName)",
        _claim_named,
        "type PersistentVolumeClaim needs the claim that holds the weights",
        "set claimName, or another type",
    ),
    Rule(
        "ModelStorage",
        "claimName",
        "self.type == 'PersistentVolumeClaim' || (!has(self.claimName) && !has(self.subPath))",
        _claim_used,
        "claimName and subPath belong to type PersistentVolumeClaim alone",
        "remove them, or set type: PersistentVolumeClaim",
    ),
    Rule(
        "ModelStorage",
        "subPath",
        "!has(self.subPath) || (!self.subPath.startsWith('/') && !self.subPath.matches('(^|/)[.][.](/|$)'))",
        _sub_path_stays_inside,
        "subPath leaves the claim",
        "give a relative path without '..'",
    ),
    Rule(
        "ModelStorage",
        "tokenSecret",
        "self.type == 'Hub' || !has(self.tokenSecret)",
        _token_used,
        "a token is used only to fetch from the hub",
        "remove tokenSecret, or set type: Hub",
    ),
    Rule(
        "ModelSpec",
        "id",
        f"!self.id.startsWith('builtin/') || (self.id == '{DEMO_MODEL}' && self.storage.type == 'Image')",
        _builtin_known,
        f"the only built-in model is {DEMO_MODEL}, and it is part of the worker image",
        f"set id: {DEMO_MODEL} with storage.type: Image, or another model's id",
    ),
    Rule(
        "ModelSpec",
        "id",
        "self.storage.type != 'Hub' || !(self.id.startsWith('/') || self.id.startsWith('./')"
        " || self.id.startsWith('../') || self.id.startsWith('builtin/'))",
        _hub_id,
        "a path cannot be fetched from the hub",
        "set storage.type: Image or PersistentVolumeClaim, or a hub id such as org/model",
    ),
    Rule(
        "ModelSpec",
        "id",
        f"self.storage.type != 'PersistentVolumeClaim' || self.id == '{MODELS_FOLDER}'"
        f" || self.id.startsWith('{MODELS_FOLDER}/')",
        _path_on_claim,
        f"a claim is mounted at {MODELS_FOLDER}, and this id is not below it",
        f"set id: {MODELS_FOLDER}/<folder on the claim>",
    ),
    Rule(
        "ModelSpec",
        "revision",
        "!has(self.revision) || !(self.id.startsWith('/') || self.id.startsWith('./')"
        " || self.id.startsWith('../') || self.id.startsWith('builtin/'))",
        _revision_of_hub_id,
        "only a hub id has revisions",
        "remove revision",
    ),
    Rule(
        "ModelSpec",
        "id",
        "!self.id.startsWith('./') && !self.id.startsWith('../')",
        _path_known_to_pods,
        "a relative path means something on the machine of `mmd up` only",
        "give a hub id, or an absolute path in the image or on a claim",
        cluster_only=True,
    ),
    Rule(
        "Toleration",
        "value",
        "self.operator != 'Exists' || !has(self.value)",
        _toleration_value,
        "operator Exists compares no value",
        "remove value, or set operator: Equal",
    ),
    Rule(
        "Toleration",
        "key",
        "self.operator == 'Exists' || has(self.key)",
        _toleration_key,
        "operator Equal needs a key",
        "set key, or operator: Exists",
    ),
    Rule(
        "Toleration",
        "tolerationSeconds",
        "!has(self.tolerationSeconds) || (has(self.effect) && self.effect == 'NoExecute')",
        _toleration_seconds,
        "tolerationSeconds counts for effect NoExecute alone",
        "set effect: NoExecute, or remove tolerationSeconds",
    ),
    *(
        Rule(
            "PodTemplate",
            field,
            f"!self.{field}.exists(k, "
            + " || ".join(f"k.startsWith('{domain}')" for domain in RESERVED_LABEL_DOMAINS)
            + ")",
            free,
            "keys of app.kubernetes.io/ and serving.multimodal.dev/ are the operator's own",
            "use a prefix of yours",
        )
        for field, free in (("labels", _labels_free), ("annotations", _annotations_free))
    ),
    Rule(
        "PodTemplate",
        "env",
        None,
        _env_unique,
        "two variables have the same name",
        "keep one of them",
    ),
    Rule(
        "PodTemplate",
        "env",
        "!self.env.exists(e, e.name.startsWith('MMD_'))",
        _env_free,
        "variables that start with MMD_ are the operator's own",
        "use the field of the spec that sets it",
    ),
    Rule(
        "Autoscaling",
        "minReplicas",
        "self.minReplicas <= self.maxReplicas",
        _min_below_max,
        "minReplicas is above maxReplicas",
        "lower minReplicas or raise maxReplicas",
    ),
    Rule(
        "Autoscaling",
        "schedules",
        "self.schedules.all(s, s.minReplicas <= self.maxReplicas)",
        _schedules_below_max,
        "a schedule asks for more than maxReplicas",
        "lower its minReplicas or raise maxReplicas",
    ),
    Rule(
        "Pool",
        "replicas",
        "!(has(self.replicas) && has(self.autoscaling))",
        _replicas_or_autoscaling,
        "replicas and autoscaling both decide the size of the pool",
        "keep one of them (autoscaling has minReplicas and maxReplicas)",
    ),
    Rule(
        "Pool",
        "tensorParallelSize",
        "self.gpus > 0 ? self.gpus % self.tensorParallelSize == 0 : self.tensorParallelSize == 1",
        _tensor_parallel_fits,
        "tensorParallelSize must equal or divide gpus, and be 1 where gpus is 0",
        "change gpus or tensorParallelSize",
    ),
    Rule(
        "Pool",
        "tensorParallelSize",
        "self.tensorParallelSize == 1",
        _tensor_parallel_served,
        "tensorParallelSize above 1 is not served yet: a worker runs its model on one device",
        "set it to 1",
    ),
    Rule(
        "EncoderSpec",
        "failurePolicy",
        "self.failurePolicy == 'Fail'",
        _failure_policy_served,
        "only failurePolicy Fail is served yet: degraded answers need the gateway to say so in the response",
        "set it to Fail",
    ),
    Rule(
        "DecodeSpec",
        "kvDtype",
        "self.kvDtype == 'Auto'",
        _kv_dtype_served,
        "only kvDtype Auto (the model's own dtype) is served yet: quantised KV needs calibrated scales",
        "set it to Auto",
    ),
    Rule(
        "KvTransfer",
        "wirePrecision",
        "self.wirePrecision == 'Native'",
        _wire_precision_served,
        "only wirePrecision Native is served yet: a lower one changes the tokens",
        "set it to Native",
    ),
    Rule(
        "KvTransfer",
        "layerPipelining",
        "self.layerPipelining == 'Chunk'",
        _layer_pipelining_served,
        "only layerPipelining Chunk is served yet: KV travels when a chunk has passed all layers",
        "set it to Chunk",
    ),
    Rule(
        "KvTransfer",
        "leaseSeconds",
        "self.leaseSeconds * 1000 > self.chunkTimeoutMilliseconds",
        _lease_outlives_chunk,
        "the lease ends before a single chunk may time out",
        "raise leaseSeconds or lower chunkTimeoutMilliseconds",
    ),
    Rule(
        "MediaPolicy",
        "allowedHosts",
        "self.allowHttp || self.allowedHosts.size() == 0",
        _hosts_used,
        "allowedHosts has no meaning while allowHttp is false",
        "set allowHttp: true, or remove allowedHosts",
    ),
    Rule(
        "EmbeddingTransfer",
        "chunkKibibytes",
        "self.chunkKibibytes <= self.windowKibibytes",
        _chunk_in_window,
        "one chunk is larger than the window of credit",
        "lower chunkKibibytes or raise windowKibibytes",
    ),
    Rule(
        "NatsSpec",
        "url",
        "self.managed || has(self.url)",
        _nats_url_given,
        "managed is false and no server is named",
        "set url, or managed: true",
    ),
    Rule(
        "NatsSpec",
        "url",
        "!self.managed || (!has(self.url) && !has(self.credentialsSecret))",
        _nats_url_used,
        "url and credentialsSecret name another server while managed asks for one of our own",
        "set managed: false, or remove them",
    ),
    Rule(
        "NatsSpec",
        "url",
        "!has(self.url) || !self.url.contains('@')",
        _nats_url_without_password,
        "a URL in a resource is no place for a password",
        "put keys username and password into a Secret and name it in credentialsSecret",
    ),
    Rule(
        "SloSpec",
        "itlMilliseconds",
        "!has(self.ttftMilliseconds) || !has(self.itlMilliseconds)"
        " || self.itlMilliseconds <= self.ttftMilliseconds",
        _slo_order,
        "the time between tokens is above the time to the first one",
        "lower itlMilliseconds or raise ttftMilliseconds",
    ),
    Rule(
        "ObservabilitySpec",
        "heartbeatTimeoutMilliseconds",
        "self.heartbeatTimeoutMilliseconds >= 2 * self.heartbeatMilliseconds",
        _heartbeat_timeout,
        "one late heartbeat would count a pod as lost",
        "set heartbeatTimeoutMilliseconds to at least twice heartbeatMilliseconds",
    ),
    Rule(
        "MultimodalDeploymentSpec",
        "decode",
        f"{_CEL_MINIMUM.format(p='self.decode')} > 0"
        f" || ({_each_pool(_CEL_MINIMUM + ' == 0', 'true', ' && ')})",
        _zero_from_upstream,
        "decode may go to zero replicas while a pool upstream of it may not",
        "let encoder and prefill go to zero as well, or keep a decode replica",
    ),
    Rule(
        "MultimodalDeploymentSpec",
        "gpuBudget",
        f"!has(self.gpuBudget) || {_each_pool(_CEL_GPUS, '0', ' + ')} <= self.gpuBudget",
        _budget_covers_minima,
        "the pools' smallest sizes already need more GPUs than gpuBudget",
        "raise gpuBudget, or lower replicas, minReplicas or gpus",
    ),
    Rule(
        "MultimodalDeploymentSpec",
        "transfer.kv.backend",
        "!has(self.prefill) || self.transfer.kv.backend != 'Nccl'"
        " || (self.prefill.gpus >= 1 && self.decode.gpus >= 1)",
        _nccl_has_gpus,
        "Nccl moves KV between GPUs, and prefill or decode has gpus: 0",
        "set transfer.kv.backend: Gloo, or gpus of at least 1 on both",
    ),
    Rule(
        "MultimodalDeploymentSpec",
        "encoder.jobTimeoutSeconds",
        "!has(self.encoder) || self.encoder.jobTimeoutSeconds >= self.transfer.embedding.timeoutSeconds",
        _job_outlives_transfer,
        "an encode job includes its transfer and would end before it",
        "raise jobTimeoutSeconds or lower transfer.embedding.timeoutSeconds",
    ),
    Rule(
        "MultimodalDeploymentSpec",
        "encoder.jobTimeoutSeconds",
        "!has(self.encoder) || self.encoder.jobTimeoutSeconds >= self.gateway.media.decodeTimeoutSeconds",
        _job_outlives_decoding,
        "an encode job includes decoding the medium and would end before it",
        "raise jobTimeoutSeconds or lower gateway.media.decodeTimeoutSeconds",
    ),
    Rule(
        "MultimodalDeploymentSpec",
        "observability.heartbeatMilliseconds",
        _each_pool(_CEL_WINDOW, "true", " && "),
        _windows_see_samples,
        "a pool's autoscaling.panicWindowSeconds is shorter than two heartbeats, so it would see no load",
        "raise panicWindowSeconds (0 turns it off) or lower heartbeatMilliseconds",
    ),
)


def rules_of(model: type) -> list[Rule]:
    """Rules of a model class, those of its bases included."""
    names = {base.__name__ for base in model.__mro__}
    return [rule for rule in RULES if rule.model in names]


def broken_rules(part: BaseModel, *, in_cluster: bool = False) -> list[Rule]:
    """Rules that this part of a resource breaks; those that hold in a cluster alone only if asked for."""
    return [r for r in rules_of(type(part)) if (in_cluster or not r.cluster_only) and not r.holds(part)]
