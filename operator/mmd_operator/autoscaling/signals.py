"""From the samples of a pool to the sizes they ask for. Every size is absolute: computed from work, never from the present size.

Summing over pods (busy time, KV blocks, sequences, work ÷ calibrated throughput) gives the same answer however many pods
share the load, so pods that still load cannot multiply it. Latencies cannot be summed: they ask for small steps from the
pods that were measured, and only when those steps can help.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from mmd_operator.autoscaling.history import History
from mmd_operator.autoscaling.policy import PoolPolicy
from mmd_operator.autoscaling.types import Demand, Metric, PodLoad, PodSample, PoolSamples, Signal

TOKENS = "tokens"
"""The kind of work that prefill has, beside the modalities of encode work."""
LATENCY_STEP = 0.5
"""A missed latency asks for at most this share more of the pods that were measured, however far it was missed."""
LATENCY_COMFORT = 0.8
"""Above this share of the SLO a pool is not made smaller."""
QUEUE_SHARE_OF_TTFT = 0.25
"""More prefill pods help only where at least this share of the promised TTFT is spent waiting for them."""
SMALLEST_SLOW_BATCH = 4
"""A decode step with fewer sequences is slow by itself: more pods would not make it faster."""
ITL_SETTLE_SECONDS = 10.0
SLOWEST_BELIEVABLE = 1e-3
"""A calibrated throughput below this many units a second has not been measured yet."""
MOST_REPLICAS = 100_000.0
LONGEST_BACKLOG_SECONDS = 1e9
SATURATED_BACKLOG = 3.0
"""A backlog at this multiple of its target counts as a pool used up entirely."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What the samples say. `missing` names what is needed and absent, late or impossible."""

    signals: tuple[Signal, ...]
    missing: tuple[str, ...]
    ready: int
    stuck: int
    unschedulable: int
    history: History

    @property
    def idle(self) -> bool:
        """Certainly no work: nothing missing and nothing asked for."""
        return not self.missing and not self.signals


def read(now: float, policy: PoolPolicy, samples: PoolSamples, current: int, history: History) -> Reading:
    """The signals of a pool's roles, and the history with this tick and the newest throughput in it."""
    ready = sum(p.state == "ready" for p in samples.pods)
    history = history.begin_tick(now, ready)
    loads, missing = _usable_loads(now, policy, samples.pods)
    demand, problem = _usable_demand(now, policy, samples.demand)
    if problem:
        missing.append(problem)
    history = replace(history, throughput={**history.throughput, **_throughput(loads)})
    signals: list[Signal | None] = []
    work = _work(policy, loads, demand)
    if work:
        unmeasured = sorted(kind for kind in work if kind not in history.throughput)
        if unmeasured:
            missing.append(f"the throughput of {', '.join(unmeasured)}")
        signals.append(_backlog(policy, work, history.throughput, ready))
    if "encode" in policy.roles or "prefill" in policy.roles:
        signals.append(_busy(policy, loads))
    if "prefill" in policy.roles and policy.ttft_slo_seconds is not None:
        latency = samples.latency
        if latency is None or not abs(now - latency.received_at) <= policy.stale_after_seconds:
            missing.append("the time to first token")
        elif latency.requests > 0:
            settled = now - history.ready_since >= latency.window_seconds
            signals.append(
                _ttft(
                    policy, latency.ttft_seconds, _seconds(work, history.throughput), settled, current, ready
                )
            )
    if "decode" in policy.roles:
        settled = now - history.ready_since >= ITL_SETTLE_SECONDS
        signals += [
            _kv(policy, loads),
            _sequences(policy, loads),
            _itl(policy, loads, settled, current, ready),
        ]
    if demand.held_requests and policy.roles != ("encode",):
        signals.append(Signal("HeldRequests", demand.held_requests, 0.0, need=1.0, full=0.0))
    return Reading(
        signals=tuple(s for s in signals if s is not None),
        missing=tuple(missing),
        ready=ready,
        stuck=sum(_is_stuck(now, policy, pod) for pod in samples.pods),
        unschedulable=sum(p.state == "unschedulable" for p in samples.pods),
        history=history,
    )


def _is_stuck(now: float, policy: PoolPolicy, pod: PodSample) -> bool:
    """A pod that should long have been ready is no capacity in flight any more."""
    return pod.state in ("starting", "loading") and now - pod.created_at > policy.start_deadline_seconds


def _usable_loads(
    now: float, policy: PoolPolicy, pods: Iterable[PodSample]
) -> tuple[list[PodLoad], list[str]]:
    """Loads of pods that hold work, and what is wrong with those of ready pods that should have sent one."""
    loads, missing = [], []
    for pod in pods:
        if pod.state not in ("ready", "draining"):
            continue
        if pod.load is None or pod.received_at is None:
            problem = f"any load of pod {pod.pod}"
        elif not abs(now - pod.received_at) <= policy.stale_after_seconds:
            problem = f"the load of pod {pod.pod} since {now - pod.received_at:.1f} s"
        elif fault := pod.load.fault():
            problem = f"a believable load of pod {pod.pod} ({fault})"
        else:
            loads.append(pod.load)
            continue
        if pod.state == "ready":
            missing.append(problem)
    return loads, missing


def _usable_demand(now: float, policy: PoolPolicy, demand: Demand | None) -> tuple[Demand, str | None]:
    if demand is None:
        return Demand(now), "the queue before the pool"
    if not abs(now - demand.received_at) <= policy.stale_after_seconds:
        return Demand(now), f"the queue before the pool since {now - demand.received_at:.1f} s"
    if fault := demand.fault():
        return Demand(now), f"a believable queue before the pool ({fault})"
    return demand, None


