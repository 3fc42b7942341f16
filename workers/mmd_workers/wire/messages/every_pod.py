"""Messages that any pod may receive: states of other pods, and the contents of their caches."""

from __future__ import annotations

from dataclasses import dataclass, field

from mmd_api.contract.load import PodLoad, WorkerState
from mmd_api.contract.pools import Role


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """State of a pod, twice a second. A pod without heartbeats for `heartbeat_timeout` is lost; a new incarnation is a new pod.

    - `sent`: Unix time by the pod's own clock. It orders the heartbeats of one incarnation, and means nothing compared with another clock.
    - `identity`: the code and the weights that the pod runs.
    - `commit`, `adapter_commits`: commits of the hub repositories of the model and, by name, of the adapters.
    - `prefix_number`, `feature_number`: number of the newest `CacheReport` of the prefix cache, and of the features; 0: none yet.
    - `node`: the same for all pods of one machine; empty: unknown.
    - `takes_prompts`: a decode pod also computes prompts that need no media.
    - `encodes_small_media`: a prefill pod takes requests with `encode_here`.
    - `api_endpoint`: where a gateway serves clients (`ip:port`); empty: it serves none now.
    - `requests`, `max_requests`: requests that run at a gateway, and the most that may.
    """

    pod: str
    pool: str
    roles: list[Role]
    incarnation: str
    revision: str
    state: WorkerState
    http_endpoint: str
    sent: float
    load: PodLoad
    max_model_len: int = 0
    identity: str = ""
    commit: str = ""
    adapter_commits: dict[str, str] = field(default_factory=dict)
    prefix_number: int = 0
    feature_number: int = 0
    node: str = ""
    takes_prompts: bool = False
    encodes_small_media: bool = False
    api_endpoint: str = ""
    requests: int = 0
    max_requests: int = 0


@dataclass(frozen=True, slots=True)
class CacheReport:
    """Identities that a pod's cache has gained (`added`) and lost (`evicted`) since its previous report.

    They are of KV blocks of `block_tokens` tokens, or of features (1). `number` counts from 1 in each incarnation, without gaps: a pod
    that has missed one asks for all with `CacheWanted`. `begins`: earlier reports are void once a report is `complete`; from there on,
    reports are changes again. No report names more than 4096 identities.
    """

    pod: str
    incarnation: str
    number: int
    block_tokens: int
    added: list[bytes]
    evicted: list[bytes]
    begins: bool = False
    complete: bool = True


@dataclass(frozen=True, slots=True)
class CacheWanted:
    """Request to a pod: report the whole cache again, because `by` has missed reports of this incarnation."""

    by: str
    incarnation: str
