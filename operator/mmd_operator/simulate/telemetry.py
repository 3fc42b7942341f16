"""Everything that a scaler may know about the simulated pipeline: reports of pods and of the gateway, resource metrics, sizes and queues.

It is what a cluster would show. Reads pools, queues and requests, and changes nothing in them but the marks of busy time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping

from mmd_api.contract.load import EncodeQueueStatus, FirstTokens, GatewayStatus, PodLoad, WorkerStatus
from mmd_api.contract.pools import MODALITIES, Modality, PoolName, Role
from mmd_api.pipeline import encodes_small_media
from mmd_api.spec.deployment import MultimodalDeploymentSpec
from mmd_api.spec.pools import Pool
from mmd_operator.autoscaling import DeploymentPolicy, PodFacts, PoolFacts
from mmd_operator.resources.pods import threads
from mmd_operator.simulate.calibration import Calibration
from mmd_operator.simulate.pools import SimulatedPod, SimulatedPool, missing_role
from mmd_operator.simulate.requests import Queues, Requests

BUSY_WINDOW_SECONDS = 10.0
TTFT_WINDOW_SECONDS = 30.0
REVISION = "simulated"
GATEWAY = "gateway-0"


class Telemetry:
    """The data that scalers read at a tick."""

    def __init__(
        self,
        spec: MultimodalDeploymentSpec,
        calibration: Calibration,
        requests: Requests,
        queues: Queues,
        pools: Mapping[PoolName, SimulatedPool],
        interval_seconds: float,
        *,
        placed: bool = False,
    ) -> None:
        """`placed`: requests wait at the pods where they were placed, instead of in one queue for all."""
        self.spec = spec
        self._placed = placed
        self.policy = DeploymentPolicy.of(spec)
        self._encodes_small_media = encodes_small_media(spec, "prefill")
        self.marks = max(2, round(BUSY_WINDOW_SECONDS / interval_seconds) + 1)
        self._calibration, self._interval = calibration, interval_seconds
        self._requests, self._queues, self._pools = requests, queues, pools
        self._encode_rates = dict(calibration.encoder.work_per_second)
        self._ttft_by_tick: deque[list[float]] = deque(
            [[]], maxlen=max(1, round(TTFT_WINDOW_SECONDS / interval_seconds))
        )

    def record_first_token(self, ttft_seconds: float) -> None:
        """Record that a request got its first token."""
        self._ttft_by_tick[-1].append(ttft_seconds)

    def mark(self, now: float) -> None:
        """Record how busy every pod has been up to this tick."""
        for pool in self._pools.values():
            for pod in pool.pods:
                busy = now - pod.busy_since if pod.job >= 0 else 0.0
                pod.marks.append(pod.busy_total + busy)
                if pool.name != "encoder":
                    encoding = busy * self._requests.encode_share(pod.job) if pod.job >= 0 else 0.0
                    pod.encode_marks.append(pod.encode_total + encoding)
                active = now - pod.active_since if pod.batch else 0.0
                pod.active_marks.append(pod.active_total + active)
                pod.host_marks.append(pod.host_total)

    def end_tick(self) -> None:
        """End a tick: first tokens from now on belong to the next one."""
        self._ttft_by_tick.append([])

    def size(self, name: PoolName) -> int:
        """`spec.replicas`: the number of pods that were not asked to leave."""
        return len(self._pools[name].members())

    def ready(self, name: PoolName) -> int:
        """Number of pods that take work."""
        return len(self._pools[name].ready_pods())

    def cpu_utilization(self, name: PoolName) -> float | None:
        """The resource metric `cpu`: cores that ready pods used over the last ten seconds, over the cores that they request.

        A replica without GPUs computes on all its threads; one with GPUs keeps `hostCores` busy while its GPU works. Each medium that is
        read or decoded takes a core. None without ready pods, or where the pool requests no CPU: then an HPA has no metric.
        """
        part: Pool = getattr(self.spec, name)
        ready = self._pools[name].ready_pods()
        if not ready or part.resources.cpu is None:
            return None
        requested = _cores(part.resources.cpu)
        cores = self._calibration.device.host_cores if part.gpus else float(threads(part.resources))
        used = sum(self._working(pod) * cores + self._share(pod.host_marks) for pod in ready)
        return used / len(ready) / requested

    def gpu_utilization(self, name: PoolName) -> float | None:
        """The metric `DCGM_FI_DEV_GPU_UTIL`: the share of the last ten seconds in which a kernel ran, mean over ready pods.

        It shows that a GPU works, not how much: one sequence keeps kernels running as a full batch does. None without ready pods or GPUs.
        """
        part: Pool = getattr(self.spec, name)
        ready = self._pools[name].ready_pods()
        if not ready or not part.gpus:
            return None
        return sum(map(self._working, ready)) / len(ready) * self._calibration.device.kernel_share

    def queue_length(self, name: PoolName) -> int:
        """Number of messages that wait for a pool or are in progress in it."""
        pool, queues = self._pools[name], self._queues
        if name == "encoder":
            return len(queues.encode) + sum(pod.places for pod in pool.pods)
        before_prefill = len(queues.held) + len(queues.prefill)
        before_prefill += sum(len(pod.waiting) for any_pool in self._pools.values() for pod in any_pool.pods)
        if name == "prefill":
            return before_prefill + sum(pod.job >= 0 for pod in pool.pods)
        waiting = before_prefill if "prefill" not in self._pools else 0
        return waiting + sum(pod.places for pod in pool.pods)

    def facts(self, name: PoolName) -> PoolFacts:
        """The pool as its cluster sees it. Pods that were asked to drain are no longer counted in its size."""
        pods = tuple(
            PodFacts(
                pod.name,
                ordinal=pod.number,
                created_at=pod.created,
                ready=pod.ready and not pod.draining,
                drain_requested=pod.draining,
            )
            for pod in self._pools[name].pods
        )
        return PoolFacts(self.size(name), pods)

    def worker_answers(self, name: PoolName) -> Iterator[tuple[str, bytes]]:
        """Name and answer at `/state` of each pod that has started."""
        roles, ready = self.policy.pools[name].roles, self.ready(name)
        for pod in self._pools[name].pods:
            if pod.ready:
                share = 0.0 if pod.draining else 1 / ready
                status = WorkerStatus(
                    pod=pod.name,
                    revision=REVISION,
                    state="draining" if pod.draining else "ready",
                    load=self._load(pod, roles, share),
                )
                yield status.pod, status.model_dump_json().encode()

    def ready_loads(self, name: PoolName) -> Iterator[tuple[str, tuple[Role, ...], PodLoad]]:
        """Name, roles and load of each pod that takes work, as in its heartbeats."""
        roles, ready = self.policy.pools[name].roles, self._pools[name].ready_pods()
        for pod in ready:
            yield pod.name, roles, self._load(pod, roles, 1 / len(ready))

    def waiting_encode_work(self) -> dict[Modality, float]:
        """Work in the queue of the encoder pool."""
        waiting = enumerate(self._queues.encode_waiting)
        return {MODALITIES[n]: count * self._requests.work[n] for n, count in waiting}

    def gateway_answer(self) -> bytes:
        """The gateway's answer at `/demand`."""
        missing, queues = missing_role(self._pools), self._queues
        queue = None
        if "encoder" in self._pools:
            queue = EncodeQueueStatus(age_seconds=0.0, waiting_work=self.waiting_encode_work())
        ttfts = (ttft for tick in self._ttft_by_tick for ttft in tick)
        status = GatewayStatus(
            pod=GATEWAY,
            revision=REVISION,
            held={missing: len(queues.held)} if missing is not None else {},
            queue=queue,
            ttft=FirstTokens.of(ttfts, self.spec.slo.percentile, TTFT_WINDOW_SECONDS),
        )
        return status.model_dump_json().encode()

    def _share(self, marks: deque[float]) -> float:
        return (marks[-1] - marks[0]) / ((len(marks) - 1) * self._interval) if len(marks) > 1 else 0.0

    def _working(self, pod: SimulatedPod) -> float:
        """Share of the last ten seconds in which the pod's tower, prefill or decode steps ran."""
        return min(1.0, self._share(pod.marks) + self._share(pod.active_marks))

    def _load(self, pod: SimulatedPod, roles: tuple[Role, ...], share: float) -> PodLoad:
        """A pod's load. A ready pod has its `share` of the work that waits for its pool."""
        encodes, prefills, decodes = ("encode" in roles), ("prefill" in roles), ("decode" in roles)
        encodes = encodes or (prefills and self._encodes_small_media)
        queues, calibration, decode = self._queues, self._calibration, self.spec.decode
        queued: dict[Modality, int] = {}
        blocked = waiting = requests = 0
        busy = self._share(pod.marks)
        if prefills and self._placed:
            blocked = pod.blocked_tokens
            current = self._requests.context[pod.job] if pod.job >= 0 else 0
            waiting = pod.waiting_tokens + current + blocked
            requests = pod.assigned + (pod.job >= 0)
            if encodes:
                queued = self._media_work(pod.waiting_media, 1.0)
                busy = self._share(pod.encode_marks)
        elif prefills:
            blocked = round(queues.blocked_tokens * share)
            current = self._requests.context[pod.job] if pod.job >= 0 else 0
            waiting = round(queues.prefill_waiting_tokens * share) + current + blocked
            requests = round((queues.blocked_requests + len(queues.prefill)) * share) + (pod.job >= 0)
            if encodes:
                queued = self._media_work(queues.prefill_waiting_media, share)
                busy = self._share(pod.encode_marks)
        elif encodes:
            queued = self._media_work(pod.media, 1.0)
        kv_blocks = calibration.decode.kv_blocks
        return PodLoad(
            encode_queued_work=queued,
            encode_running=int(pod.job >= 0 and encodes),
            encode_work_per_second=self._encode_rates if encodes else {},
            encode_busy_fraction=busy if encodes else 0.0,
            prefill_waiting_tokens=waiting,
            prefill_blocked_tokens=blocked,
            prefill_waiting_requests=requests,
            prefill_tokens_per_second=calibration.prefill.tokens_per_second if prefills else 0.0,
            decode_running=len(pod.batch),
            decode_waiting=self._decode_waiting(pod, share) if prefills and decodes else 0,
            decode_max_sequences=decode.max_sequences if decodes else 0,
            kv_blocks_total=kv_blocks if decodes else 0,
            kv_blocks_free=kv_blocks - pod.kv_used if decodes else 0,
            kv_block_tokens=decode.kv_block_tokens,
            itl_seconds=pod.step_seconds if pod.batch else 0.0,
        )

    def _decode_waiting(self, pod: SimulatedPod, share: float) -> int:
        return len(pod.waiting) if self._placed else round(len(self._queues.prefill) * share)

    def _media_work(self, counts: list[int], share: float) -> dict[Modality, int]:
        work = self._requests.work
        return {MODALITIES[n]: round(count * work[n] * share) for n, count in enumerate(counts) if count}


def _cores(cpu: str) -> float:
    """A CPU quantity of the spec in cores."""
    return float(cpu[:-1]) / 1000 if cpu.endswith("m") else float(cpu)
