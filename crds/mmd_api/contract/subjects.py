"""Every NATS subject and stream name of one pipeline revision, and the roles that may use them.

No other module spells a subject. A subject starts with `mmd.<namespace>.<name>.<revision>`, so peers of
different revisions cannot reach each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mmd_api.contract.pools import Role

GATEWAY_USER = "gateway"
DEFAULT_INBOX = "_INBOX"
"""Prefix of reply subjects where every user may listen."""
_ROLES: dict[str, tuple[Role, ...]] = {
    "encode": ("encode",),
    "prefill": ("prefill",),
    "decode": ("decode",),
    "encode_prefill": ("encode", "prefill"),
    "prefill_decode": ("prefill", "decode"),
    "encode_prefill_decode": ("encode", "prefill", "decode"),
}
USERS: tuple[str, ...] = (GATEWAY_USER, *_ROLES)
"""Users of a managed NATS server: the gateway, and every set of roles that a pool can hold.

They are the same for every layout, so that a change of layout does not restart the server.
"""
_QUEUE_MAKERS = tuple(
    f"$JS.API.{call}"
    for call in ("STREAM.CREATE.*", "STREAM.UPDATE.*", "CONSUMER.CREATE.>", "CONSUMER.DURABLE.CREATE.>")
)
_QUEUE_READERS = ("$JS.API.STREAM.INFO.*", "$JS.API.CONSUMER.INFO.*.*")


@dataclass(frozen=True, slots=True)
class Subjects:
    """Subject names of one pipeline revision of one deployment."""

    namespace: str
    name: str
    revision: str

    @property
    def prefix(self) -> str:
        """First tokens of every subject of this pipeline revision."""
        return f"mmd.{self.namespace}.{self.name}.{self.revision}"

    @property
    def encode_stream(self) -> str:
        """Name of the JetStream work queue of encode jobs."""
        return f"mmd-{self.namespace}-{self.name}-{self.revision}-encode"

    @property
    def tokens_stream(self) -> str:
        """Name of the JetStream stream with the tokens of tenants.

        All revisions share it, because a day is longer than a rollout.
        """
        return f"mmd-{self.namespace}-{self.name}-tenant-tokens"

    def tenant_tokens(self, day: int | str, tenant: str) -> str:
        """Tokens that a tenant has used on a day since 1970 (`*` for all). The last message is the total."""
        return f"mmd.{self.namespace}.{self.name}.tenant-tokens.{day}.{tenant}"

    @property
    def files_stream(self) -> str:
        """Name of the JetStream stream with an entry for each uploaded file.

        All revisions share it, because files outlive a rollout.
        """
        return f"mmd-{self.namespace}-{self.name}-files"

    @property
    def file_bytes_stream(self) -> str:
        """Name of the JetStream stream with the bytes of uploaded files."""
        return f"mmd-{self.namespace}-{self.name}-file-bytes"

    def file_entry(self, file_id: str) -> str:
        """The entry of an uploaded file (`*` for all). The last message is its state."""
        return f"mmd.{self.namespace}.{self.name}.file.{file_id}"

    def file_bytes(self, file_id: str, number: int | str) -> str:
        """A chunk of an uploaded file, counted from 0 (`*` for all)."""
        return f"mmd.{self.namespace}.{self.name}.file-bytes.{file_id}.{number}"

    def encode_job(self, modality: str) -> str:
        """Subject of encode jobs of one modality (`*` for all)."""
        return f"{self.prefix}.job.encode.{modality}"

    def encode_work(self, modality: str, work: int | str) -> str:
        """Subject of encode jobs of one modality and size, so that the stream's counts by subject give the queued work."""
        return f"{self.encode_job(modality)}.{work}"

    def heartbeat(self, pod: str) -> str:
        """Heartbeats of a pod (`*` for all pods)."""
        return f"{self.prefix}.heartbeat.{pod}"

    def prefill(self, pod: str) -> str:
        """Request/reply: gateway places a `GenerateRequest` on a pod that computes its prompt."""
        return f"{self.prefix}.prefill.{pod}"

    def embedding(self, pod: str) -> str:
        """Request/reply: encoder sends an `EmbeddingOffer` to the pod that requested the feature."""
        return f"{self.prefix}.embedding.{pod}"

    def encode_failed(self, pod: str) -> str:
        """Request/reply: `EncodeFailed` to the pod that requested a feature."""
        return f"{self.prefix}.encode-failed.{pod}"

    def encode_wanted(self, pod: str) -> str:
        """Request/reply: encoder claims a job at the pod that requested the feature, and checks whether it is still needed (`EncodeCheck`)."""
        return f"{self.prefix}.encode-wanted.{pod}"

    def encode_cached(self, pod: str) -> str:
        """Request/reply: `EncodeJob` to an encoder that has the feature, is making it or may be running the job, past the queue."""
        return f"{self.prefix}.encode-cached.{pod}"

    def features_given(self, pod: str) -> str:
        """Request/reply: an encoder that drains offers its cache to another one (`FeaturesGiven`)."""
        return f"{self.prefix}.features-given.{pod}"

    def feature_offer(self, pod: str) -> str:
        """Request/reply: the `EmbeddingOffer` of a feature that an encoder wants from one that drains."""
        return f"{self.prefix}.feature-offer.{pod}"

    def prefix_report(self, pod: str) -> str:
        """`CacheReport` of a pod's prefix cache (`*` for all pods) to all gateways."""
        return f"{self.prefix}.prefix-report.{pod}"

    def prefix_wanted(self, pod: str) -> str:
        """Request/reply: a gateway that has missed reports of a pod asks for its whole prefix cache (`CacheWanted`)."""
        return f"{self.prefix}.prefix-wanted.{pod}"

    def feature_report(self, pod: str) -> str:
        """`CacheReport` of the features that a pod holds (`*` for all pods) to all gateways and to pods that compute prompts."""
        return f"{self.prefix}.feature-report.{pod}"

    def feature_wanted(self, pod: str) -> str:
        """Request/reply: somebody who has missed reports of a pod asks for all of its features (`CacheWanted`)."""
        return f"{self.prefix}.feature-wanted.{pod}"

    def kv_offer(self, pod: str) -> str:
        """Request/reply: prefill worker sends a `KvOffer` to a decode pod."""
        return f"{self.prefix}.kv-offer.{pod}"

    def kv_chunk(self, pod: str) -> str:
        """Prefill worker announces a `KvChunk` to a decode pod, in the order sent."""
        return f"{self.prefix}.kv-chunk.{pod}"

    def kv_commit(self, pod: str) -> str:
        """Request/reply: prefill worker sends the `KvCommit` of a sequence."""
        return f"{self.prefix}.kv-commit.{pod}"

    def kv_release(self, pod: str) -> str:
        """Request/reply: prefill worker gives back a `KvRelease`d lease before its end."""
        return f"{self.prefix}.kv-release.{pod}"

    def media(self, gateway: str) -> str:
        """Request/reply: encoder reads the bytes of a medium from the gateway that holds it."""
        return f"{self.prefix}.media.{gateway}"

    def tokens(self, gateway: str) -> str:
        """`TokenBatch` to one gateway."""
        return f"{self.prefix}.tokens.{gateway}"

    def failures(self, gateway: str) -> str:
        """`RequestFailed` to one gateway."""
        return f"{self.prefix}.failures.{gateway}"

    def sequences(self, gateway: str) -> str:
        """Request/reply: a worker reports to one gateway the sequences it holds for it (`SequenceReport`)."""
        return f"{self.prefix}.sequences.{gateway}"

    def phases(self, gateway: str) -> str:
        """`PhaseReport` to one gateway."""
        return f"{self.prefix}.phases.{gateway}"

    def answer_claim(self, gateway: str) -> str:
        """Request/reply between gateways: an `AnswerClaim` to the one that keeps the claims of its name."""
        return f"{self.prefix}.answer-claim.{gateway}"

    def answer_read(self, gateway: str) -> str:
        """Request/reply between gateways: an `AnswerRead` to the holder of an answer."""
        return f"{self.prefix}.answer-read.{gateway}"

    @property
    def cancel(self) -> str:
        """Broadcast of `Cancel`: every pod that holds the request frees it."""
        return f"{self.prefix}.cancel"


