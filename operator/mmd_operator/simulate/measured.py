"""Calibration from a running deployment: the gateway's timelines of recent requests, and the loads of its workers.

Rates are those that workers publish. The overhead of a stage is the median time that requests took in it beyond their work, so that
a machine's hiccups affect only the spread. Knows the gateway's JSON; no wire, no cluster.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from mmd_api.contract import paths
from mmd_api.contract.load import PodLoad
from mmd_api.contract.pools import MODALITIES, Modality, PoolName, Role
from mmd_api.spec.deployment import MultimodalDeploymentSpec
from mmd_operator.simulate.calibration import Calibration
from mmd_operator.simulate.model import Pipeline
from mmd_operator.simulate.policies import Static
from mmd_operator.simulate.traces import Trace

LEAST_REQUESTS = 30
"""Fewer requests say nothing about a median, let alone a spread."""
MOST_REQUESTS = 512
ANSWER_SECONDS = 10.0
SPREAD_POINTS = 100
JOBS_PER_BATCH_PLACE = 2
"""An encoder takes twice as many jobs from the queue as its tower's batch has places: some are decoded while others run."""
_LOAD = TypeAdapter(PodLoad)
_POOL_OF: dict[Role, PoolName] = {"encode": "encoder", "prefill": "prefill", "decode": "decode"}


class NotMeasuredError(ValueError):
    """A deployment does not allow calibration; the message contains the reason and the remedy."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class _Phase(_Part):
    pod: str
    name: str
    start: float
    end: float
    detail: dict[str, Any] = {}

    @property
    def seconds(self) -> float:
        return max(0.0, self.end - self.start)


class _Usage(_Part):
    prompt_tokens: int
    completion_tokens: int


class _Medium(_Part):
    modality: Modality


class SeenRequest(_Part):
    """A finished request, as the gateway remembers it. Times are Unix seconds."""

    request_id: str
    arrived: float
    first_token: float
    last_token: float
    code: str
    usage: _Usage
    media: list[_Medium] = []
    attempts: list[dict[str, Any]] = []
    phases: list[_Phase] = []

    @property
    def ttft_seconds(self) -> float:
        """Time from its arrival at the gateway to its first token there."""
        return self.first_token - self.arrived

    def phase(self, name: str) -> _Phase | None:
        """The first phase with this name."""
        return next((p for p in self.phases if p.name == name), None)

    def media_of(self, modality: Modality) -> int:
        """Number of its media of this modality."""
        return sum(medium.modality == modality for medium in self.media)


@dataclass(frozen=True, slots=True)
class Seen:
    """Finished requests in order of arrival, and one pod's load for each pool that has any."""

    requests: tuple[SeenRequest, ...]
    loads: Mapping[PoolName, PodLoad]

    @property
    def trace(self) -> Trace:
        """The requests as a trace, to be run again."""
        first = self.requests[0].arrived if self.requests else 0.0
        counts = {m: np.array([r.media_of(m) for r in self.requests], dtype=np.int64) for m in MODALITIES}
        return Trace(
            "observed",
            np.array([r.arrived - first for r in self.requests]),
            counts,
            np.array([r.usage.prompt_tokens for r in self.requests], dtype=np.int64),
            np.array([r.usage.completion_tokens for r in self.requests], dtype=np.int64),
        )

    @property
    def since(self) -> datetime:
        """Arrival time of the first request."""
        return datetime.fromtimestamp(self.requests[0].arrived, UTC)


def look(url: str) -> Seen:
    """Fetch from a gateway the requests that it remembers and the loads that its workers report.

    Raises:
        NotMeasuredError: no gateway answers at `url`, or too few requests were answered.
    """
    url = url.rstrip("/")
    requests = f"{url}{paths.GATEWAY_REQUESTS}"
    names = [entry["request_id"] for entry in _get(f"{requests}?limit={MOST_REQUESTS}")["requests"]]
    timelines = (_get(f"{requests}/{name}") for name in names)
    return seen(timelines, _get(f"{url}{paths.GATEWAY_STATE}"))


