"""What encoders receive, with the replies they give: jobs, credits of receivers, features of an encoder that drains."""

from __future__ import annotations

from dataclasses import dataclass, field

from mmd_api.contract.pools import Modality
from mmd_workers.wire.messages.message_parts import FeatureRef


@dataclass(frozen=True, slots=True)
class EncodeJob:
    """One medium to encode, published by the worker that needs the feature (it owns retries and the deadline).

    `receiver`/`receiver_incarnation`: the pod whose `embedding` subject takes the OFFER. `gateway` holds the bytes.
    `tried` counts the deliveries of earlier messages of this job: an encoder that gives it back unbegun publishes it again.
    """

    job_id: str
    feature: FeatureRef
    gateway: str
    receiver: str
    receiver_incarnation: str
    deadline: float
    published: float
    request_id: str
    trace: dict[str, str] = field(default_factory=dict)
    attempt: int = 0  # of the request
    tried: int = 0


@dataclass(frozen=True, slots=True)
class EncodeTaken:
    """Reply to an `EncodeJob` that was sent to an encoder that reports the feature, past the queue; it is sent again twice a second until the
    feature arrives. Not `taken`: the encoder neither has the feature nor is making it; ask another one, or queue the job. `making`: it is not
    complete yet; otherwise it is being sent, or waits for its turn.
    """

    job_id: str
    taken: bool
    making: bool = False


@dataclass(frozen=True, slots=True)
class EmbeddingCredit:
    """Receiver to sender while chunks flow: everything up to `received_bytes` has arrived; ACK when `complete`."""

    transfer_id: str
    received_bytes: int
    complete: bool = False
    error: str = ""


@dataclass(frozen=True, slots=True)
class GivenFeature:
    """A feature in the cache of an encoder that drains. `heat_seconds`: how often and recently it was used, see `features/cache.py`."""

    feature_id: str
    modality: Modality
    num_bytes: int
    heat_seconds: float


@dataclass(frozen=True, slots=True)
class FeaturesGiven:
    """An encoder that drains to each that remains, as a request: what it has, hottest first, and for how long it can send it."""

    sender: str
    features: list[GivenFeature]
    seconds: float


@dataclass(frozen=True, slots=True)
class FeaturesWanted:
    """Reply to `FeaturesGiven`, by feature id: what is `held` already, and what is `wanted`, because there is room or only colder features
    would have to go. What the other encoder does not offer in its seconds is forgotten.
    """

    held: list[str]
    wanted: list[str]
