"""vLLM's own metrics, by vLLM's own logger and under its names, on a registry of their own.

vLLM's front end, which does not run here, follows each request for that logger: `VllmMetrics` does instead. Not thread safe, except that
the registry may be read at any time.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.config import VllmConfig
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.stats import IterationStats, LoRARequestStates, RequestStateStats, SchedulerStats
from vllm.v1.request import Request

PARTS = ("_spec_decoding_cls", "_kv_connector_cls", "_ec_connector_cls", "_perf_metrics_cls")


class _Logger(PrometheusStatLogger):
    """vLLM's logger, whose metrics, also those of its parts, are on `registry` instead of the process's."""

    def __init__(self, config: VllmConfig, registry: CollectorRegistry) -> None:
        kinds: dict[str, Any] = {
            "_counter_cls": partial(Counter, registry=registry),
            "_gauge_cls": partial(Gauge, registry=registry),
            "_histogram_cls": partial(Histogram, registry=registry),
        }
        static = {name: staticmethod(kind) for name, kind in kinds.items()}
        for part in PARTS:
            kinds[part] = type(part, (getattr(self, part),), static)
        for name, kind in kinds.items():
            setattr(self, name, kind)
        super().__init__(config)

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        *rest: Any,
        **named: Any,
    ) -> None:
        """Labels of this gauge name the adapters that run and that wait: those of an earlier step are no longer true."""
        if scheduler_stats is not None and self.gauge_lora_info is not None:
            self.gauge_lora_info.clear()
        super().record(scheduler_stats, iteration_stats, *rest, **named)


@dataclass(slots=True)
class _Followed:
    """What vLLM's front end knows of a request."""

    request: Request
    stats: RequestStateStats
    prefills: bool = True
    cached_tokens: int = 0

    @property
    def adapter(self) -> str | None:
        """Name of the adapter that the request is for."""
        return self.request.lora_request.lora_name if self.request.lora_request is not None else None


class VllmMetrics:
    """Feeds the metrics of one engine core."""

    def __init__(self, config: VllmConfig) -> None:
        self.registry = CollectorRegistry()
        self.paused = False
        self._logger = _Logger(config, self.registry)
        self._logger.log_engine_initialized()
        self._requests: dict[str, _Followed] = {}
        self._adapters = LoRARequestStates(log_stats=True)

    def begin(self, request: Request) -> None:
        """Follow a request from now on: to vLLM, it arrives here."""
        self._requests[request.request_id] = _Followed(request, RequestStateStats(arrival_time=time.time()))

    def forget(self, name: str) -> None:
        """Of a request that is aborted, vLLM counts no end."""
        if (followed := self._requests.pop(name, None)) is not None:
            self._adapters.request_finished(name, followed.adapter)

    def record(self, outputs: Iterable[EngineCoreOutputs], preempted: int) -> None:
        """Count a step, which has preempted some requests."""
        if self.paused:
            return
        iteration, load, followed = IterationStats(), None, False
        for made in outputs:
            load = made.scheduler_stats or load
            for one in made.outputs:
                if (request := self._requests.get(one.request_id)) is not None:
                    self._follow(request, one, made.timestamp, iteration)
                    followed = True
        self._adapters.update_scheduler_stats(load)
        # Beside each request's next output, as vLLM reports it, those would be missing that end here without one.
        iteration.num_preempted_reqs = preempted
        self._logger.record(load, iteration if followed or preempted else None)

    def refresh(self, load: SchedulerStats | None) -> None:
        """Show the load between steps: blocks are also reserved and freed there."""
        if not self.paused:
            self._adapters.update_scheduler_stats(load)
            self._logger.record(load, None)

    def _follow(
        self, followed: _Followed, output: EngineCoreOutput, at: float, iteration: IterationStats
    ) -> None:
        """As vLLM's `OutputProcessor` does."""
        stats, request = followed.stats, followed.request
        iteration.update_from_output(output, at, followed.prefills, stats, self._adapters, followed.adapter)
        followed.prefills = False
        if output.prefill_stats is not None:
            followed.cached_tokens = output.prefill_stats.num_cached_tokens
        if output.finish_reason is None:
            iteration.num_corrupted_reqs += bool(output.num_nans_in_logits)  # the engine ends it
            return
        iteration.update_from_finished_request(
            output.finish_reason,
            request.request_id,
            request.num_prompt_tokens,
            request.max_tokens,
            stats,
            followed.cached_tokens,
        )
        ParentRequest.observe_finished_request(None, iteration, stats.num_generation_tokens)
        self.forget(request.request_id)