def seen(timelines: Iterable[Mapping[str, Any]], state: Mapping[str, Any]) -> Seen:
    """Read the gateway's `/debug/requests/...` and `/debug/state`. Requests that failed, were placed twice or still run are left out.

    Raises:
        NotMeasuredError: fewer than `LEAST_REQUESTS` remain.
    """
    requests = []
    for timeline in timelines:
        if timeline.get("code") != "ok" or not timeline.get("last_token") or len(timeline["attempts"]) != 1:
            continue
        try:
            request = SeenRequest.model_validate(timeline)
        except ValidationError as error:
            raise NotMeasuredError(f"the gateway's timelines are from another version: {error}") from error
        if request.phase("prefill") is not None:
            requests.append(request)
    if len(requests) < LEAST_REQUESTS:
        raise NotMeasuredError(
            f"the gateway has {len(requests)} answered requests and at least {LEAST_REQUESTS} are needed; send it load first"
        )
    loads: dict[PoolName, PodLoad] = {}
    for pod in state["pods"]:
        load = _LOAD.validate_python(pod["load"])
        for role in pod["roles"]:
            loads.setdefault(_POOL_OF[role], load)
    return Seen(tuple(sorted(requests, key=lambda r: r.arrived)), loads)


def calibrated(found: Seen, spec: MultimodalDeploymentSpec, base: Calibration) -> Calibration:
    """Calibrate `base` with everything that was measured. Start-up times, and modalities that did not occur, stay as in `base`.

    Contention and spread compare measured TTFTs with modelled TTFTs of the same requests, so waiting is not counted twice.
    """
    typical = _typical(found, spec, base.measured(found.loads))
    sizes = dict.fromkeys(_POOL_OF.values(), 1)
    modelled = Pipeline(spec, found.trace, typical, Static(), start_sizes=sizes).run().ttft_seconds
    factors = np.array([r.ttft_seconds for r in found.requests]) / modelled
    concurrent = _concurrent_requests(found.requests)
    contention = _contention(concurrent, factors)
    factors /= 1 + contention * concurrent
    points = (np.arange(SPREAD_POINTS) + 0.5) / SPREAD_POINTS
    spread = {
        kind: [round(float(factor), 3) for factor in np.quantile(factors[selected], points)]
        for kind, selected in found.trace.kinds().items()
        if selected.any()
    }
    return typical.model_copy(update={"spread": spread, "contention": round(contention, 4)})


def _concurrent_requests(requests: Sequence[SeenRequest]) -> npt.NDArray[np.int64]:
    """Number of other requests in progress when each request arrived, [requests]."""
    arrivals, ends = np.array([r.arrived for r in requests]), np.sort([r.last_token for r in requests])
    in_progress: npt.NDArray[np.int64] = np.arange(len(requests)) - np.searchsorted(ends, arrivals)
    return in_progress.clip(min=0)


