"""Publishes vLLM's own metrics, from vLLM's own logger and under its names, on a separate registry.

The logger needs a record of each request. vLLM's front end, which does not run here, would keep it;
`VllmMetrics` does instead. Not thread safe, except that the registry may be read at any time.
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
    """Logger of vLLM with all metrics, those of its parts included, on `registry` instead of the process's."""

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
        """Record a step, after clearing the adapter gauge.

        The gauge's labels name the adapters that run and wait; those of an earlier step are stale.
        """
        if scheduler_stats is not None and self.gauge_lora_info is not None:
            self.gauge_lora_info.clear()
        super().record(scheduler_stats, iteration_stats, *rest, **named)


@dataclass(slots=True)
class _Followed:
    """State of a request, as vLLM's front end would keep it."""

    request: Request
    stats: RequestStateStats
    prefills: bool = True
    cached_tokens: int = 0

    @property
    def adapter(self) -> str | None:
        """Name of the request's adapter."""
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
        """Follow a request from now on. For vLLM this is its arrival."""
        self._requests[request.request_id] = _Followed(request, RequestStateStats(arrival_time=time.time()))

    def forget(self, name: str) -> None:
        """Stop following an aborted request. vLLM does not count its end."""
        if (followed := self._requests.pop(name, None)) is not None:
            self._adapters.request_finished(name, followed.adapter)

    def record(self, outputs: Iterable[EngineCoreOutputs], preempted: int) -> None:
        """Count a step that preempted `preempted` requests."""
        if self.paused:
            return
        iteration, load, followed = IterationStats(), None, False
        for client_outputs in outputs:
            load = client_outputs.scheduler_stats or load
            for output in client_outputs.outputs:
                if (request := self._requests.get(output.request_id)) is not None:
                    self._follow(request, output, client_outputs.timestamp, iteration)
                    followed = True
        self._adapters.update_scheduler_stats(load)
        # vLLM would count a preemption with the request's next output. Requests that end here without one would be missing.
        iteration.num_preempted_reqs = preempted
        self._logger.record(load, iteration if followed or preempted else None)

    def refresh(self, load: SchedulerStats | None) -> None:
        """Publish the load between steps, where blocks are also reserved and freed."""
        if not self.paused:
            self._adapters.update_scheduler_stats(load)
            self._logger.record(load, None)

    def _follow(
        self, followed: _Followed, output: EngineCoreOutput, at: float, iteration: IterationStats
    ) -> None:
        """Follow an output as vLLM's `OutputProcessor` does."""
        stats, request = followed.stats, followed.request
        iteration.update_from_output(output, at, followed.prefills, stats, self._adapters, followed.adapter)
        followed.prefills = False
        if output.prefill_stats is not None:
            followed.cached_tokens = output.prefill_stats.num_cached_tokens
        if output.finish_reason is None:
            iteration.num_corrupted_reqs += bool(output.num_nans_in_logits)  # the engine ends the request
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
