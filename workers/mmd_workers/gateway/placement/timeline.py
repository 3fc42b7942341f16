"""The history of recent requests: phases from every pod, joined with the gateway's own. A bounded ring; independent of HTTP."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from mmd_workers.model.prompt import PromptLayout
from mmd_workers.wire.messages.gateway import PhaseReport
from mmd_workers.wire.messages.message_parts import FeatureRef, Phase

KEPT_REQUESTS = 512
KEPT_PHASES = 512  # per request


LivePhase = Literal[
    "", "layout", "fetch", "admission", "placement", "prefill", "kv_transfer", "decode", "generate"
]
"""Phases in the order in which a request passes through them; "" once it has ended."""
LIVE_PHASES = get_args(LivePhase)
TIMED_PHASES = ("queue", "encode", "embedding_transfer", "prefill", "kv_transfer", "decode")


@dataclass(slots=True)
class Attempt:
    """One placement of one sequence: where, when (Unix seconds), and why it ended early ("" if it did not).

    `estimated`: the router's estimate in seconds, of the time from placement to first token (`ttft`) and of its terms.
    `ttft_seconds`: the actual time; 0 until then.
    `cached_tokens`: prompt tokens in the pod's prefix cache, as far as the router knew.
    `ended`: Unix seconds of its last token; 0 until then.
    """

    sequence: int
    number: int
    prefill_pod: str
    decode_pods: list[str]
    placed: float
    lost: str = ""
    estimated: dict[str, float] = field(default_factory=dict)
    ttft_seconds: float = 0.0
    cached_tokens: int = 0
    ended: float = 0.0


@dataclass(slots=True)
class Timeline:
    """The record of one HTTP request. Times are Unix seconds; `phases` are (pod, sequence, attempt, phase)."""

    request_id: str
    arrived: float
    model: str = ""
    trace_id: str = ""
    tenant: str = ""  # owner of the API key
    client_request_id: str = ""  # the client's own id, known before our answer begins
    repeats: str = ""  # request whose answer is reused, by idempotency key
    own_deadline: float = 0.0  # set if the client's deadline is before the deployment's
    finished: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    status: int = 0
    code: str = "ok"  # or the code of the error
    # The error's message, or the field if the request is at fault. Contains nothing from the request.
    error: str = ""
    finish_reasons: list[str] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    media: list[dict[str, Any]] = field(default_factory=list)
    media_tier: int = 0  # tier of media quality under load at arrival; 0: full quality
    degraded_by: list[str] = field(default_factory=list)  # why the model got less of its media
    attempts: list[Attempt] = field(default_factory=list)
    phases: list[tuple[str, int, int, Phase]] = field(default_factory=list)
    at_gateway: LivePhase = "layout"  # live phase until the request is placed

    def add(self, pod: str, phases: Iterable[Phase], sequence: int = 0, attempt: int = 0) -> None:
        """Add phases; those beyond the bound are dropped."""
        room = KEPT_PHASES - len(self.phases)
        self.phases.extend([(pod, sequence, attempt, phase) for phase in phases][: max(0, room)])

    def note_media(self, features: Iterable[FeatureRef], layout: PromptLayout) -> None:
        """Record the media as they are laid out now."""
        self.media = [
            {"modality": f.modality, "bytes": f.num_bytes, "tokens": f.num_tokens, "feature_id": f.feature_id}
            for f in features
        ]
        self.degraded_by = sorted(layout.degraded_by)

    def modality(self) -> str:
        """The heaviest modality in the request, or text."""
        kinds = {medium["modality"] for medium in self.media}
        return next((kind for kind in ("video", "audio", "image") if kind in kinds), "text")

    def timings(self) -> dict[str, float]:
        """Milliseconds of `ttft`, of `total`, and of each reported phase: the time that its intervals cover."""
        spans: dict[str, list[tuple[float, float]]] = {}
        for _, _, _, phase in self.phases:
            if phase.name in TIMED_PHASES:
                spans.setdefault(phase.name, []).append((phase.start, phase.end))
        timings = {name: _covered_ms(spans[name]) for name in TIMED_PHASES if name in spans}
        if self.first_token:
            timings["ttft"] = (self.first_token - self.arrived) * 1000
        timings["total"] = ((self.finished or time.time()) - self.arrived) * 1000
        return {name: round(max(0.0, value), 3) for name, value in timings.items()}

    def live_phase(self) -> LivePhase:
        """The present phase of the request; with several sequences, that of the one farthest behind.

        `prefill` begins with the placement, so it includes the queue and the encoding of media, which pods report only once they have ended.
        """
        if self.finished:
            return ""
        newest = {attempt.sequence: attempt for attempt in self.attempts}
        kv_moved = {
            (sequence, number) for _, sequence, number, phase in self.phases if phase.name == "kv_transfer"
        }
        phases = [
            _phase_of(attempt, (attempt.sequence, attempt.number) in kv_moved) for attempt in newest.values()
        ]
        return min(phases, key=LIVE_PHASES.index, default=self.at_gateway)

    def end(self, now: float) -> None:
        """Note that the answer has been sent, or the request has failed. Time since the last token becomes the phase `generate`."""
        self.finished = now
        if self.last_token:
            self.add("gateway", [Phase("generate", self.last_token, now)])

    def is_complete(self) -> bool:
        """True if the prefill pod has reported, and so has the decode pod of a sequence that was handed over."""
        names = {phase.name for _, _, _, phase in self.phases}
        handed_over = any(attempt.decode_pods for attempt in self.attempts)
        return "prefill" in names and (not handed_over or "decode" in names)

    def cached_tokens(self, sequences: Iterable[int] = (0,)) -> int:
        """Count the prompt tokens that the last prefill of each of these sequences found in its cache."""
        cached_tokens = {
            sequence: int(phase.detail.get("cached_tokens", 0))
            for _, sequence, _, phase in self.phases
            if phase.name == "prefill"
        }
        return sum(cached_tokens.get(sequence, 0) for sequence in sequences)

    def to_json(self) -> dict[str, Any]:
        """The complete record, with the phases in the order they began."""
        return {
            "request_id": self.request_id,
            "trace_id": self.trace_id,
            "client_request_id": self.client_request_id,
            "repeats": self.repeats,
            "tenant": self.tenant,
            "model": self.model,
            "arrived": self.arrived,
            "first_token": self.first_token,
            "last_token": self.last_token,
            "finished": self.finished,
            "status": self.status,
            "code": self.code,
            "error": self.error,
            "finish_reasons": self.finish_reasons,
            "usage": self.usage,
            "media": self.media,
            "media_tier": self.media_tier,
            "degraded_by": self.degraded_by,
            "timings": self.timings(),
            "attempts": [asdict(attempt) for attempt in self.attempts],
            "phase": self.live_phase(),
            "phases": [
                {"pod": pod, "sequence": sequence, "attempt": attempt, **asdict(phase)}
                for pod, sequence, attempt, phase in sorted(self.phases, key=lambda entry: entry[3].start)
            ],
        }

    def summary(self) -> dict[str, Any]:
        """The record's entry in a list."""
        return {
            "request_id": self.request_id,
            "tenant": self.tenant,
            "arrived": self.arrived,
            "finished": self.finished,
            "status": self.status,
            "code": self.code,
            "error": self.error,
            "attempts": len(self.attempts),
            "phase": self.live_phase(),
            "timings": self.timings(),
        }