def _contention(concurrent: npt.NDArray[np.int64], factors: npt.NDArray[np.float64]) -> float:
    """Slope of a line through the median factor by number of concurrent requests, as a share of its intercept."""
    counts = [n for n in np.unique(concurrent) if (concurrent == n).sum() >= LEAST_REQUESTS // 3]
    if len(counts) < 2:
        return 0.0
    medians = [np.median(factors[concurrent == n]) for n in counts]
    weights = [np.sqrt((concurrent == n).sum()) for n in counts]
    slope, intercept = np.polyfit(counts, medians, 1, w=weights)
    return max(0.0, float(slope / intercept)) if intercept > 0 else 0.0


def _typical(observed: Seen, spec: MultimodalDeploymentSpec, base: Calibration) -> Calibration:
    """`base` with the median time of each stage besides its work, over requests that nothing else delayed."""
    prefills = [p for r in observed.requests if (p := r.phase("prefill")) is not None]
    alone_ids = {id(p) for p in _alone(prefills)}
    text = [r for r in observed.requests if not r.media and id(r.phase("prefill")) in alone_ids]
    if len(text) < LEAST_REQUESTS // 3:
        raise NotMeasuredError(
            f"{len(text)} text requests ran alone in prefill and {LEAST_REQUESTS // 3} are needed; send more of them, or send them more slowly"
        )
    rate = base.prefill.tokens_per_second
    prefill_overhead = _median(max(0.0, _prefill(r) - r.usage.prompt_tokens / rate) for r in text)
    gateway = _median(max(0.0, r.ttft_seconds - _prefill(r)) for r in text)

    encodes = [p for r in observed.requests for p in r.phases if p.name == "encode" and "work" in p.detail]
    alone_ids |= {id(p) for p in _alone(encodes)}
    work, overhead = dict(base.media), dict(base.encoder.overhead_seconds)
    transfer_seconds: list[float] = []
    for modality in MODALITIES:
        phases = [p for p in encodes if p.detail.get("modality") == modality]
        if not phases:
            continue
        work[modality] = _median(p.detail["work"] for p in phases)
        undisturbed = [p for p in phases if id(p) in alone_ids] or phases
        # rate of the slowest stage; the other stages take the rest of the phase
        rate = base.encoder.work_per_second[modality]
        overhead[modality] = _median(max(0.0, p.seconds - p.detail["work"] / rate) for p in undisturbed)
        single_medium = [r for r in observed.requests if len(r.media) == 1 and r.media_of(modality) == 1]
        transfer_seconds += [
            r.ttft_seconds - encode.seconds - _prefill(r) - gateway
            for r in single_medium
            if (encode := r.phase("encode")) is not None
            and id(encode) in alone_ids
            and id(r.phase("prefill")) in alone_ids
        ]
    step, sequence_seconds = _steps(observed.requests, base.decode.step_seconds)
    at_once = JOBS_PER_BATCH_PLACE * spec.encoder.batching.max_items if spec.encoder else 1
    encoder = base.encoder.model_copy(update={"overhead_seconds": overhead, "media_at_once": at_once})
    prefill = base.prefill.model_copy(update={"overhead_seconds": prefill_overhead})
    decode = base.decode.model_copy(
        update={"step_seconds": step, "step_seconds_per_sequence": sequence_seconds}
    )
    transfer = base.transfer.model_copy(
        update={
            "seconds_per_medium": max(0.0, _median(transfer_seconds))
            if transfer_seconds
            else base.transfer.seconds_per_medium
        }
    )
    return base.model_copy(
        update={
            "encoder": encoder, "prefill": prefill, "decode": decode, "media": work, "transfer": transfer,
            "gateway_seconds": gateway, "spread": {}, "contention": 0.0,
        }
    )  # fmt: skip


def _prefill(request: SeenRequest) -> float:
    phase = request.phase("prefill")
    assert phase is not None
    return phase.seconds


def _median(values: Iterable[float]) -> float:
    return float(np.median(list(values)))


def _alone(phases: Sequence[_Phase]) -> list[_Phase]:
    """Phases that no other phase of the same pod overlaps."""
    alone = []
    for pod in {p.pod for p in phases}:
        pod_phases = sorted((p for p in phases if p.pod == pod), key=lambda p: p.start)
        latest = -np.inf
        for phase, following in zip(pod_phases, [*pod_phases[1:], None], strict=True):
            if phase.start >= latest and (following is None or following.start >= phase.end):
                alone.append(phase)
            latest = max(latest, phase.end)
    return alone


def _steps(requests: Sequence[SeenRequest], step: float) -> tuple[float, float]:
    """Length of a decode step besides its sequences, and the time that each sequence adds, by least squares over all answers.

    If the line makes no sense, the median over all answers is the whole length; with too few answers, `step` is. Sequences then add nothing.
    """
    long = [r for r in requests if r.usage.completion_tokens > 1 and r.last_token > r.first_token]
    if len(long) < LEAST_REQUESTS // 3:
        return step, 0.0
    starts, ends = np.array([r.first_token for r in long]), np.array([r.last_token for r in long])
    itl = (ends - starts) / np.array([r.usage.completion_tokens - 1 for r in long])
    overlap = np.clip(np.minimum(ends[:, None], ends) - np.maximum(starts[:, None], starts), 0, None).sum(
        axis=1
    )
    sequences = overlap / (ends - starts)
    per_sequence = float(np.polyfit(sequences, itl, 1)[0]) if np.ptp(sequences) > 0 else 0.0
    fixed = float(np.median(itl - per_sequence * sequences))
    return (fixed, per_sequence) if per_sequence >= 0 and fixed > 0 else (float(np.median(itl)), 0.0)


def _get(url: str) -> Any:
    try:
        with urllib.request.urlopen(url, timeout=ANSWER_SECONDS) as answer:  # noqa: S310 - the user's own URL
            return json.load(answer)
    except (urllib.error.URLError, TimeoutError, OSError, ValueError) as error:
        raise NotMeasuredError(
            f"no gateway responded at {url} ({error}); give the URL of a gateway's admin port"
        ) from error
