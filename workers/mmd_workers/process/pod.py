"""A pod: the resources of its parts, and the interface of a part to the process. Independent of roles.

A part is a role (encode, prefill, decode) or something that roles have in common: the engine, its sequences, the KV links.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any

from mmd_api.contract.errors import MmdError
from mmd_api.contract.load import PodLoad
from mmd_api.contract.pools import PoolName, Role
from mmd_api.pipeline import encodes_small_media
from mmd_api.spec.deployment import MultimodalDeploymentSpec
from mmd_api.spec.engine import VllmPoolSpec
from mmd_api.spec.pools import DecodeSpec, EncoderSpec, PrefillSpec
from mmd_workers.features.held import HeldFeatures
from mmd_workers.observe.metrics import Metrics
from mmd_workers.observe.server import Progress
from mmd_workers.observe.startup import Startup
from mmd_workers.observe.tracing import Tracing
from mmd_workers.process.settings import WorkerSettings
from mmd_workers.wire.bus import Bus
from mmd_workers.wire.jobs import EncodeQueue
from mmd_workers.wire.peers import PeerDirectory

log = logging.getLogger(__name__)

LIVENESS_SECONDS = 60.0
DRAIN_RESERVE_SECONDS = 5.0  # part of the grace period, for the last messages and for closing


class Tasks:
    """The tasks of a pod. A task that fails ends the pod, which cannot work without it."""

    def __init__(self) -> None:
        self.stopping = asyncio.Event()
        self.failure: BaseException | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._events: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run a task that goes on until `cancel`."""
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(self._ended)
        self._tasks.append(task)
        return task

    def in_background(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Handle an event. A failure is logged; the pod goes on."""
        task = asyncio.create_task(work, name=name)
        self._events.add(task)
        task.add_done_callback(self._dealt_with)

    def failed(self, error: BaseException) -> None:
        """End the process, because something that should run for ever has failed."""
        log.critical("a component of this worker failed permanently: %s", error, exc_info=error)
        if self.failure is None:  # later failures are its consequences
            self.failure = error
        self.stopping.set()

    async def cancel(self) -> None:
        """Cancel the spawned tasks, and wait for their end."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failed(error)

    def _dealt_with(self, task: asyncio.Task[None]) -> None:
        self._events.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s failed: %s", task.get_name(), error, exc_info=error)


@dataclass(slots=True)
class Pod:
    """The resources that the parts of a pod may use. `spec` is replaced when live settings change."""

    settings: WorkerSettings
    spec: MultimodalDeploymentSpec
    pool: PoolName
    roles: tuple[Role, ...]
    metrics: Metrics
    tracing: Tracing
    startup: Startup
    tasks: Tasks
    held: HeldFeatures = field(default_factory=HeldFeatures)
    bus: Bus = field(init=False)  # set once connected
    directory: PeerDirectory = field(init=False)

    @classmethod
    def of(
        cls,
        settings: WorkerSettings,
        pool: PoolName,
        roles: tuple[Role, ...],
        metrics: Metrics | None = None,
    ) -> Pod:
        """A pod that is not connected yet. `metrics`: exposed instead of the metrics of its roles."""
        pipeline, metrics = settings.pipeline, metrics or Metrics(roles)
        endpoint = pipeline.spec.observability.otlp_endpoint
        tracing = Tracing(settings.pod, pipeline.name, pipeline.namespace, endpoint)
        return cls(settings, pipeline.spec, pool, roles, metrics, tracing, Startup(metrics), Tasks())

    @property
    def name(self) -> str:
        """The pod's name, by which its peers address it."""
        return self.settings.pod

    @property
    def drain_seconds(self) -> float:
        """Seconds from the request to drain until the remaining work is given back."""
        return max(1.0, self.settings.grace_seconds - DRAIN_RESERVE_SECONDS)

    @property
    def encoder_spec(self) -> EncoderSpec:
        """Settings of encoding, wherever it is done."""
        return self.spec.encoder or EncoderSpec()

    @property
    def encodes_small_media(self) -> bool:
        """Whether this pod has a tower for small media, beside encoder pods for the rest."""
        return encodes_small_media(self.spec, self.pool)

    @property
    def prefill_spec(self) -> PrefillSpec:
        """Settings of prefill, wherever it is done."""
        return self.spec.prefill or PrefillSpec()

    @property
    def kv_spec(self) -> PrefillSpec | DecodeSpec:
        """Settings of the pool whose KV this pod holds."""
        spec = self.spec
        return spec.prefill if self.pool == "prefill" and spec.prefill else spec.decode

    @property
    def vllm_spec(self) -> VllmPoolSpec:
        """Settings of vLLM in the pods of this pool."""
        engine = self.spec.engine
        return (engine.prefill if self.pool == "prefill" else engine.decode) or VllmPoolSpec()

    def encode_queue(self) -> EncodeQueue:
        """The queue of encode jobs of this deployment."""
        return EncodeQueue(self.bus)


@dataclass(frozen=True, slots=True)
class Advertised:
    """Fields that a part adds to the pod's heartbeat, besides its load. None: the part has nothing to add to the field."""

    max_model_len: int | None = None
    prefix_number: int | None = None
    feature_number: int | None = None
    takes_prompts: bool | None = None
    encodes_small_media: bool | None = None


class Part:
    """A part of a pod: a role, or something that roles share. Methods that a part does not override do nothing.

    A process takes its parts through this life, in the order of `worker.parts_of`; every part ends a phase before the next one begins:

    1. Start: `load_weights`, `start`, `warm_up`, `accept`, `connect`. Work comes from `accept` on.
    2. Serve: `sample` a few times a second; `load`, `advertised` and `progress` for heartbeats and probes; `reconfigure` when live
       settings change. These, and `drain`, may be called at any time, even before the part has started.
    3. End: when asked to stop, `drain`, then wait for `drained`, then `give_back` the rest; after a failure `drain`, `surrender`,
       `give_back` at once. In both cases `stop` last, in reverse order, even after a start that failed half-way.
    """

    # --- start ----------------------------------------------------------------------------------------------------

    async def load_weights(self) -> None:
        """Read weights, in a thread, so that heartbeats go on."""

    async def start(self) -> None:
        """Create everything that computes. All weights are loaded and nothing has run, so that memory can be measured."""

    async def warm_up(self) -> None:
        """Run every computation once, before work can come."""

    async def accept(self) -> None:
        """Accept work from now on."""

    async def connect(self) -> None:
        """Connect with peers ahead of the first request; no request waits for this."""

    # --- serve ----------------------------------------------------------------------------------------------------

    async def sample(self) -> None:
        """Refresh the figures that heartbeats and scrapes read."""

    def load(self) -> PodLoad:
        """This part's share of the pod's load."""
        return PodLoad()

    def advertised(self) -> Advertised:
        """Fields of the heartbeat besides the load; a later part's fields replace an earlier part's."""
        return Advertised()

    def progress(self) -> dict[str, Progress]:
        """The progress checks that decide whether the process counts as alive."""
        return {}

    def reconfigure(self, spec: MultimodalDeploymentSpec) -> None:
        """Apply settings that changed while this process runs."""

    # --- end ------------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Accept no more work; work in progress is finished."""

    @property
    def drained(self) -> bool:
        """Whether nothing is in progress."""
        return True

    async def surrender(self) -> None:
        """Let other pods have the work now instead of at a timeout, because this process has failed."""

    async def give_back(self, error: MmdError) -> None:
        """End work that is still in progress with `error`: another pod continues it."""

    async def stop(self) -> None:
        """Release everything that `load_weights`, `start` and `accept` took, even after a start that failed half-way."""


def merged(advertised: Iterable[Advertised]) -> Advertised:
    """The fields that a pod advertises: each from the last part that sets it."""
    result = Advertised()
    for part_fields in advertised:
        set_fields = {
            entry.name: value
            for entry in fields(part_fields)
            if (value := getattr(part_fields, entry.name)) is not None
        }
        result = replace(result, **set_fields)
    return result


def sum_of(loads: Iterable[PodLoad]) -> PodLoad:
    """The load of a pod: the sum over its parts."""
    total: dict[str, Any] = {}
    for load in loads:
        for name in (entry.name for entry in fields(load)):
            value = getattr(load, name)
            if name not in total:
                total[name] = value
            elif isinstance(value, dict):
                total[name] = total[name] | value
            else:
                total[name] += value
    return PodLoad(**total)
