"""Signals: the sizes that a pool's samples ask for. Every size is absolute: computed from work, never from the present size.

A sum over pods (busy time, KV blocks, sequences, work ÷ calibrated throughput) is the same however many pods share the load,
so pods that are still loading cannot multiply it. Latencies cannot be summed: they ask for small steps from the measured pods,
and only if those steps can help.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from mmd_api.contract.load import PodLoad
from mmd_api.contract.pools import Modality
from mmd_operator.autoscaling.decision import Signal
from mmd_operator.autoscaling.history import History
from mmd_operator.autoscaling.policy import PoolPolicy
from mmd_operator.autoscaling.samples import Demand, Latency, PodSample, PoolSamples

TOKENS = "tokens"
"""The kind of work of prefill, in addition to the modalities of encode work."""
LATENCY_STEP = 0.5
"""A missed latency adds at most this share of the measured pods, by however much it was missed."""
LATENCY_COMFORT = 0.8
"""Above this share of the SLO a pool is not made smaller."""
QUEUE_SHARE_OF_TTFT = 0.25
"""More prefill pods help only if requests wait for them for at least this share of the promised TTFT."""
SMALLEST_SLOW_BATCH = 4
"""A decode step with fewer sequences is slow by itself: more pods would not make it faster."""
ITL_SETTLE_SECONDS = 10.0
SLOWEST_PLAUSIBLE = 1e-3
"""A calibrated throughput below this many units a second has not been measured yet."""
MOST_REPLICAS = 100_000.0
LONGEST_BACKLOG_SECONDS = 1e9
SATURATED_BACKLOG = 3.0
"""A pool counts as used up entirely when its backlog is this multiple of its target."""


@dataclass(frozen=True, slots=True)
class Observation:
    """Findings from a pool's samples. `missing` names needed data that is absent, late or impossible.

    `absent`: ordinals of the pods that no node runs.
    """

    signals: tuple[Signal, ...]
    missing: tuple[str, ...]
    ready: int
    stuck: int
    unplaced: int
    history: History
    absent: tuple[int, ...] = ()

    @property
    def idle(self) -> bool:
        """Whether there is certainly no work: no report missing, and no demand."""
        return not self.missing and not self.signals


@dataclass(frozen=True, slots=True)
class Measurements:
    """Usable part of a pool's samples. `work`: waiting and running work by kind. `throughput`: per replica. `latency`: None unless fresh.

    `current`: the size that counts. `ready`: number of pods that serve, unchanged for `settled_seconds`.
    """

    policy: PoolPolicy
    current: int
    ready: int
    settled_seconds: float
    loads: list[PodLoad]
    demand: Demand
    latency: Latency | None
    work: Mapping[str, float]
    throughput: Mapping[str, float]

    @property
    def backlog_seconds(self) -> float:
        """Seconds that one replica would need for the work, without kinds of unknown throughput."""
        seconds = (
            amount / self.throughput[kind] for kind, amount in self.work.items() if kind in self.throughput
        )
        return min(sum(seconds), LONGEST_BACKLOG_SECONDS)


def backlog(measured: Measurements) -> Signal | None:
    """Seconds of work that waits, of encode and prefill."""
    if not measured.work:
        return None
    seconds, target = measured.backlog_seconds, measured.policy.target_backlog_seconds
    need = max(seconds / target, 1.0 if measured.work.keys() - measured.throughput.keys() else 0.0)
    full = seconds / target / SATURATED_BACKLOG
    return Signal(seconds / max(measured.ready, 1), target, need, full, seconds)


def busy_time(measured: Measurements) -> Signal | None:
    """Busy time of the encoders."""
    if "encode" not in measured.policy.roles:
        return None
    total = sum(min(1.0, load.encode_busy_fraction) for load in measured.loads)
    return _summed(total, 1.0, measured)


def time_to_first_token(measured: Measurements) -> Signal | None:
    """Against the SLO, where waiting for prefill is a fair part of it."""
    slo, latency = measured.policy.ttft_slo_seconds, measured.latency
    if "prefill" not in measured.policy.roles or slo is None or latency is None or latency.requests <= 0:
        return None
    if measured.ready == 0 or measured.backlog_seconds / measured.ready < QUEUE_SHARE_OF_TTFT * slo:
        return None
    settled = measured.settled_seconds >= latency.window_seconds
    return _latency(latency.ttft_seconds, slo, settled, measured)


def kv_blocks(measured: Measurements) -> Signal | None:
    """KV blocks in use."""
    if "decode" not in measured.policy.roles:
        return None
    used = sum(load.kv_blocks_total - load.kv_blocks_free for load in measured.loads)
    return _summed(used, _mean(load.kv_blocks_total for load in measured.loads), measured)


def sequences(measured: Measurements) -> Signal | None:
    """Sequences that decode or wait to, at gateways as well."""
    if "decode" not in measured.policy.roles:
        return None
    total = sum(load.decode_running + load.decode_waiting for load in measured.loads)
    total += measured.demand.sequences
    slots = _mean(load.decode_max_sequences for load in measured.loads)
    share = _summed(total, slots, measured)
    return replace(share, observed=share.observed * slots, target=share.target * slots) if share else None


def inter_token_latency(measured: Measurements) -> Signal | None:
    """Against the SLO, where batches are large enough that more pods would make them faster."""
    slo = measured.policy.itl_slo_seconds
    if "decode" not in measured.policy.roles or slo is None:
        return None
    running = sum(load.decode_running for load in measured.loads)
    if measured.ready == 0 or running / measured.ready < SMALLEST_SLOW_BATCH:
        return None
    itl = sum(load.itl_seconds * load.decode_running for load in measured.loads) / running
    return _latency(itl, slo, measured.settled_seconds >= ITL_SETTLE_SECONDS, measured)


def held_requests(measured: Measurements) -> Signal | None:
    """Requests that gateways hold until the pool has a pod. Encoders delay no request."""
    held = measured.demand.held_requests
    if not held or measured.policy.roles == ("encode",):
        return None
    return Signal(held, 0.0, need=1.0, full=0.0)


@dataclass(frozen=True, slots=True)
class SignalRule:
    """A signal: its name, the function that measures it, and its sentence in Events and `mmd explain`.

    `measure` returns None if it does not concern the pool or the pool has no such load. `sentence` has placeholders for `observed`,
    `target` and `ready`, the number of pods that serve.
    """

    name: str
    measure: Callable[[Measurements], Signal | None]
    sentence: str

    def signal(self, measured: Measurements) -> Signal | None:
        """Measure the signal, and add its name and words."""
        signal = self.measure(measured)
        if signal is None:
            return None
        words = self.sentence.format(observed=signal.observed, target=signal.target, ready=measured.ready)
        return replace(signal, metric=self.name, words=words)


SIGNALS: tuple[SignalRule, ...] = (
    SignalRule(
        "BacklogSeconds",
        backlog,
        "backlog is {observed:.2f} s, target {target:.2f} s per replica ({ready} ready)",
    ),
    SignalRule(
        "BusyFraction",
        busy_time,
        "busy time is {observed:.0%}, target {target:.0%} per replica ({ready} ready)",
    ),
    SignalRule(
        "TtftSeconds",
        time_to_first_token,
        "time to first token is {observed:.3f} s, SLO {target:.3f} s ({ready} replicas ready)",
    ),
    SignalRule(
        "KvUtilization",
        kv_blocks,
        "KV utilization is {observed:.0%}, target {target:.0%} per replica ({ready} ready)",
    ),
    SignalRule(
        "Sequences",
        sequences,
        "sequences: {observed:.1f}, target {target:.1f} per replica ({ready} ready)",
    ),
    SignalRule(
        "ItlSeconds",
        inter_token_latency,
        "inter-token latency is {observed:.4f} s, SLO {target:.4f} s ({ready} replicas ready)",
    ),
    SignalRule(
        "HeldRequests",
        held_requests,
        "{observed:.0f} requests are held at the gateway ({ready} replicas ready)",
    ),
)
"""All signals. The largest need counts; among equals, the first."""
SIGNAL_METRICS = tuple(rule.name for rule in SIGNALS)


def observe(
    now: float, policy: PoolPolicy, samples: PoolSamples, current: int, history: History
) -> Observation:
    """Measure the signals of a pool's roles, and record this tick and the newest throughput in the history."""
    ready = sum(p.state == "ready" for p in samples.pods)
    history = history.begin_tick(now, ready)
    loads, missing = _usable_loads(now, policy, samples.pods)
    demand, problems = _usable_demand(now, policy, samples.demand)
    missing += problems
    history = replace(history, throughput={**history.throughput, **_throughput(loads)})
    work = _work(policy, loads, demand)
    if unmeasured := sorted(work.keys() - history.throughput.keys()):
        missing.append(f"no throughput measured for {', '.join(unmeasured)}")
    latency, problem = _usable_latency(now, policy, samples.latency)
    if problem:
        missing.append(problem)
    measurements = Measurements(
        policy=policy,
        current=current,
        ready=ready,
        settled_seconds=now - history.ready_since,
        loads=loads,
        demand=demand,
        latency=latency,
        work=work,
        throughput=history.throughput,
    )
    signals = (rule.signal(measurements) for rule in SIGNALS)
    return Observation(
        signals=tuple(s for s in signals if s is not None),
        missing=tuple(missing),
        ready=ready,
        stuck=sum(_is_stuck(now, policy, pod) for pod in samples.pods if not pod.surge),
        unplaced=sum(_is_unplaced(now, policy, pod) for pod in samples.pods if not pod.surge),
        history=history,
        absent=tuple(pod.ordinal for pod in samples.pods if pod.absent and not pod.surge),
    )