def _throughput(loads: list[PodLoad]) -> dict[str, float]:
    """Calibrated throughput of one replica by kind of work: the mean of the pods that have measured it."""
    measured: dict[str, list[float]] = {}
    for load in loads:
        for kind, rate in (*load.encode_work_per_second.items(), (TOKENS, load.prefill_tokens_per_second)):
            if rate >= SLOWEST_BELIEVABLE:
                measured.setdefault(kind, []).append(rate)
    return {kind: sum(rates) / len(rates) for kind, rates in measured.items()}


def _work(policy: PoolPolicy, loads: list[PodLoad], demand: Demand) -> dict[str, float]:
    """Work that waits or runs, by kind, in pods and before them."""
    work: dict[str, float] = {}
    if "encode" in policy.roles:
        for queued in (*(load.encode_queued_work for load in loads), demand.encode_work):
            for modality, amount in queued.items():
                work[modality] = work.get(modality, 0.0) + amount
    if "prefill" in policy.roles:
        work[TOKENS] = sum(_prompt_tokens(policy, load) for load in loads) + demand.prompt_tokens
    return {kind: amount for kind, amount in work.items() if amount > 0}


def _prompt_tokens(policy: PoolPolicy, load: PodLoad) -> float:
    """Prompt tokens that this pool can work on: those behind media that another pool encodes are no reason to grow yet."""
    elsewhere = 0.0 if "encode" in policy.roles else load.prefill_blocked_tokens
    return max(0.0, load.prefill_waiting_tokens - elsewhere)


def _seconds(work: Mapping[str, float], throughput: Mapping[str, float]) -> float:
    """How long one replica would work on it; kinds of unknown throughput left out."""
    seconds = sum(amount / throughput[kind] for kind, amount in work.items() if kind in throughput)
    return min(seconds, LONGEST_BACKLOG_SECONDS)


def _backlog(
    policy: PoolPolicy, work: Mapping[str, float], throughput: Mapping[str, float], ready: int
) -> Signal:
    seconds = _seconds(work, throughput)
    need = max(seconds / policy.target_backlog_seconds, 1.0 if work.keys() - throughput.keys() else 0.0)
    full = seconds / policy.target_backlog_seconds / SATURATED_BACKLOG
    return Signal(
        "BacklogSeconds", seconds / max(ready, 1), policy.target_backlog_seconds, need, full, seconds
    )


def _summed(metric: Metric, total: float, each: float, policy: PoolPolicy, pods: int) -> Signal | None:
    """A signal whose observations add up over pods, where one pod holds `each` at most. None where there is no load."""
    if total <= 0 or each <= 0:
        return None
    full = min(total / each, MOST_REPLICAS)
    target = policy.target_utilization
    if metric == "Sequences":
        return Signal(metric, total / pods, each * target, full / target, full)
    return Signal(metric, full / pods, target, full / target, full)


def _busy(policy: PoolPolicy, loads: list[PodLoad]) -> Signal | None:
    """Busy time of the roles that the pool holds; what a pod cannot do at once cannot be more than all its time."""
    total = 0.0
    for load in loads:
        encode = load.encode_busy_fraction if "encode" in policy.roles else 0.0
        prefill = (load.prefill_busy_fraction or 0.0) if "prefill" in policy.roles else 0.0
        total += min(1.0, encode + prefill)
    return _summed("BusyFraction", total, 1.0, policy, len(loads))


def _kv(policy: PoolPolicy, loads: list[PodLoad]) -> Signal | None:
    used = sum(load.kv_blocks_total - load.kv_blocks_free for load in loads)
    return _summed("KvUtilization", used, _mean(load.kv_blocks_total for load in loads), policy, len(loads))


def _sequences(policy: PoolPolicy, loads: list[PodLoad]) -> Signal | None:
    total = sum(load.decode_running + load.decode_waiting for load in loads)
    return _summed("Sequences", total, _mean(load.decode_max_sequences for load in loads), policy, len(loads))


def _ttft(
    policy: PoolPolicy, ttft: float, backlog_seconds: float, settled: bool, current: int, ready: int
) -> Signal | None:
    slo = policy.ttft_slo_seconds
    assert slo is not None
    if ready == 0 or backlog_seconds / ready < QUEUE_SHARE_OF_TTFT * slo:
        return None
    return _latency("TtftSeconds", ttft, slo, settled, current, ready)


def _itl(policy: PoolPolicy, loads: list[PodLoad], settled: bool, current: int, ready: int) -> Signal | None:
    running = sum(load.decode_running for load in loads)
    if policy.itl_slo_seconds is None or ready == 0 or running / ready < SMALLEST_SLOW_BATCH:
        return None
    itl = sum(load.itl_seconds * load.decode_running for load in loads) / running
    return _latency("ItlSeconds", itl, policy.itl_slo_seconds, settled, current, ready)


def _latency(
    metric: Metric, observed: float, slo: float, settled: bool, current: int, ready: int
) -> Signal | None:
    """Hold near the SLO, grow beyond it; only once the pods that are ready now have made the whole measurement."""
    over = observed / slo
    if not over > LATENCY_COMFORT:
        return None
    need = float(max(current, 1))
    if over > 1 and settled:
        need = max(need, ready * (1 + min(over - 1, LATENCY_STEP)))
    return Signal(metric, observed, slo, need, full=0.0)


def _mean(values: Iterable[float]) -> float:
    known = [value for value in values if value > 0]
    return sum(known) / len(known) if known else 0.0
