"""vLLM's scheduler with room for short prompts beside long ones, and with media that no step cuts.

vLLM fills a step in the order of admission. A long prompt then takes whole steps, and delays the short ones that come
after it, and the sequences that have begun to decode since. Where a model reads a medium in both directions, vLLM stops
before the medium that a step would cut, but not within one or at its first token.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from mmd_api.contract.errors import CapacityError
from mmd_workers.vllm_engine.features import FeatureConnector


class PoolScheduler(Scheduler):
    """Runs decodes first, then prompts with up to half a step left to compute, then longer ones.

    While a short prompt waits, or a sequence whose KV came from another pod, one long prompt gets half of what the
    decodes leave of a step, and the others rest. So neither kind stops the other.

    Where the model reads media in both directions (`disable_chunked_mm_input`), each unbroken run of a medium's tokens
    is computed in one step, however many of its tokens are cached.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._own_threshold = self.scheduler_config.long_prefill_token_threshold  # 0: the spec sets none
        self._short = self.max_num_scheduled_tokens // 2
        self._longest_run = 0  # tokens of the longest run of a medium so far that must not be cut
        self._due: Request | None = None  # long prompt that found no room in the last step
        self._in_vain = False  # the last step left room, and nothing that waits could use it

    def check_media(self, request: Request) -> None:
        """Check that each run of a medium fits into a step, if it must.

        Raises:
            CapacityError: one does not.
        """
        for modality, tokens in self._uncut_runs(request):
            if tokens > self.max_num_scheduled_tokens:
                raise CapacityError(
                    f"the model reads the {modality} in both directions, so its {tokens} tokens take one step, but steps have "
                    f"{self.max_num_scheduled_tokens}: raise spec.prefill.chunkTokens, or maxNumBatchedTokens in spec.engine"
                )

    def add_request(self, request: Request) -> None:
        """Queue a request. A threshold never cuts its media."""
        self._longest_run = max(self._longest_run, *(tokens for _, tokens in self._uncut_runs(request)), 0)
        super().add_request(request)

    def _uncut_runs(self, request: Request) -> list[tuple[str, int]]:
        """Return modality and number of tokens of each run that must not be cut."""
        if not self.scheduler_config.disable_chunked_mm_input:
            return []
        return [
            (feature.modality, last + 1 - first)
            for feature in request.mm_features
            for first, last in feature.mm_position.extract_embeds_range()
        ]

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Plan a step."""
        tokens = {request: self._computable(request) for request in self.running}
        self.running.sort(key=lambda request: self._rank(request, tokens[request]))
        long = [request for request in self.running if tokens[request] > self._short]
        postponed: list[Request] = []
        self._set_threshold(self._own_threshold)
        before, makes_room = set(self.running), len(self.running) < self.max_num_active_reqs
        if long and makes_room and not self._in_vain:
            decodes = sum(1 + len(request.spec_token_ids) for request in self.running if tokens[request] == 1)
            postponed = self._make_room(long, self.max_num_scheduled_tokens - decodes)
        try:
            plan = super().schedule(throttle_prefills)
        finally:
            for request in postponed:
                self.waiting.add_request(request)
        left_room = self.scheduler_config.long_prefill_token_threshold != self._own_threshold
        self._in_vain = left_room and before.issuperset(self.running)
        self._due = long[0] if long and long[0].request_id not in plan.num_scheduled_tokens else None
        return plan

    def _rank(self, request: Request, tokens: int) -> int:
        if tokens <= 1:
            return 0
        return 1 if request is self._due else 2 if tokens <= self._short else 3

    def _set_threshold(self, tokens: int) -> None:
        """Set the most tokens of a prompt in the coming step; 0: no limit."""
        threshold = max(tokens, self._longest_run) if tokens else 0
        self.scheduler_config.long_prefill_token_threshold = threshold

    def _make_room(self, long: list[Request], tokens: int) -> list[Request]:
        """Leave half of `tokens` to what waits for little, if anything does. Returns the long prompts that were taken
        out of the queue, so that they do not come first.

        `long`: those that run.
        """
        waiting = {request: self._computable(request) for request in self.waiting}
        if not self.kv_holding_waiting and not any(0 < count <= self._short for count in waiting.values()):
            return []
        share = max(1, tokens // 2)
        self._set_threshold(min(share, self._own_threshold or share))
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

    def _try_schedule_encoder_inputs(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int, *args: Any, **options: Any
    ) -> tuple[list[int], int, int, list[int], list[int]]:
        """Shorten a request's part of a step to the tokens whose features are here, and whose media it does not cut."""
        if self.scheduler_config.disable_chunked_mm_input:
            num_new_tokens = _uncut(request, num_computed_tokens, num_new_tokens)
        return super()._try_schedule_encoder_inputs(  # type: ignore[no-any-return]
            request, num_computed_tokens, num_new_tokens, *args, **options
        )


def _uncut(request: Request, start: int, tokens: int) -> int:
    """Return how many of the `tokens` from `start` on come before the run of a medium that would be cut."""
    end = start + tokens
    for feature in request.mm_features:
        place = feature.mm_position
        if place.offset < end < place.offset + place.length:
            for first, last in place.extract_embeds_range():
                if first < end <= last:
                    return int(max(0, first - start))
    return tokens