def _is_stuck(now: float, policy: PoolPolicy, pod: PodSample) -> bool:
    """A pod that fails, or is past its deadline to become Ready, no longer counts as starting capacity."""
    late = pod.failing or pod.waited(now) > policy.start_deadline_seconds
    return late and pod.state in ("starting", "loading")


def _is_unplaced(now: float, policy: PoolPolicy, pod: PodSample) -> bool:
    """A pod past its deadline to be scheduled; until then a cluster autoscaler may still be adding a node."""
    return pod.state == "unschedulable" and pod.waited(now) > policy.scheduling_deadline_seconds


def _usable_loads(
    now: float, policy: PoolPolicy, pods: Iterable[PodSample]
) -> tuple[list[PodLoad], list[str]]:
    """Loads of pods that hold work, and the problems of ready pods without a usable load."""
    loads, missing = [], []
    for pod in pods:
        if pod.state not in ("ready", "draining"):
            continue
        if pod.load is None or pod.received_at is None:
            problem = f"no load report from pod {pod.pod}"
        elif not abs(now - pod.received_at) <= policy.stale_after_seconds:
            problem = f"no load report from pod {pod.pod} for {now - pod.received_at:.1f} s"
        elif fault := pod.load.fault():
            problem = f"invalid load report from pod {pod.pod} ({fault})"
        else:
            loads.append(pod.load)
            continue
        if pod.state == "ready":
            missing.append(problem)
    return loads, missing