@dataclass(frozen=True, slots=True)
class Permissions:
    """Subjects that a user may publish to and subscribe to; everything else is refused by the server."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]


def user_of(roles: Sequence[Role]) -> str:
    """The NATS user of a pool with these roles, upstream first."""
    return "_".join(roles)


def previous_of(user: str) -> str:
    """The name under which a managed server accepts the password that `user` had before the last rotation."""
    return f"{user}_previous"


def inbox_of(user: str) -> str:
    """Prefix of the reply subjects of a user: only that user may listen there."""
    return f"{DEFAULT_INBOX}.{user}"


def permissions_of(user: str, namespace: str, name: str) -> Permissions:
    """What a user of a deployment's own NATS server may do, over all pipeline revisions.

    A role listens only to its own subjects, to all heartbeats and cancellations, and to its own replies. Only the gateway
    makes streams: a user that can make one can read every subject through it.
    """
    to = Subjects(namespace, name, "*")
    kv = {to.kv_offer("*"), to.kv_chunk("*"), to.kv_commit("*"), to.kv_release("*")}
    publish = {f"{DEFAULT_INBOX}.>", to.heartbeat("*")}
    subscribe = {f"{inbox_of(user)}.>", to.heartbeat("*"), to.cancel}
    if user == GATEWAY_USER:
        among_gateways = {to.answer_claim("*"), to.answer_read("*")}
        publish |= {to.prefill("*"), to.prefix_wanted("*"), to.feature_wanted("*"), to.cancel}
        publish |= {*_QUEUE_MAKERS, *_QUEUE_READERS}
        publish |= {to.tenant_tokens("*", "*"), f"$JS.API.STREAM.MSG.GET.{to.tokens_stream}"}
        publish |= {to.file_entry("*"), to.file_bytes("*", "*")}
        publish |= {f"$JS.API.STREAM.MSG.GET.{to.files_stream}", f"$JS.API.STREAM.PURGE.{to.files_stream}"}
        publish |= {
            f"$JS.API.DIRECT.GET.{to.file_bytes_stream}.>",
            f"$JS.API.STREAM.PURGE.{to.file_bytes_stream}",
        }
        # Files that are encoded on upload: their jobs, and the answers of encoders.
        publish |= {to.encode_work("*", "*")}
        subscribe |= {to.embedding("*"), to.encode_wanted("*"), to.encode_failed("*")}
        publish |= among_gateways
        subscribe |= {to.tokens("*"), to.failures("*"), to.sequences("*"), to.phases("*"), to.media("*")}
        subscribe |= {to.prefix_report("*"), to.feature_report("*"), *among_gateways}
        return _permissions(publish, subscribe)
    for role in _ROLES[user]:
        publish |= {to.phases("*")}
        if role == "encode":
            publish |= {to.media("*"), to.embedding("*"), to.encode_failed("*"), to.encode_wanted("*")}
            publish |= {to.encode_cached("*"), to.feature_report("*")}
            publish |= {to.encode_work("*", "*")}  # in a rollout, encoders of the last release requeue jobs
            publish |= {to.features_given("*"), to.feature_offer("*")}
            publish |= {"$JS.API.CONSUMER.MSG.NEXT.*.*", "$JS.ACK.>"}
            subscribe |= {to.encode_work("*", "*"), to.encode_cached("*"), to.feature_wanted("*")}
            subscribe |= {to.features_given("*"), to.feature_offer("*")}
        else:
            publish |= {to.tokens("*"), to.failures("*"), to.sequences("*"), to.prefix_report("*")}
            subscribe |= {to.prefix_wanted("*")}
        if role == "prefill":
            publish |= {to.encode_work("*", "*"), to.encode_cached("*"), to.feature_wanted("*"), *kv}
            publish |= {to.feature_report("*")}
            subscribe |= {to.prefill("*"), to.embedding("*"), to.encode_failed("*"), to.encode_wanted("*")}
            subscribe |= {to.feature_report("*"), to.feature_wanted("*")}
        if role == "decode":
            subscribe |= {to.prefill("*"), *kv}
    return _permissions(publish, subscribe)


def _permissions(publish: set[str], subscribe: set[str]) -> Permissions:
    return Permissions(tuple(sorted(publish)), tuple(sorted(subscribe)))
