"""vLLM's scheduler with room for short prompts beside long ones.

vLLM fills a step in the order of admission. A long prompt then takes whole steps, and delays the short ones that come
after it, and the sequences that have begun to decode since.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from mmd_workers.vllm_engine.features import FeatureConnector


class PoolScheduler(Scheduler):
    """Runs decodes first, then prompts with up to half a step left to compute, then longer ones.

    While a short prompt waits, or a sequence whose KV came from another pod, one long prompt gets half of what the
    decodes leave of a step, and the others rest. So neither kind stops the other.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._own_threshold = self.scheduler_config.long_prefill_token_threshold  # 0: the spec sets none
        self._short = self.max_num_scheduled_tokens // 2

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Plan a step."""
        tokens = {request: self._computable(request) for request in self.running}
        self.running.sort(key=lambda request: (tokens[request] > 1) + (tokens[request] > self._short))
        long = [request for request in self.running if tokens[request] > self._short]
        postponed: list[Request] = []
        self.scheduler_config.long_prefill_token_threshold = self._own_threshold
        if long and len(self.running) < self.max_num_active_reqs:
            decodes = sum(1 + len(request.spec_token_ids) for request in self.running if tokens[request] == 1)
            postponed = self._make_room(long, self.max_num_scheduled_tokens - decodes)
        try:
            return super().schedule(throttle_prefills)
        finally:
            for request in postponed:
                self.waiting.add_request(request)

    def _make_room(self, long: list[Request], tokens: int) -> list[Request]:
        """Leave half of `tokens` to what waits for little, if anything does. Returns the long prompts that were taken
        out of the queue, so that they do not come first.

        `long`: those that run.
        """
        waiting = {request: self._computable(request) for request in self.waiting}
        if not self.kv_holding_waiting and not any(0 < count <= self._short for count in waiting.values()):
            return []
        share = max(1, tokens // 2)
        self.scheduler_config.long_prefill_token_threshold = min(share, self._own_threshold or share)
        for request in long[1:]:
            request.next_decode_eligible_step = self.current_step + 2  # after the coming step
        postponed = [request for request, count in waiting.items() if count > self._short]
        self.waiting.remove_requests(postponed)
        return postponed

    def _computable(self, request: Request) -> int:
        """Return how many of a request's known tokens lack KV and could be computed with the features that have come."""
        computed, end = request.num_computed_tokens, request.num_tokens
        if not computed and (request.mm_features or end > self._short):
            _, computed, _ = self.kv_cache_manager.get_computed_blocks(request)
        if request.mm_features:
            assert isinstance(self.ec_connector, FeatureConnector)
            end = self.ec_connector.computable_until(request, computed)
        return int(max(0, end - computed))
