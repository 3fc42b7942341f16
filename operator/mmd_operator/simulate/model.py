"""The pipeline as queues and servers under a clock that jumps from event to event, with a scaler asked at every tick.

Encoders take media from one queue (as from JetStream), several at once: they are read and decoded side by side, and the tower runs one
after the other. A prefill replica takes the next request once a decode replica has
room for it (reserve, then produce). A decode replica steps all its sequences together: progress is counted in steps, whose
length depends on how many there are, so a sequence costs two events however long it is. A pool that the spec leaves out is
served by the next one downstream, which then shares its time. Knows the spec, a calibration and a scaler; no cluster.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from mmd_api.pools import POOL_NAMES, PoolName
from mmd_api.spec import MultimodalDeploymentSpec, Pool, PrefillSpec
from mmd_operator.autoscaling import (
    Demand,
    DeploymentPolicy,
    Latency,
    PodLoad,
    PodSample,
    PodState,
    PoolSamples,
)
from mmd_operator.simulate.calibration import KINDS, MODALITIES, Calibration
from mmd_operator.simulate.traces import Trace

BUSY_WINDOW_SECONDS = 10.0
SPREAD_SEED = 20_240_501
"""Of the factors that requests draw: the same trace gives the same run."""
TTFT_WINDOW_SECONDS = 30.0
_DECODED, _ENCODED, _PREFILLED, _STEPPED, _READY, _TICK = range(6)


class Scaler(Protocol):
    """Says how large each pool should be. Called at every tick, in order of time."""

    def sizes(self, now: float, pipeline: Pipeline) -> Mapping[PoolName, int]:
        """Wanted sizes; a pool that is not named stays as it is."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a trace. Request arrays are in the order of the trace; NaN where a request was lost or had one token.

    `replicas` and `ready` are [ticks] per pool, at `ticks` seconds. `waited_seconds` is the time requests spent in front of
    each pool in all.
    """

    ttft_seconds: npt.NDArray[np.float64]
    itl_seconds: npt.NDArray[np.float64]
    lost: Mapping[str, int]
    end_seconds: float
    ticks: npt.NDArray[np.float64]
    replicas: Mapping[PoolName, npt.NDArray[np.int64]]
    ready: Mapping[PoolName, npt.NDArray[np.int64]]
    replica_seconds: Mapping[PoolName, float]
    gpu_seconds: float
    waited_seconds: Mapping[PoolName, float]

    def attainment(self, ttft_slo: float | None, itl_slo: float | None) -> float:
        """Share of all requests that were answered within the SLO; lost ones were not."""
        good = ~np.isnan(self.ttft_seconds)
        if ttft_slo is not None:
            good &= ~(self.ttft_seconds > ttft_slo)
        if itl_slo is not None:
            good &= ~(self.itl_seconds > itl_slo)
        return float(good.mean()) if len(good) else 1.0


class _Pod:
    __slots__ = (
        "active_marks",
        "active_since",
        "active_total",
        "batch",
        "busy_since",
        "busy_total",
        "created",
        "draining",
        "job",
        "kv_used",
        "marks",
        "media",
        "number",
        "places",
        "ready",
        "step_seconds",
        "steps",
        "steps_at",
        "tower",
        "version",
    )

    def __init__(self, number: int, now: float, marks: int, step_seconds: float) -> None:
        self.number = number
        self.created = now
        self.ready = False
        self.draining = False
        self.job = -1  # the medium in the tower, or the request in prefill
        self.media = [0, 0, 0]  # in hand, by modality
        self.tower: deque[int] = deque()  # media that wait for the tower
        self.busy_since = 0.0
        self.busy_total = 0.0
        self.marks: deque[float] = deque([0.0], maxlen=marks)
        self.batch: list[tuple[float, int]] = []  # (step at which it ends, request)
        self.places = 0  # media in hand; sequences decoding or on their way from prefill
        self.kv_used = 0
        self.steps = 0.0
        self.steps_at = now
        self.step_seconds = step_seconds
        self.version = 0
        self.active_since = 0.0
        self.active_total = 0.0
        self.active_marks: deque[float] = deque([0.0], maxlen=marks)

    @property
    def empty(self) -> bool:
        return self.job < 0 and self.places == 0


@dataclass(slots=True)
class _PoolState:
    name: PoolName
    start_seconds: float
    gpus: int
    pods: list[_Pod] = field(default_factory=list)
    idle: list[tuple[int, _Pod]] = field(default_factory=list)
    created: int = 0
    replica_seconds: float = 0.0
    waited_seconds: float = 0.0

    def members(self) -> list[_Pod]:
        """Pods that were not told to leave."""
        return [pod for pod in self.pods if not pod.draining]


class Pipeline:
    """One run of a trace. `run` once; scalers read the public methods while it runs."""

    def __init__(
        self,
        spec: MultimodalDeploymentSpec,
        trace: Trace,
        calibration: Calibration,
        scaler: Scaler,
        interval_seconds: float = 2.0,
        start_sizes: Mapping[PoolName, int] | None = None,
    ) -> None:
        self.spec = spec
        self.calibration = calibration
        self.policy = DeploymentPolicy.of(spec)
        self._trace = trace
        self._scaler = scaler
        self._interval = interval_seconds
        self._marks = max(2, round(BUSY_WINDOW_SECONDS / interval_seconds) + 1)
        self._heap: list[tuple[float, int, int, _Pod | None, int]] = []
        self._sequence = 0
        self.now = 0.0
        self._prepare_requests(trace)
        self._media_at_once = calibration.encoder.media_at_once
        self._max_sequences = spec.decode.max_sequences
        self._kv_blocks = calibration.decode.kv_blocks
        self._step = calibration.decode.step_seconds
        self._step_each = calibration.decode.step_seconds_per_sequence
        chunk_tokens = spec.prefill.chunk_tokens if spec.prefill else PrefillSpec().chunk_tokens
        self._chunk = chunk_tokens / calibration.prefill.tokens_per_second
        self._encode_rates = {str(m): rate for m, rate in calibration.encoder.work_per_second.items()}
        start_seconds: dict[PoolName, float] = {
            "encoder": calibration.encoder.start_seconds,
            "prefill": calibration.prefill.start_seconds,
            "decode": calibration.decode.start_seconds,
        }
        self.pools: dict[PoolName, _PoolState] = {}
        for name in POOL_NAMES:
            part: Pool | None = getattr(spec, name)
            if part is None:
                continue
            pool = self.pools[name] = _PoolState(name, start_seconds[name], part.gpus)
            count = (start_sizes or {}).get(name, self.policy.pools[name].min_replicas)
            for _ in range(count):
                self._create(pool, start_seconds=0.0)
        self._encoders = self.pools.get("encoder")
        self._prefills = self.pools.get("prefill")
        self._decoders = self.pools["decode"]
        self._encode_queue: deque[tuple[int, int]] = deque()  # (request, modality)
        self._encode_waiting = [0, 0, 0]  # media, by modality
        self._prefill_queue: deque[int] = deque()
        self._prefill_waiting_tokens = 0
        self._prefill_waiting_media = [0, 0, 0]
        self._in_flight = 0
        self._lost: dict[str, int] = {}
        self._ttft_by_tick: deque[list[float]] = deque(
            [[]], maxlen=max(1, round(TTFT_WINDOW_SECONDS / interval_seconds))
        )
        self._records: list[tuple[float, list[int], list[int]]] = []

    def _prepare_requests(self, trace: Trace) -> None:
        encoder, prefill, count = self.calibration.encoder, self.calibration.prefill, len(trace)
        self._work = [self.calibration.media[m] for m in MODALITIES]
        self._overhead_seconds = [encoder.overhead_seconds[m] for m in MODALITIES]
        self._tower_seconds = [self.calibration.media[m] / encoder.work_per_second[m] for m in MODALITIES]
        alone = np.array(self._overhead_seconds) + np.array(self._tower_seconds)
        media = np.stack([trace.media[m] for m in MODALITIES], axis=1)
        block = self.spec.decode.kv_block_tokens
        kv = -(-(trace.context_tokens + trace.output_tokens) // block)
        seconds = prefill.overhead_seconds + trace.context_tokens / prefill.tokens_per_second
        if self.spec.encoder is None:
            seconds = seconds + media @ alone
        factors = self._drawn_factors(trace)
        self._factor: list[float] = factors.tolist()
        self._arrivals: list[float] = trace.arrivals.tolist()
        self._media: list[list[int]] = media.tolist()
        self._media_left: list[int] = media.sum(axis=1).tolist()
        self._context: list[int] = trace.context_tokens.tolist()
        self._output: list[int] = trace.output_tokens.tolist()
        self._kv: list[int] = kv.tolist()
        self._prefill_seconds: list[float] = seconds.tolist()
        self._queued_at = [0.0] * count
        self._target: list[_Pod | None] = [None] * count
        self._first_token = [math.nan] * count
        self._ttft = [math.nan] * count
        self._itl = [math.nan] * count
        self._done = bytearray(count)

    def _drawn_factors(self, trace: Trace) -> npt.NDArray[np.float64]:
        """[requests]"""
        factors = np.ones(len(trace))
        for kind, mine in trace.kinds().items():
            if (spread := self.calibration.spread.get(kind)) is not None:
                rng = np.random.default_rng([SPREAD_SEED, KINDS.index(kind)])
                factors[mine] = rng.choice(np.array(spread), int(mine.sum()))
        return factors

    # --- the clock --------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Every request of the trace, to its end or loss."""
        arrivals, heap, count = self._arrivals, self._heap, len(self._arrivals)
        limit = self.spec.gateway.max_concurrent_requests * self.spec.gateway.replicas
        last = (arrivals[-1] if arrivals else 0.0) + self.spec.gateway.request_timeout_seconds
        self._push(0.0, _TICK, None, 0)
        number = 0
        while heap or number < count:
            if number < count and (not heap or arrivals[number] < heap[0][0]):
                self.now = arrivals[number]
                if self._in_flight >= limit:
                    self._lose(number, "refused", counted=False)
                else:
                    self._in_flight += 1
                    self._arrive(number)
                number += 1
                continue
            now, _, kind, pod, argument = heapq.heappop(heap)
            if kind == _TICK:
                if (number == count and self._in_flight == 0) or now > last:
                    break
                self.now = now
                self._tick()
                self._push(now + self._interval, _TICK, None, 0)
                continue
            assert pod is not None
            if kind == _STEPPED:
                if pod.version == argument:
                    self.now = now
                    self._stepped(pod)
                continue
            self.now = now
            if kind == _DECODED:
                self._decoded(pod, argument)
            elif kind == _ENCODED:
                self._encoded(pod)
            elif kind == _PREFILLED:
                self._prefilled(pod)
            elif not pod.draining:
                self._ready(self.pools[POOL_NAMES[argument]], pod)
        return self._outcome()

    def _push(self, at: float, kind: int, pod: _Pod | None, argument: int) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (at, self._sequence, kind, pod, argument))

    def _outcome(self) -> Outcome:
        never = len(self._arrivals) - sum(self._done)
        if never:
            self._lost["unanswered"] = never
        for pool in self.pools.values():
            pool.replica_seconds += sum(self.now - pod.created for pod in pool.pods)
        names = list(self.pools)
        ready = np.array([r for _, r, _ in self._records], dtype=np.int64).reshape(-1, len(names))
        sizes = np.array([s for _, _, s in self._records], dtype=np.int64).reshape(-1, len(names))
        return Outcome(
            ttft_seconds=np.array(self._ttft),
            itl_seconds=np.array(self._itl),
            lost=dict(self._lost),
            end_seconds=self.now,
            ticks=np.array([at for at, _, _ in self._records]),
            replicas={name: sizes[:, n] for n, name in enumerate(names)},
            ready={name: ready[:, n] for n, name in enumerate(names)},
            replica_seconds={name: pool.replica_seconds for name, pool in self.pools.items()},
            gpu_seconds=sum(pool.replica_seconds * pool.gpus for pool in self.pools.values()),
            waited_seconds={name: pool.waited_seconds for name, pool in self.pools.items()},
        )

    # --- requests ---------------------------------------------------------------------------------------------

    def _arrive(self, request: int) -> None:
        self._factor[request] *= 1 + self.calibration.contention * (self._in_flight - 1)
        if self._kv[request] > self._kv_blocks:
            self._lose(request, "too large")
        elif self._encoders is not None and self._media_left[request]:
            self._queued_at[request] = self.now
            for modality, count in enumerate(self._media[request]):
                for _ in range(count):
                    self._encode_queue.append((request, modality))
                self._encode_waiting[modality] += count
            self._start_encoding(self._encoders)
        else:
            self._queue_prefill(request)

    def _lose(self, request: int, reason: str, *, counted: bool = True) -> None:
        self._done[request] = 1
        self._lost[reason] = self._lost.get(reason, 0) + 1
        if counted:
            self._in_flight -= 1

    def _expired(self, request: int) -> bool:
        """Whether it is over, or its deadline has passed: then it is lost now."""
        if self._done[request]:
            return True
        if self.now - self._arrivals[request] > self.spec.gateway.request_timeout_seconds:
            self._lose(request, "timed out")
            return True
        return False

    def _start_encoding(self, pool: _PoolState) -> None:
        queue = self._encode_queue
        while queue and (pod := self._least_busy(pool)) is not None:
            request, modality = queue.popleft()
            self._encode_waiting[modality] -= 1
            if self._expired(request):
                continue
            pool.waited_seconds += self.now - self._queued_at[request]
            pod.places += 1
            pod.media[modality] += 1
            medium = request * 3 + modality
            seconds = self._overhead_seconds[modality] * self._factor[request]
            self._push(self.now + seconds, _DECODED, pod, medium)

    def _least_busy(self, pool: _PoolState) -> _Pod | None:
        """The encoder with the fewest media in hand that takes one more."""
        best, fewest = None, self._media_at_once
        for pod in pool.pods:
            if pod.places < fewest and pod.ready and not pod.draining:
                best, fewest = pod, pod.places
        return best

    def _idle(self, pool: _PoolState) -> _Pod | None:
        """The free pod with the lowest number: the highest leave first."""
        while pool.idle:
            pod = heapq.heappop(pool.idle)[1]
            if not pod.draining:
                return pod
        return None

    def _decoded(self, pod: _Pod, medium: int) -> None:
        """A medium is read and decoded, and waits for the tower."""
        pod.tower.append(medium)
        self._start_tower(pod)

    def _start_tower(self, pod: _Pod) -> None:
        if pod.job < 0 and pod.tower:
            pod.job = pod.tower.popleft()
            pod.busy_since = self.now
            request, modality = divmod(pod.job, 3)
            seconds = self._tower_seconds[modality] * self._factor[request]
            self._push(self.now + seconds, _ENCODED, pod, 0)

    def _encoded(self, pod: _Pod) -> None:
        assert self._encoders is not None
        request, modality = divmod(pod.job, 3)
        pod.media[modality] -= 1
        pod.busy_total += self.now - pod.busy_since
        pod.job = -1
        pod.places -= 1
        self._start_tower(pod)
        if pod.draining:
            self._leave_if_empty(self._encoders, pod)
        self._media_left[request] -= 1
        if self._media_left[request] == 0 and not self._done[request]:
            self._queue_prefill(request)
        self._start_encoding(self._encoders)

    def _free(self, pool: _PoolState, pod: _Pod) -> None:
        pod.busy_total += self.now - pod.busy_since
        pod.job = -1
        if pod.draining:
            self._leave_if_empty(pool, pod)
        else:
            heapq.heappush(pool.idle, (pod.number, pod))

    def _queue_prefill(self, request: int) -> None:
        self._queued_at[request] = self.now
        self._prefill_queue.append(request)
        self._prefill_waiting_tokens += self._context[request]
        if self._encoders is None:
            for modality, count in enumerate(self._media[request]):
                self._prefill_waiting_media[modality] += count
        self._start_prefill()

    def _start_prefill(self) -> None:
        """First come, first served; a request that no decode replica has room for holds up those behind it."""
        queue, prefills = self._prefill_queue, self._prefills
        while queue:
            if prefills is not None and not prefills.idle:
                return
            request = queue[0]
            if self._expired(request):
                self._unqueue()
                continue
            target = self._room(request, free_to_prefill=prefills is None)
            if target is None:
                return
            pod = target if prefills is None else self._idle(prefills)
            if pod is None:
                return
            self._unqueue()
            pool = prefills or self._decoders
            pool.waited_seconds += self.now - self._queued_at[request]
            target.places += 1
            target.kv_used += self._kv[request]
            self._target[request] = target
            pod.job, pod.busy_since = request, self.now
            seconds = self._prefill_seconds[request] * self._factor[request]
            if prefills is None and pod.batch:
                steps = math.ceil(seconds / self._chunk)
                seconds += steps * (self._step + self._step_each * len(pod.batch))
            if prefills is None:
                self._change_pace(pod)
            self._push(self.now + seconds, _PREFILLED, pod, 0)

    def _unqueue(self) -> None:
        request = self._prefill_queue.popleft()
        self._prefill_waiting_tokens -= self._context[request]
        if self._encoders is None:
            for modality, count in enumerate(self._media[request]):
                self._prefill_waiting_media[modality] -= count

    def _room(self, request: int, free_to_prefill: bool) -> _Pod | None:
        """The decode replica with the fewest sequences that has a place and the blocks."""
        need, best, fewest = self._kv[request], None, self._max_sequences
        for pod in self._decoders.pods:
            if (
                pod.places < fewest
                and pod.ready
                and not pod.draining
                and pod.kv_used + need <= self._kv_blocks
                and (pod.job < 0 or not free_to_prefill)
            ):
                best, fewest = pod, pod.places
        return best

    def _prefilled(self, pod: _Pod) -> None:
        request, prefills = pod.job, self._prefills
        if prefills is None:
            pod.busy_total += self.now - pod.busy_since
            pod.job = -1
        else:
            self._free(prefills, pod)
        transfer = self.calibration.transfer
        delay = self.calibration.gateway_seconds
        if self._encoders is not None and any(self._media[request]):
            delay += transfer.seconds_per_medium
        self._first_token[request] = self.now
        delay *= self._factor[request]
        self._ttft[request] = ttft = self.now - self._arrivals[request] + delay
        self._ttft_by_tick[-1].append(ttft)
        target = self._target[request]
        assert target is not None
        if self._output[request] > 1:
            self._progress(target)
            moved = transfer.seconds_per_token * self._context[request] if prefills is not None else 0.0
            if not target.batch:
                target.active_since = self.now
            ends = target.steps + self._output[request] - 1 + moved / target.step_seconds
            heapq.heappush(target.batch, (ends, request))
            self._change_pace(target)
        else:
            self._finish(target, request)
            if prefills is None:
                self._change_pace(target)
        self._start_prefill()

    def _progress(self, pod: _Pod) -> None:
        """Steps up to now at the pace so far."""
        pod.steps += (self.now - pod.steps_at) / pod.step_seconds
        pod.steps_at = self.now

    def _change_pace(self, pod: _Pod) -> None:
        """The batch or the prefill beside it has changed: a new length of step, and a new time at which the first one ends."""
        self._progress(pod)
        pod.step_seconds = self._step + self._step_each * len(pod.batch)
        if self._prefills is None and pod.job >= 0:
            pod.step_seconds += self._chunk
        pod.version += 1
        if pod.batch:
            wait = max(0.0, pod.batch[0][0] - pod.steps) * pod.step_seconds
            self._push(self.now + wait, _STEPPED, pod, pod.version)

    def _stepped(self, pod: _Pod) -> None:
        self._progress(pod)
        batch = pod.batch
        while batch and batch[0][0] <= pod.steps + 1e-6:
            _, request = heapq.heappop(batch)
            self._itl[request] = (self.now - self._first_token[request]) / (self._output[request] - 1)
            self._finish(pod, request)
        if not batch:
            pod.active_total += self.now - pod.active_since
        self._change_pace(pod)
        if self._prefill_queue:
            self._start_prefill()

    def _finish(self, pod: _Pod, request: int) -> None:
        pod.places -= 1
        pod.kv_used -= self._kv[request]
        self._done[request] = 1
        self._in_flight -= 1
        if pod.draining:
            self._leave_if_empty(self._decoders, pod)

    # --- pods -------------------------------------------------------------------------------------------------

    def _create(self, pool: _PoolState, start_seconds: float) -> None:
        pod = _Pod(pool.created, self.now, self._marks, self._step)
        pool.created += 1
        pool.pods.append(pod)
        if start_seconds <= 0:
            pod.ready = True
            heapq.heappush(pool.idle, (pod.number, pod))
        else:
            self._push(self.now + start_seconds, _READY, pod, POOL_NAMES.index(pool.name))

    def _ready(self, pool: _PoolState, pod: _Pod) -> None:
        pod.ready = True
        pod.steps_at = self.now
        heapq.heappush(pool.idle, (pod.number, pod))
        if pool is self._encoders:
            self._start_encoding(pool)
        else:
            self._start_prefill()

    def _leave_if_empty(self, pool: _PoolState, pod: _Pod) -> None:
        if pod.empty:
            pool.pods.remove(pod)
            pool.replica_seconds += self.now - pod.created

    def _resize(self, pool: _PoolState, size: int) -> None:
        members = pool.members()
        for _ in range(size - len(members)):
            self._create(pool, pool.start_seconds)
        for pod in reversed(members[size:]):
            pod.draining = True
            self._leave_if_empty(pool, pod)

    def _tick(self) -> None:
        for pool in self.pools.values():
            for pod in pool.pods:
                busy = self.now - pod.busy_since if pod.job >= 0 else 0.0
                pod.marks.append(pod.busy_total + busy)
                active = self.now - pod.active_since if pod.batch else 0.0
                pod.active_marks.append(pod.active_total + active)
        for name, size in self._scaler.sizes(self.now, self).items():
            self._resize(self.pools[name], size)
        self._ttft_by_tick.append([])
        self._records.append(
            (
                self.now,
                [sum(1 for p in pool.pods if p.ready and not p.draining) for pool in self.pools.values()],
                [len(pool.pods) for pool in self.pools.values()],
            )
        )

    # --- what scalers may read ----------------------------------------------------------------------------------

    def size(self, name: PoolName) -> int:
        """`spec.replicas`: pods that were not told to leave."""
        return len(self.pools[name].members())

    def utilization(self, name: PoolName) -> tuple[float, int]:
        """Mean share of the last ten seconds in which the ready pods did anything at all, and how many pods are ready."""
        ready = [pod for pod in self.pools[name].pods if pod.ready and not pod.draining]
        if not ready:
            return 0.0, 0
        total = sum(min(1.0, self._share(pod.marks) + self._share(pod.active_marks)) for pod in ready)
        return total / len(ready), len(ready)

    def queue_length(self, name: PoolName) -> int:
        """Messages that wait for a pool or are worked on in it."""
        if name == "encoder":
            return len(self._encode_queue) + sum(pod.places for pod in self.pools[name].pods)
        if name == "prefill":
            return len(self._prefill_queue) + sum(pod.job >= 0 for pod in self.pools[name].pods)
        waiting = len(self._prefill_queue) if self._prefills is None else 0
        return waiting + sum(pod.places for pod in self._decoders.pods)

    def _share(self, marks: deque[float]) -> float:
        return (marks[-1] - marks[0]) / ((len(marks) - 1) * self._interval) if len(marks) > 1 else 0.0

    def samples(self, name: PoolName) -> PoolSamples:
        """What the pods and queues of a pool would report, in the autoscaler's own types."""
        pool, roles, now = self.pools[name], self.policy.pools[name].roles, self.now
        ready = sum(1 for pod in pool.pods if pod.ready and not pod.draining)
        share = 1 / ready if ready else 0.0
        front = "prefill" in roles
        pods = []
        for pod in pool.pods:
            state: PodState = "draining" if pod.draining else "ready" if pod.ready else "starting"
            load = None
            if pod.ready:
                load = self._load(pod, roles, 0.0 if pod.draining else share)
            pods.append(PodSample(f"{name}-{pod.number}", state, pod.created, now if load else None, load))
        held = 0 if ready else len(self._prefill_queue) * (name != "encoder")
        demand = Demand(now, held_requests=held)
        if name == "encoder":
            demand = Demand(now, self._media_work(self._encode_waiting))
        elif front and not ready:
            work = self._media_work(self._prefill_waiting_media)
            demand = Demand(now, work, float(self._prefill_waiting_tokens), held)
        latency = self._latency() if front and self.policy.pools[name].ttft_slo_seconds is not None else None
        return PoolSamples(len(pool.members()), tuple(pods), demand, latency)

    def _load(self, pod: _Pod, roles: tuple[str, ...], share: float) -> PodLoad:
        queued: dict[str, float] = {}
        tokens = 0.0
        encodes, prefills = "encode" in roles, "prefill" in roles
        busy = self._share(pod.marks)
        if prefills:
            tokens = self._prefill_waiting_tokens * share + (self._context[pod.job] if pod.job >= 0 else 0)
            if encodes:
                queued = {m: w * share for m, w in self._media_work(self._prefill_waiting_media).items()}
        elif encodes:
            queued = self._media_work(pod.media)
        decodes = "decode" in roles
        return PodLoad(
            encode_queued_work=queued,
            encode_work_per_second=self._encode_rates if encodes else {},
            encode_busy_fraction=busy if not prefills else 0.0,
            prefill_waiting_tokens=tokens,
            prefill_tokens_per_second=self.calibration.prefill.tokens_per_second if prefills else 0.0,
            prefill_busy_fraction=busy if prefills else None,
            decode_running=len(pod.batch),
            decode_waiting=pod.places - len(pod.batch),
            decode_max_sequences=self._max_sequences if decodes else 0,
            kv_blocks_total=self._kv_blocks if decodes else 0,
            kv_blocks_free=self._kv_blocks - pod.kv_used if decodes else 0,
            itl_seconds=pod.step_seconds if pod.batch else 0.0,
        )

    def _media_work(self, counts: list[int]) -> dict[str, float]:
        return {MODALITIES[n]: count * self._work[n] for n, count in enumerate(counts) if count}

    def _latency(self) -> Latency:
        seen = [ttft for tick in self._ttft_by_tick for ttft in tick]
        worst = sorted(seen)[min(len(seen) - 1, len(seen) * self.spec.slo.percentile // 100)] if seen else 0.0
        return Latency(self.now, TTFT_WINDOW_SECONDS, len(seen), worst)
