"""A placed request in vLLM's terms."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import (
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    MultiModalSharedField,
    PlaceholderRange,
)
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.request import Request

from mmd_api.contract.errors import StepFailedError, UnsupportedParameterError
from mmd_workers.engine.choosing.sampler import uniform
from mmd_workers.model.prompt import Feature
from mmd_workers.vllm_engine.sampling import draw_of
from mmd_workers.wire.messages.message_parts import FeatureRef
from mmd_workers.wire.messages.prefill import GenerateRequest

ON_HOST = MultiModalSharedField(
    batch_size=1, keep_on_cpu=True
)  # else vLLM drops it once the medium is computed
FACTS = {"video_second_per_grid": "second_per_grid_ts"}  # as transformers and vLLM call them
FRAMES = ("qwen3_vl", "qwen3_vl_moe")
"""Model types for whose videos vLLM looks for the token that opens a frame, from the placeholder's offset on: it must not be behind that."""


class RequestBuilder:
    """Makes vLLM's requests of placed ones."""

    def __init__(
        self,
        eos_token_ids: frozenset[int],
        block_hasher: Callable[[Request], list[Any]] | None,
        frame_token_id: int | None = None,
        *,
        drafts: bool = False,
        seeded: bool = True,
        lora_requests: Mapping[str, LoRARequest] | None = None,
    ) -> None:
        """`frame_token_id`: opens a frame of a video, where vLLM looks for it. `drafts`: with speculative decoding. `seeded`: whether vLLM
        can draw from a seed; on CPUs its step fails where a prompt with one is computed in parts. `lora_requests`: of the adapters that are
        loaded, by name."""
        self._eos = sorted(eos_token_ids)
        self._drafts = drafts
        self._seeded = seeded
        self._loras = dict(lora_requests or {})
        self._block_hasher = block_hasher
        self._frame_token_id = frame_token_id

    def build(
        self,
        name: str,
        request: GenerateRequest,
        output_token_ids: Sequence[int],
        max_tokens: int,
    ) -> Request:
        """A request that generates up to `max_tokens` after `output_token_ids`, which count as part of its prompt. vLLM does not learn of its
        grammar.

        Raises:
            StepFailedError: it is for an adapter that is not loaded.
            UnsupportedParameterError: it has guidance, or a grammar or rules about logits beside speculative decoding.
        """
        check_unguided(request.companion_tokens)
        return Request(
            request_id=name,
            prompt_token_ids=[*request.token_ids, *output_token_ids],
            sampling_params=self._sampling(request, output_token_ids, max_tokens),
            pooling_params=None,
            arrival_time=request.arrived,
            mm_features=[self._medium(ref, request.token_ids) for ref in in_order(request.features)],
            block_hasher=self._block_hasher,  # its hashes contain the adapter and the salt
            lora_request=self._lora(request.adapter),
            cache_salt=request.cache_salt or None,
        )

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters that are loaded."""
        return tuple(self._loras)

    def _lora(self, adapter: str) -> LoRARequest | None:
        if adapter and adapter not in self._loras:
            raise StepFailedError(
                f"adapter {adapter} is not loaded on this pod; gateway and language model serve different settings"
            )
        return self._loras.get(adapter)

    def _sampling(
        self, request: GenerateRequest, output_token_ids: Sequence[int], max_tokens: int
    ) -> SamplingParams:
        """Greedy with `Draws` and `Constraints`, which vLLM does not take beside speculative decoding: there it draws itself, from a seed that depends on the
        first token's index, so that a pod that goes on with a request does not repeat the draws of the one before; gateways refuse rules."""
        wanted, first = request.sampling, len(output_token_ids)
        ends = [*([] if wanted.ignore_eos else self._eos), *wanted.stop_token_ids]
        if self._drafts and (wanted.grammar is not None or wanted.rules is not None or wanted.min_p > 0):
            raise UnsupportedParameterError(  # from a gateway that does not know yet
                "response_format, structured_outputs, min_p, penalties, logit_bias, allowed_token_ids and bad_words are not supported beside "
                "spec.engine's speculative decoding; omit them, or remove `speculative` from the spec"
            )
        params = SamplingParams(
            temperature=0.0,
            logprobs=wanted.logprobs,
            prompt_logprobs=(wanted.logprobs or 0) if wanted.prompt_logprobs and not first else None,
            max_tokens=max_tokens,
            min_tokens=min(max(0, wanted.min_tokens - first), max_tokens),
            ignore_eos=wanted.ignore_eos,
            stop_token_ids=ends,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        if not self._drafts:
            params.extra_args = draw_of(wanted, first)
        elif wanted.temperature > 0:
            params.temperature, params.top_p, params.top_k = wanted.temperature, wanted.top_p, wanted.top_k
            params.seed = int(uniform(wanted.seed, first) * 2**53) if self._seeded else None
        return params

    def _medium(self, ref: FeatureRef, token_ids: Sequence[int]) -> MultiModalFeatureSpec:
        """Where a medium is and what the model must know of its shape, without its pixels."""
        shape = {
            FACTS.get(name, name): MultiModalFieldElem(data=_fact(value), field=ON_HOST)
            for name, value in ref.geometry.items()
        }
        before = ref.ranges[0][0] - 1
        opened = ref.modality == "video" and before >= 0 and token_ids[before] == self._frame_token_id
        return MultiModalFeatureSpec(
            data=MultiModalKwargsItem(shape),
            modality=ref.modality,
            identifier=ref.feature_id,
            mm_position=placeholder(ref.ranges, before if opened else None),
            mm_hash=ref.feature_id,
        )


def check_unguided(companion_tokens: int) -> None:
    """Refuse a request with a companion, from a gateway that does not know yet.

    Raises:
        UnsupportedParameterError: it has one.
    """
    if companion_tokens:
        raise UnsupportedParameterError(
            "guidance_scale is not supported with spec.engine.type VLLM; omit it, or set spec.engine.type to Native"
        )


def in_order(features: Sequence[FeatureRef]) -> list[FeatureRef]:
    """Media by their place in the prompt, as vLLM expects them."""
    return sorted(features, key=lambda ref: ref.ranges[0][0])


def placeholder(ranges: Sequence[Sequence[int]], offset: int | None = None) -> PlaceholderRange:
    """A medium's runs of placeholders ([start, length]) as one range, from `offset` on if that is before them, with a mask where text
    stands between them."""
    if offset is None:
        offset = ranges[0][0]
    length = sum(ranges[-1]) - offset
    if len(ranges) == 1 and offset == ranges[0][0]:
        return PlaceholderRange(offset=offset, length=length)
    mask = torch.zeros(length, dtype=torch.bool)
    for start, count in ranges:
        mask[start - offset : start - offset + count] = True
    return PlaceholderRange(offset=offset, length=length, is_embed=mask)


def joined(feature: Feature) -> torch.Tensor:
    """A feature as vLLM takes it: embeddings, then deepstack levels, side by side [tokens, width]."""
    names = ["embeddings", *sorted(name for name in feature.tensors if name != "embeddings")]
    tensors = [feature.tensors[name] for name in names]
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=-1)


def _fact(value: Any) -> Any:
    """A shape fact of one medium: vLLM has no axis for media."""
    if isinstance(value, list):
        tensor = torch.tensor(value)
        return tensor[0] if tensor.dim() > 1 and len(tensor) == 1 else tensor
    return value