def _usable_demand(now: float, policy: PoolPolicy, demand: Demand | None) -> tuple[Demand, tuple[str, ...]]:
    """What is known of the demand, and what is missing in it."""
    if demand is None:
        return Demand(now), ("no queue report",)
    if not abs(now - demand.received_at) <= policy.stale_after_seconds:
        return Demand(now), (f"no queue report for {now - demand.received_at:.1f} s",)
    if fault := demand.fault():
        return Demand(now), (f"invalid queue report ({fault})",)
    return demand, demand.missing


def _usable_latency(
    now: float, policy: PoolPolicy, latency: Latency | None
) -> tuple[Latency | None, str | None]:
    """Fresh latency, or the problem if it is missing. Only a pool that prefills under an SLO needs it."""
    if "prefill" not in policy.roles or policy.ttft_slo_seconds is None:
        return None, None
    if latency is None or not abs(now - latency.received_at) <= policy.stale_after_seconds:
        return None, "no time-to-first-token report"
    return latency, None


def _throughput(loads: list[PodLoad]) -> dict[str, float]:
    """Calibrated throughput of one replica by kind of work: the mean of the pods that have measured it."""
    measured: dict[str, list[float]] = {}
    for load in loads:
        for kind, rate in (*load.encode_work_per_second.items(), (TOKENS, load.prefill_tokens_per_second)):
            if rate >= SLOWEST_PLAUSIBLE:
                measured.setdefault(kind, []).append(rate)
    return {kind: sum(rates) / len(rates) for kind, rates in measured.items()}


def _work(policy: PoolPolicy, loads: list[PodLoad], demand: Demand) -> dict[str, float]:
    """Waiting and running work by kind, in pods and before them."""
    work: dict[str, float] = {}
    if "encode" in policy.roles or policy.encodes_small_media:
        queues: list[Mapping[Modality, float]] = [
            *(load.encode_queued_work for load in loads),
            demand.encode_work,
        ]
        for queued in queues:
            for modality, amount in queued.items():
                work[modality] = work.get(modality, 0.0) + amount
    if "prefill" in policy.roles:
        work[TOKENS] = sum(_prompt_tokens(policy, load) for load in loads) + demand.prompt_tokens
    return {kind: amount for kind, amount in work.items() if amount > 0}


def _prompt_tokens(policy: PoolPolicy, load: PodLoad) -> float:
    """Prompt tokens that this pool can work on. Tokens behind media that another pool encodes are no reason to grow yet."""
    elsewhere = 0.0 if "encode" in policy.roles else load.prefill_blocked_tokens
    return max(0.0, load.prefill_waiting_tokens - elsewhere)


def _summed(total: float, capacity: float, measured: Measurements) -> Signal | None:
    """A signal whose observations add up over pods, each of which holds at most `capacity`. None without load."""
    if total <= 0 or capacity <= 0:
        return None
    full = min(total / capacity, MOST_REPLICAS)
    target, pods = measured.policy.target_utilization, len(measured.loads)
    return Signal(full / pods, target, full / target, full)


def _latency(observed: float, slo: float, settled: bool, measured: Measurements) -> Signal | None:
    """Hold near the SLO; grow beyond it, but only if the pods ready now have made the whole measurement."""
    ratio = observed / slo
    if not ratio > LATENCY_COMFORT:
        return None
    need = float(max(measured.current, 1))
    if ratio > 1 and settled:
        need = max(need, measured.ready * (1 + min(ratio - 1, LATENCY_STEP)))
    return Signal(observed, slo, need, full=0.0)


def _mean(values: Iterable[float]) -> float:
    positive = [value for value in values if value > 0]
    return sum(positive) / len(positive) if positive else 0.0