class Timelines:
    """All running requests, and the latest that have ended, up to `capacity` together unless more are running.

    A late report by a worker still finds its request.
    """

    def __init__(self, capacity: int = KEPT_REQUESTS) -> None:
        self._capacity = capacity
        self._timelines: OrderedDict[str, Timeline] = OrderedDict()

    def open(self, timeline: Timeline) -> None:
        """Keep a request from now on. The oldest ended request makes room."""
        self._timelines[timeline.request_id] = timeline
        while len(self._timelines) > self._capacity:
            ended = next((name for name, candidate in self._timelines.items() if candidate.finished), None)
            if ended is None:
                return
            del self._timelines[ended]

    def get(self, request_id: str) -> Timeline | None:
        """Find a request by the id in its response header, or the newest with this id set by the client."""
        timeline = self._timelines.get(request_id)
        if timeline is not None or not request_id:
            return timeline
        return next(
            (t for t in reversed(self._timelines.values()) if t.client_request_id == request_id), None
        )

    def newest(self, count: int) -> list[dict[str, Any]]:
        """Summaries, newest first."""
        return [timeline.summary() for timeline in list(reversed(self._timelines.values()))[:count]]

    def report(self, report: PhaseReport) -> None:
        """Add a worker's report; reports about unknown requests are ignored."""
        request_id, sequence = split_sequence_id(report.request_id)
        timeline = self._timelines.get(request_id)
        if timeline is not None:
            timeline.add(report.pod, report.phases, sequence, report.attempt)

    def attempt_of(self, report: PhaseReport) -> Attempt | None:
        """The placement that a worker's report is about; None if it is not kept."""
        request_id, sequence = split_sequence_id(report.request_id)
        timeline = self._timelines.get(request_id)
        attempts = timeline.attempts if timeline is not None else []
        key = sequence, report.attempt
        return next(
            (attempt for attempt in reversed(attempts) if (attempt.sequence, attempt.number) == key), None
        )


def sequence_id(request_id: str, sequence: int) -> str:
    """The name by which workers know a choice of a request."""
    return f"{request_id}.{sequence}"


def split_sequence_id(name: str) -> tuple[str, int]:
    """Split a name made by `sequence_id` into request id and number of the choice; any other name counts as choice 0."""
    request_id, _, number = name.rpartition(".")
    return (request_id, int(number)) if request_id and number.isdigit() else (name, 0)


def _covered_ms(intervals: list[tuple[float, float]]) -> float:
    total, until = 0.0, float("-inf")
    for start, end in sorted(intervals):
        if end > until:
            total += end - max(start, until)
            until = end
    return total * 1000


def _phase_of(attempt: Attempt, kv_moved: bool) -> LivePhase:
    """The live phase of an attempt. `kv_moved`: its KV has reached the decode pod."""
    if attempt.ended:
        return "generate"
    if attempt.lost:
        return "placement"
    if not attempt.ttft_seconds:
        return "prefill"
    return "decode" if kv_moved or not attempt.decode_pods else "kv_transfer"
