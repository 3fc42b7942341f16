"""Brings features to vLLM's model, and limits what vLLM schedules while they are on their way.

vLLM asks two objects: its connector for encoder outputs, and the manager of its encoder cache. Both use the
engine's `Shelf`. So a prompt runs up to its first medium without a feature and continues when the feature
arrives, and other requests are not delayed. vLLM never plans to run a tower: it has no pixels, and a medium
without pixels would end its engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
)
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

MOST_ROWS = "most_rows"  # setting: feature rows that steps may hold on the model's device
LEAST_AHEAD_TOKENS = 64
"""Fewer tokens than this between two media are not computed ahead of the second medium's feature: a step for
them takes as long as one without, and the feature may arrive meanwhile."""


class Shelf:
    """Features of an engine's requests, by identity, until no request needs them for its next token.

    Later tokens are decoded from KV alone. A request that is preempted then starts again without its
    features, and its role brings them once more: the role's store may still have them, within a budget that
    this shelf does not know.
    """

    def __init__(self) -> None:
        self._features: dict[str, torch.Tensor] = {}
        self._users: dict[str, set[str]] = {}
        self._held: dict[str, set[str]] = {}  # identities of features, by request
        # Requests of the newest step that wait for a feature: number of computed or cached tokens.
        self.short: dict[str, int] = {}
        # Called when vLLM has planned a step.
        self.on_plan: Callable[[SchedulerOutput], None] = lambda _: None

    def put(self, identity: str, request_id: str, feature: torch.Tensor) -> None:
        """Keep a feature [tokens, width] for a request."""
        self._features[identity] = feature
        self._hold(identity, request_id)

    def get(self, identity: str) -> torch.Tensor | None:
        """Return the feature, if it is on the shelf."""
        return self._features.get(identity)

    def __contains__(self, identity: str) -> bool:
        return identity in self._features

    def share(self, identity: str, request_id: str) -> bool:
        """Keep a feature that another request brought for this request too. False: the feature is not on the shelf."""
        if identity not in self._features:
            return False
        self._hold(identity, request_id)
        return True

    def _hold(self, identity: str, request_id: str) -> None:
        self._users.setdefault(identity, set()).add(request_id)
        self._held.setdefault(request_id, set()).add(identity)

    def release(self, request_id: str) -> None:
        """Release a request's features, and remove those that no other request uses."""
        for identity in self._held.pop(request_id, ()):
            users = self._users[identity]
            users.discard(request_id)
            if not users:
                del self._users[identity], self._features[identity]


_shelves: dict[str, Shelf] = {}


def shelf_of(engine_id: str) -> Shelf:
    """Return the shelf of an engine in this process. The engine's code and both sides of vLLM's connector share it."""
    return _shelves.setdefault(engine_id, Shelf())


@dataclass
class Loads(ECConnectorMetadata):
    """Features that the model's side loads in a step."""

    features: dict[str, torch.Tensor] = field(default_factory=dict)


class FeatureConnector(ECConnectorBase):
    """vLLM's connector for encoder outputs, backed by a `Shelf`."""

    def __init__(self, vllm_config: VllmConfig, role: ECConnectorRole) -> None:
        super().__init__(vllm_config=vllm_config, role=role)
        assert vllm_config.ec_transfer_config is not None
        self._shelf = shelf_of(str(vllm_config.ec_transfer_config.engine_id))
        self._loads = Loads()

    # --- the scheduler's side -------------------------------------------------------------------------------------

    def has_cache_item(self, identifier: str) -> bool:
        """Return whether the feature is on the shelf."""
        return identifier in self._shelf

    def ensure_cache_available(self, request: Request, num_computed_tokens: int) -> bool:
        """Return whether enough tokens before the request's first medium without a feature can be computed now.

        If there is such a medium, the request is reported as short of it.
        """
        end = self.computable_until(request, num_computed_tokens)
        if end < request.num_tokens:
            self._shelf.short[request.request_id] = num_computed_tokens
        return num_computed_tokens < end

    def computable_until(self, request: Request, num_computed_tokens: int) -> int:
        """Return how many leading tokens may have been computed before the next feature comes; all of them if none is missing."""
        previous_end = 0
        for feature in request.mm_features:
            place = feature.mm_position
            if place.offset + place.length > num_computed_tokens and feature.identifier not in self._shelf:
                cached = num_computed_tokens if request.status != RequestStatus.RUNNING else 0
                enough = place.offset - max(previous_end, cached) >= LEAST_AHEAD_TOKENS
                return int(place.offset if enough else min(previous_end, place.offset))
            previous_end = place.offset + place.length
        return int(request.num_tokens)

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        """Add a feature that the model's side needs in the step being planned."""
        identity = request.mm_features[index].identifier
        if (feature := self._shelf.get(identity)) is not None:
            self._loads.features[identity] = feature

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Loads:
        """Return the features that the step needs.

        Blocks are allocated and nothing has run, so this is when the engine's own code looks at the plan.
        """
        self._shelf.on_plan(scheduler_output)
        for unused in scheduler_output.free_encoder_mm_hashes:
            self._loads.features.pop(unused, None)  # its request was planned and then preempted
        loads, self._loads = self._loads, Loads()
        return loads

    # --- the model's side -----------------------------------------------------------------------------------------

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        """Put the step's features into the model's cache, on its device."""
        loads = self._get_connector_metadata()
        assert isinstance(loads, Loads)
        model = self._vllm_config.model_config
        device = self._vllm_config.device_config.device
        for identity, feature in loads.features.items():
            encoder_cache[identity] = feature.to(device, model.dtype)

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any) -> None:
        """Save nothing, because no tower runs here."""


class FeatureCacheManager(EncoderCacheManager):
    """vLLM's accounting of encoder outputs, without space for media that lack a feature.

    Nothing stays that no request needs: the shelf has what prompts lack, and a feature that spoiled a request
    must not be used again.
    """

    def __init__(self, cache_size: int, shelf: Shelf) -> None:
        super().__init__(cache_size)
        self._shelf = shelf

    @classmethod
    def create_manager(cls, *, cache_size: int, vllm_config: VllmConfig) -> FeatureCacheManager:
        """Make a manager with space for `most_rows` feature rows; no request has more. vLLM's own size
        assumes its own processor."""
        assert vllm_config.ec_transfer_config is not None
        shelf = shelf_of(str(vllm_config.ec_transfer_config.engine_id))
        return cls(vllm_config.ec_manager_config.manager_config[MOST_ROWS], shelf)

    def can_allocate(
        self, request: Request, input_id: int, encoder_compute_budget: int, num_embeds_to_schedule: int
    ) -> bool:
        """Return False until the medium's feature is here: the scheduler then stops before the medium.

        No tower runs, so the compute budget does not count.
        """
        if request.mm_features[input_id].identifier not in self._shelf:
            return False
        return bool(super().can_allocate(request, input_id, self.cache_size, num_embeds_to_schedule))

    def free_encoder_input(self, request: Request, input_id: int) -> None:
        """Make the model's side drop a feature with its last user. vLLM would keep it until it needs the space."""
        super().free_encoder_input(request, input_id)
        while self.freeable:
            identity, num_embeds = self.freeable.popitem()
            del self.cached[identity], self.num_embeds_by_hash[identity]
            self.freed.append(identity)
            self.num_free_slots += num_embeds
