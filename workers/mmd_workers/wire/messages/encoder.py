"""Messages that encoders receive, with their replies: jobs, credits of receivers, features of a draining encoder."""

from __future__ import annotations

from dataclasses import dataclass, field

from mmd_api.contract.pools import Modality
from mmd_workers.wire.messages.message_parts import FeatureRef


@dataclass(frozen=True, slots=True)
class EncodeJob:
    """One medium to encode, published by the worker that needs the feature (it owns retries and the deadline).

    `receiver`, `receiver_incarnation`: the pod whose `embedding` subject takes the OFFER. `gateway` holds the bytes. `attempt`: the
    attempt of the request.
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
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class EncodeTaken:
    """Reply to an `EncodeJob` sent, past the queue, to an encoder that reports to have the feature.

    The job is sent again twice a second until the feature arrives. If not `taken`, the encoder neither has the feature nor is making it:
    ask another encoder, or queue the job. `making`: the feature is not complete yet; otherwise it is being sent, or waits for its turn.
    """

    job_id: str
    taken: bool
    making: bool = False


@dataclass(frozen=True, slots=True)
class EmbeddingCredit:
    """Receiver to sender while chunks flow: everything up to `received_bytes` has arrived. ACK if `complete`."""

    transfer_id: str
    received_bytes: int
    complete: bool = False
    error: str = ""


@dataclass(frozen=True, slots=True)
class GivenFeature:
    """A feature in the cache of a draining encoder. `heat_seconds`: how often and how recently it was used, see `features/cache.py`."""

    feature_id: str
    modality: Modality
    num_bytes: int
    heat_seconds: float


@dataclass(frozen=True, slots=True)
class FeaturesGiven:
    """Request from a draining encoder to each remaining one: its features, hottest first, and for how many `seconds` it can send them."""

    sender: str
    features: list[GivenFeature]
    seconds: float


@dataclass(frozen=True, slots=True)
class FeaturesWanted:
    """Reply to `FeaturesGiven`: ids of features that are `held` already, and of those that are `wanted`.

    A feature is wanted if there is room, or if only colder features would have to go. It is forgotten if the other encoder does not
    offer it within its seconds.
    """

    held: list[str]
    wanted: list[str]
