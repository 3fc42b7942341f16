"""What any pod may receive: states of other pods, and what their caches have."""

from __future__ import annotations

from dataclasses import dataclass, field

from mmd_api.contract.load import PodLoad, WorkerState
from mmd_api.contract.pools import Role


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """State of a pod, twice a second. A pod without heartbeats for `heartbeat_timeout` is lost; a new incarnation is a new pod.

    `sent` is Unix time by the pod's own clock: it orders the heartbeats of one incarnation, and means nothing compared with another clock.
    `identity` names the code and the weights that it runs, `commit` the commit of the model's hub repository,
    `adapter_commits` those of the adapters from the hub, by name.
    `prefix_number`, `feature_number`: of its newest `CacheReport` of its prefix cache, and of its features; 0: none yet.
    `node`: the same for all pods of one machine; empty: unknown. `takes_prompts`: a decode pod that also computes prompts which need no media.
    `encodes_small_media`: a prefill pod that takes requests with `encode_here`.
    `api_endpoint`: where a gateway serves clients (`ip:port`); empty: it does not now. `requests`: that run there, of `max_requests` that may.
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
    """Identities that a pod's cache has gained and lost since its report before: of KV blocks of `block_tokens` tokens, or of features (1).

    `number` counts from 1 in each incarnation, without gaps: who has missed one asks for all with `CacheWanted`. `begins`: what was reported
    before is void once a report is `complete`; from there on, reports are changes again. None names more than 4096 identities.
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
    """Somebody to a pod, as a request: report all that it has cached again, because reports of this incarnation were missed."""

    by: str
    incarnation: str
