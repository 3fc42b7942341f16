"""The pipeline as queues and servers under a clock that jumps from event to event, with a scaler asked at every tick.

Encoders take several media at once from one queue (as from JetStream): media are read and decoded side by side, and the tower runs them one
after the other. A prefill replica takes the next request once a decode replica has room for it (reserve, then produce). A decode replica
steps all its sequences together. Progress is counted in steps, whose length depends on the number of sequences, so a sequence costs two
events however long it is. The work of a pool that the spec leaves out is done by the next pool downstream, which then shares its time.

If text has a share, texts and prompts with media take turns at prefill, a whole prompt each; otherwise the first come is the first
served. With `placing`, each request waits at the prefill replica where it was placed, for the decode replica that was chosen with it;
otherwise all requests wait in one queue. `requests` has the trace and its queues, `pools` the pods, `telemetry` what a scaler may know.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from typing import Protocol

import numpy as np

from mmd_api.contract.pools import POOL_NAMES, PoolName
from mmd_api.contract.steps import StepBound
from mmd_api.contract.text_share import TextShare
from mmd_api.spec.deployment import MultimodalDeploymentSpec
from mmd_api.spec.pools import Pool, PrefillSpec
from mmd_operator.simulate.calibration import Calibration
from mmd_operator.simulate.placing import Placing
from mmd_operator.simulate.pools import SimulatedPod, SimulatedPool, missing_role
from mmd_operator.simulate.requests import PrefillQueue, Queues, Requests
from mmd_operator.simulate.results import RunResult
from mmd_operator.simulate.telemetry import Telemetry
from mmd_operator.simulate.traces import Trace

_DECODED, _ENCODED, _PREFILLED, _STEPPED, _READY, _TICK = range(6)


class SizingPolicy(Protocol):
    """Decides how large each pool should be. Called at every tick, in order of time."""

    def sizes(self, now: float, telemetry: Telemetry) -> Mapping[PoolName, int]:
        """Return the wanted sizes; a pool that is not named keeps its size."""


class Pipeline:
    """One run of a trace; `run` may be called once."""

    def __init__(
        self,
        spec: MultimodalDeploymentSpec,
        trace: Trace,
        calibration: Calibration,
        scaler: SizingPolicy,
        interval_seconds: float = 2.0,
        start_sizes: Mapping[PoolName, int] | None = None,
        placing: Placing | None = None,
    ) -> None:
        self._spec, self._calibration, self._scaler = spec, calibration, scaler
        self._interval = interval_seconds
        self._heap: list[tuple[float, int, int, SimulatedPod | None, int]] = []
        self._sequence = 0
        self._now = 0.0
        self._requests = Requests(spec, trace, calibration)
        self._queues = Queues(self._prefill_queue())
        self._target: list[SimulatedPod | None] = [None] * len(trace)
        self._placing = placing
        self._pods: dict[str, SimulatedPod] = {}
        # pod where a request is placed, until its prefill begins
        self._placed_on: list[SimulatedPod | None] = [None] * len(trace)
        self._decode_order: list[tuple[str, ...]] = [()] * len(trace)
        self._stalled: dict[str, SimulatedPod] = {}  # pods whose next request has no place to decode
        self._media_at_once = calibration.encoder.media_at_once
        self._max_sequences = spec.decode.max_sequences
        self._kv_blocks = calibration.decode.kv_blocks
        self._step_seconds = calibration.decode.step_seconds
        self._sequence_seconds = calibration.decode.step_seconds_per_sequence
        chunk_tokens = spec.prefill.chunk_tokens if spec.prefill else PrefillSpec().chunk_tokens
        self._token_seconds = 1.0 / calibration.prefill.tokens_per_second
        self._chunk_seconds = chunk_tokens * self._token_seconds
        native = spec.engine.type == "Native"
        self._bound = StepBound.of_chunks(spec.engine.step_seconds, chunk_tokens) if native else None
        self._pools: dict[PoolName, SimulatedPool] = {}
        self._telemetry = Telemetry(
            spec,
            calibration,
            self._requests,
            self._queues,
            self._pools,
            interval_seconds,
            placed=placing is not None,
        )
        start_seconds: dict[PoolName, float] = {
            "encoder": calibration.encoder.start_seconds,
            "prefill": calibration.prefill.start_seconds,
            "decode": calibration.decode.start_seconds,
        }
        for name in POOL_NAMES:
            part: Pool | None = getattr(spec, name)
            if part is None:
                continue
            pool = self._pools[name] = SimulatedPool(name, start_seconds[name], spec.replica_gpus(name))
            count = (start_sizes or {}).get(name, self._telemetry.policy.pools[name].min_replicas)
            for _ in range(count):
                self._create(pool, start_seconds=0.0)
        self._encoders = self._pools.get("encoder")
        self._prefills = self._pools.get("prefill")
        self._decoders = self._pools["decode"]
        self._in_flight = 0
        self._lost: dict[str, int] = {}
        self._records: list[tuple[float, list[int], list[int]]] = []

    def _prefill_queue(self) -> PrefillQueue:
        percent = self._spec.engine.text_share_percent
        return PrefillQueue(self._requests, None if percent is None else TextShare(percent))

    # --- the clock --------------------------------------------------------------------------------------------

    def run(self) -> RunResult:
        """Run every request of the trace to its end or loss."""
        arrivals, heap, count = self._requests.arrivals, self._heap, len(self._requests)
        limit = self._spec.gateway.max_concurrent_requests * self._spec.gateway.replicas
        deadline = (arrivals[-1] if arrivals else 0.0) + self._spec.gateway.request_timeout_seconds
        self._push(0.0, _TICK, None, 0)
        number = 0
        while heap or number < count:
            if number < count and (not heap or arrivals[number] < heap[0][0]):
                self._now = arrivals[number]
                if self._in_flight >= limit:
                    self._lose(number, "refused", counted=False)
                else:
                    self._in_flight += 1
                    self._arrive(number)
                number += 1
                continue
            now, _, kind, pod, argument = heapq.heappop(heap)
            if kind == _TICK:
                if (number == count and self._in_flight == 0) or now > deadline:
                    break
                self._now = now
                self._tick()
                self._push(now + self._interval, _TICK, None, 0)
                continue
            assert pod is not None
            if kind == _STEPPED:
                if pod.version == argument:
                    self._now = now
                    self._stepped(pod)
                continue
            self._now = now
            if kind == _DECODED:
                self._decoded(pod, argument)
            elif kind == _ENCODED:
                self._encoded(pod)
            elif kind == _PREFILLED:
                self._prefilled(pod)
            elif not pod.draining:
                self._ready(self._pools[POOL_NAMES[argument]], pod)
        return self._result()

    def _push(self, at: float, kind: int, pod: SimulatedPod | None, argument: int) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (at, self._sequence, kind, pod, argument))

    def _result(self) -> RunResult:
        requests, pools = self._requests, self._pools
        if unanswered := len(requests) - sum(requests.done):
            self._lost["unanswered"] = unanswered
        for pool in pools.values():
            pool.replica_seconds += sum(self._now - pod.created for pod in pool.pods)
        names = list(pools)
        ready = np.array([r for _, r, _ in self._records], dtype=np.int64).reshape(-1, len(names))
        sizes = np.array([s for _, _, s in self._records], dtype=np.int64).reshape(-1, len(names))
        return RunResult(
            ttft_seconds=np.array(requests.ttft),
            itl_seconds=np.array(requests.itl),
            lost=dict(self._lost),
            end_seconds=self._now,
            ticks=np.array([at for at, _, _ in self._records]),
            replicas={name: sizes[:, n] for n, name in enumerate(names)},
            ready={name: ready[:, n] for n, name in enumerate(names)},
            replica_seconds={name: pool.replica_seconds for name, pool in pools.items()},
            gpu_seconds=sum(pool.replica_seconds * pool.gpus for pool in pools.values()),
            waited_seconds={name: pool.waited_seconds for name, pool in pools.items()},
        )

    # --- requests ---------------------------------------------------------------------------------------------

    def _arrive(self, request: int) -> None:
        requests = self._requests
        requests.factor[request] *= 1 + self._calibration.contention * (self._in_flight - 1)
        if requests.kv[request] > self._kv_blocks:
            self._lose(request, "too large")
        elif missing_role(self._pools) is not None:
            self._queues.held.append(request)
        else:
            self._place(request)

    def _release_held(self) -> None:
        while self._queues.held and missing_role(self._pools) is None:
            request = self._queues.held.popleft()
            if not self._expired(request):
                self._place(request)

    def _place(self, request: int) -> None:
        """Place a request on a prefill replica, and send its media to the encoders."""
        requests = self._requests
        if self._placing is not None:
            placement = self._placing.place(self._now, request, self._telemetry)
            if placement is None:
                self._lose(request, "refused")
                return
            self._placed_on[request] = pod = self._pods[placement.prefill]
            self._decode_order[request] = placement.decode
            requests.media_cached[request] = not placement.needs_media
            requests.encoded_here[request] |= placement.encode_here
            pod.assigned += 1
        if self._encoders is not None and self._media_sent(request):
            requests.queued_at[request] = self._now
            self._queues.push_media(requests, request)
            if (placed_on := self._placed_on[request]) is not None:
                placed_on.blocked_tokens += requests.context[request]
            self._start_encoding(self._encoders)
        else:
            self._queue_prefill(request)

    def _media_sent(self, request: int) -> bool:
        """Whether encoder pods encode its media."""
        requests = self._requests
        needs_no_encoder = requests.encoded_here[request] or requests.media_cached[request]
        return any(requests.media[request]) and not needs_no_encoder

    def _lose(self, request: int, reason: str, *, counted: bool = True) -> None:
        self._requests.done[request] = 1
        self._lost[reason] = self._lost.get(reason, 0) + 1
        self._unblock(request)
        self._unassign(request)
        if counted:
            self._in_flight -= 1

    def _unblock(self, request: int) -> None:
        """Unblock a request: none of its media is being encoded any more."""
        if self._requests.blocked[request]:
            self._queues.unblock(self._requests, request)
            if (pod := self._placed_on[request]) is not None:
                pod.blocked_tokens -= self._requests.context[request]

    def _unassign(self, request: int) -> None:
        """Note that a request no longer waits where it was placed."""
        pod, self._placed_on[request] = self._placed_on[request], None
        if pod is not None:
            pod.assigned -= 1
            if pod.draining:
                (self._prefills or self._decoders).remove_if_empty(pod, self._now)

    def _expired(self, request: int) -> bool:
        """Whether a request is over. A request past its deadline is lost now."""
        if self._requests.done[request]:
            return True
        if self._now - self._requests.arrivals[request] > self._spec.gateway.request_timeout_seconds:
            self._lose(request, "timed out")
            return True
        return False

    # --- encoding ---------------------------------------------------------------------------------------------

    def _start_encoding(self, pool: SimulatedPool) -> None:
        requests, queues = self._requests, self._queues
        while queues.encode and (pod := pool.least_busy(self._media_at_once)) is not None:
            request, modality = queues.pop_medium()
            if self._expired(request):
                continue
            pool.waited_seconds += self._now - requests.queued_at[request]
            pod.places += 1
            pod.media[modality] += 1
            medium = request * 3 + modality
            seconds = requests.overhead_seconds[modality] * requests.factor[request]
            self._push(self._now + seconds, _DECODED, pod, medium)

    def _decoded(self, pod: SimulatedPod, medium: int) -> None:
        """Queue a medium, which is read and decoded, for the tower."""
        request, modality = divmod(medium, 3)
        pod.host_total += self._requests.overhead_seconds[modality] * self._requests.factor[request]
        pod.tower.append(medium)
        self._start_tower(pod)

    def _start_tower(self, pod: SimulatedPod) -> None:
        if pod.job < 0 and pod.tower:
            pod.job = pod.tower.popleft()
            pod.busy_since = self._now
            request, modality = divmod(pod.job, 3)
            seconds = self._requests.tower_seconds[modality] * self._requests.factor[request]
            self._push(self._now + seconds, _ENCODED, pod, 0)

    def _encoded(self, pod: SimulatedPod) -> None:
        assert self._encoders is not None
        request, modality = divmod(pod.job, 3)
        pod.media[modality] -= 1
        pod.end_job(self._now, encode_share=1.0)
        pod.places -= 1
        self._start_tower(pod)
        if pod.draining:
            self._encoders.remove_if_empty(pod, self._now)
        requests = self._requests
        requests.media_left[request] -= 1
        if requests.media_left[request] == 0 and not requests.done[request]:
            self._unblock(request)
            self._queue_prefill(request)
        self._start_encoding(self._encoders)

    # --- prefill ----------------------------------------------------------------------------------------------

    def _queue_prefill(self, request: int) -> None:
        self._requests.queued_at[request] = self._now
        if (pod := self._placed_on[request]) is not None:
            pod.waiting.append(request)
            self._count_waiting(pod, request, 1)
            self._start_placed(pod)
            return
        self._queues.push_prefill(self._requests, request, with_media=self._encoders is None)
        self._start_prefill()

    def _count_waiting(self, pod: SimulatedPod, request: int, sign: int) -> None:
        pod.waiting_tokens += sign * self._requests.context[request]
        if self._requests.encoded_here[request] and not self._requests.media_cached[request]:
            for modality, count in enumerate(self._requests.media[request]):
                pod.waiting_media[modality] += sign * count

    def _start_placed(self, pod: SimulatedPod) -> None:
        """Start the next request that was placed here, if the replica is free and some replica has room to decode it."""
        while pod.waiting and pod.job < 0:
            request = pod.waiting.first
            target = None if self._expired(request) else self._room_for(request, pod)
            if target is None and not self._requests.done[request]:
                self._stalled[pod.name] = pod
                return
            pod.waiting.pop()
            self._count_waiting(pod, request, -1)
            if target is not None:
                self._begin_prefill(pod, target, request)
                self._unassign(request)

    def _room_for(self, request: int, pod: SimulatedPod) -> SimulatedPod | None:
        """Find where a placed request can decode: here, or on the first replica with room in the order of its placement, then on any."""
        blocks = self._requests.kv[request]
        if self._prefills is None:
            return pod if self._decoders.has_room(pod, blocks, self._kv_blocks, self._max_sequences) else None
        for name in self._decode_order[request]:
            target = self._pods[name]
            if self._decoders.has_room(target, blocks, self._kv_blocks, self._max_sequences):
                return target
        return self._decoders.with_room(blocks, self._kv_blocks, self._max_sequences, free=False)

    def _start_prefill(self) -> None:
        """Start prefill, first come, first served, or text and media in turns. A request without room to decode holds up those behind it."""
        if self._placing is not None:
            stalled, self._stalled = self._stalled, {}
            for waiting in stalled.values():
                self._start_placed(waiting)
            return
        requests, queues, prefills = self._requests, self._queues, self._prefills
        encodes = self._encoders is None
        while queues.prefill:
            if prefills is not None and not prefills.idle:
                return
            request = queues.prefill.first
            if self._expired(request):
                queues.pop_prefill(requests, with_media=encodes)
                continue
            target = self._decoders.with_room(
                requests.kv[request], self._kv_blocks, self._max_sequences, free=prefills is None
            )
            if target is None:
                return
            pod = target if prefills is None else prefills.take_idle()
            if pod is None:
                return
            queues.pop_prefill(requests, with_media=encodes)
            self._begin_prefill(pod, target, request)

    def _begin_prefill(self, pod: SimulatedPod, target: SimulatedPod, request: int) -> None:
        requests, prefills = self._requests, self._prefills
        pool = prefills or self._decoders
        pool.waited_seconds += self._now - requests.queued_at[request]
        target.places += 1
        target.kv_used += requests.kv[request]
        self._target[request] = target
        pod.job, pod.busy_since = request, self._now
        seconds = requests.prefill_seconds[request] - self._cached_seconds(pod, request)
        seconds = (seconds + requests.own_encode_seconds(request)) * requests.factor[request]
        if prefills is None and pod.batch:
            seconds += math.ceil(seconds / self._piece_seconds(pod)) * self._decode_seconds(pod)
        if prefills is None:
            self._change_pace(pod)
        self._push(self._now + seconds, _PREFILLED, pod, 0)

    def _piece_seconds(self, pod: SimulatedPod) -> float:
        """Time that the prefill of a pod's job adds to one step of its batch."""
        if self._bound is None or not self._requests.prefills_media(pod.job):
            return self._chunk_seconds
        return self._bound.tokens(self._decode_seconds(pod), self._token_seconds) * self._token_seconds

    def _decode_seconds(self, pod: SimulatedPod) -> float:
        """Time of a step of a pod's batch alone."""
        return self._step_seconds + self._sequence_seconds * len(pod.batch)

    def _cached_seconds(self, pod: SimulatedPod, request: int) -> float:
        """Prefill time that caches save. The last token is always computed."""
        if self._placing is None:
            return 0.0
        cached = min(self._placing.begin(pod.name, request), self._requests.context[request] - 1)
        return cached / self._calibration.prefill.tokens_per_second

    def _prefilled(self, pod: SimulatedPod) -> None:
        requests, request, prefills = self._requests, pod.job, self._prefills
        pod.end_job(self._now, requests.encode_share(request))
        if prefills is not None:
            if pod.draining:
                prefills.remove_if_empty(pod, self._now)
            elif self._placing is None:
                prefills.release(pod)
        transfer = self._calibration.transfer
        delay = self._calibration.gateway_seconds
        if self._media_sent(request):
            delay += transfer.seconds_per_medium
        requests.first_token[request] = self._now
        delay *= requests.factor[request]
        requests.ttft[request] = ttft = self._now - requests.arrivals[request] + delay
        self._telemetry.record_first_token(ttft)
        if self._placing is not None:
            self._placing.computed(self._now, pod.name, request)
        target = self._target[request]
        assert target is not None
        if requests.output[request] > 1:
            target.progress(self._now)
            transfer_seconds = (
                transfer.seconds_per_token * requests.context[request] if prefills is not None else 0.0
            )
            if not target.batch:
                target.active_since = self._now
            end_step = target.steps + requests.output[request] - 1 + transfer_seconds / target.step_seconds
            heapq.heappush(target.batch, (end_step, request))
            self._change_pace(target)
        else:
            self._finish(target, request)
            if prefills is None:
                self._change_pace(target)
        if self._placing is not None:
            self._start_placed(pod)
        self._start_prefill()

    # --- decoding ---------------------------------------------------------------------------------------------

    def _change_pace(self, pod: SimulatedPod) -> None:
        """Set a new step length, and a new time at which the first sequence ends, after the batch or the concurrent prefill has changed."""
        pod.progress(self._now)
        pod.step_seconds = self._decode_seconds(pod)
        if self._prefills is None and pod.job >= 0:
            pod.step_seconds += self._piece_seconds(pod)
        pod.version += 1
        if pod.batch:
            wait = max(0.0, pod.batch[0][0] - pod.steps) * pod.step_seconds
            self._push(self._now + wait, _STEPPED, pod, pod.version)

    def _stepped(self, pod: SimulatedPod) -> None:
        pod.progress(self._now)
        requests, batch = self._requests, pod.batch
        while batch and batch[0][0] <= pod.steps + 1e-6:
            _, request = heapq.heappop(batch)
            requests.itl[request] = (self._now - requests.first_token[request]) / (
                requests.output[request] - 1
            )
            self._finish(pod, request)
        if not batch:
            pod.active_total += self._now - pod.active_since
        self._change_pace(pod)
        if self._queues.prefill or self._stalled:
            self._start_prefill()

    def _finish(self, pod: SimulatedPod, request: int) -> None:
        pod.places -= 1
        pod.kv_used -= self._requests.kv[request]
        self._requests.done[request] = 1
        self._in_flight -= 1
        if pod.draining:
            self._decoders.remove_if_empty(pod, self._now)

    # --- pods -------------------------------------------------------------------------------------------------

    def _create(self, pool: SimulatedPool, start_seconds: float) -> None:
        pod = pool.add(self._now, self._telemetry.marks, self._step_seconds, self._prefill_queue())
        self._pods[pod.name] = pod
        if start_seconds <= 0:
            pod.ready = True
            pool.release(pod)
            self._pods_changed()
        else:
            self._push(self._now + start_seconds, _READY, pod, POOL_NAMES.index(pool.name))

    def _ready(self, pool: SimulatedPool, pod: SimulatedPod) -> None:
        pod.ready = True
        pod.steps_at = self._now
        pool.release(pod)
        self._pods_changed()
        self._release_held()
        if pool is self._encoders:
            self._start_encoding(pool)
        else:
            self._start_prefill()

    def _resize(self, pool: SimulatedPool, size: int) -> None:
        members = pool.members()
        for _ in range(size - len(members)):
            self._create(pool, pool.start_seconds)
        for pod in reversed(members[size:]):
            pod.draining = True
            pool.remove_if_empty(pod, self._now)
        if len(members) > size:
            self._pods_changed()

    def _pods_changed(self) -> None:
        if self._placing is not None:
            self._placing.pods_changed()

    def _tick(self) -> None:
        self._telemetry.mark(self._now)
        for name, size in self._scaler.sizes(self._now, self._telemetry).items():
            self._resize(self._pools[name], size)
        self._telemetry.end_tick()
        self._records.append(
            (
                self._now,
                [len(pool.ready_pods()) for pool in self._pools.values()],
                [len(pool.pods) for pool in self._pools.values()],
            )
        )
