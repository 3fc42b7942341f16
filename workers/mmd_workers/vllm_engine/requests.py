"""Translates a placed request into vLLM's terms."""

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

# Without `keep_on_cpu` vLLM drops the field once the medium is computed.
ON_HOST = MultiModalSharedField(batch_size=1, keep_on_cpu=True)
FACTS = {"video_second_per_grid": "second_per_grid_ts"}  # transformers' name: vLLM's name
FRAMES = ("qwen3_vl", "qwen3_vl_moe")
"""Model types with videos for which vLLM looks for the token that opens a frame. The placeholder must not
begin after that token."""


class RequestBuilder:
    """Builds vLLM's requests from placed ones."""

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
        """`frame_token_id`: token that opens a frame of a video, if vLLM looks for it. `drafts`: speculative
        decoding is on.

        `seeded`: vLLM can draw from a seed; on CPUs its step fails if a prompt with a seed is computed in
        parts. `lora_requests`: requests for the loaded adapters, by name.
        """
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
        """Build a request that generates up to `max_tokens` after `output_token_ids`, which count as part of its prompt.

        vLLM does not learn of its grammar.

        Raises:
            StepFailedError: the request is for an adapter that is not loaded.
            UnsupportedParameterError: it has guidance, or a grammar or logit rules together with speculative decoding.
        """
        check_unguided(request.companion_tokens)
        return Request(
            request_id=name,
            prompt_token_ids=[*request.token_ids, *output_token_ids],
            sampling_params=self._sampling(request, output_token_ids, max_tokens),
            pooling_params=None,
            arrival_time=request.arrived,
            mm_features=[self._medium(ref, request.token_ids) for ref in in_order(request.features)],
            block_hasher=self._block_hasher,  # its hashes include the adapter and the salt
            lora_request=self._lora(request.adapter),
            cache_salt=request.cache_salt or None,
        )

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the loaded adapters."""
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
        """Return vLLM's sampling parameters: greedy, because `Draws` and `Constraints` choose the tokens.

        vLLM does not accept these beside speculative decoding. There it draws itself, from a seed that
        depends on the first token's index, so that a pod that continues a request does not repeat the draws
        of the pod before. Gateways refuse rules then.
        """
        sampling, first = request.sampling, len(output_token_ids)
        ends = [*([] if sampling.ignore_eos else self._eos), *sampling.stop_token_ids]
        if self._drafts and (
            sampling.grammar is not None or sampling.rules is not None or sampling.min_p > 0
        ):
            raise UnsupportedParameterError(  # the gateway does not know of speculative decoding yet
                "response_format, structured_outputs, min_p, penalties, logit_bias, allowed_token_ids and bad_words are not supported beside "
                "spec.engine's speculative decoding; omit them, or remove `speculative` from the spec"
            )
        params = SamplingParams(
            temperature=0.0,
            logprobs=sampling.logprobs,
            prompt_logprobs=(sampling.logprobs or 0) if sampling.prompt_logprobs and not first else None,
            max_tokens=max_tokens,
            min_tokens=min(max(0, sampling.min_tokens - first), max_tokens),
            ignore_eos=sampling.ignore_eos,
            stop_token_ids=ends,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        if not self._drafts:
            params.extra_args = draw_of(sampling, first)
        elif sampling.temperature > 0:
            params.temperature, params.top_p, params.top_k = (
                sampling.temperature,
                sampling.top_p,
                sampling.top_k,
            )
            params.seed = int(uniform(sampling.seed, first) * 2**53) if self._seeded else None
        return params

    def _medium(self, ref: FeatureRef, token_ids: Sequence[int]) -> MultiModalFeatureSpec:
        """Describe a medium's place and the facts of its shape that the model needs, without its pixels."""
        shape = {
            FACTS.get(name, name): MultiModalFieldElem(data=_fact(value), field=ON_HOST)
            for name, value in ref.geometry.items()
        }
        preceding = ref.ranges[0][0] - 1
        opens_frame = (
            ref.modality == "video" and preceding >= 0 and token_ids[preceding] == self._frame_token_id
        )
        return MultiModalFeatureSpec(
            data=MultiModalKwargsItem(shape),
            modality=ref.modality,
            identifier=ref.feature_id,
            mm_position=placeholder(ref.ranges, preceding if opens_frame else None),
            mm_hash=ref.feature_id,
        )


def check_layout(request: GenerateRequest, vocab_size: int) -> None:
    """Refuse a prompt that would end the engine in its step, and then that of the next pod the request is placed on."""
    length = len(request.token_ids)
    ids = [*request.token_ids, *request.output_token_ids]
    if not ids or min(ids) < 0 or max(ids) >= vocab_size:
        raise StepFailedError(f"a token of the prompt is not one of the model's {vocab_size}")
    for ref in request.features:
        ends = [0, *(end for start, count in ref.ranges for end in (start, start + count))]
        if (
            not ref.ranges
            or sum(count for _, count in ref.ranges) != ref.num_tokens
            or ends != sorted(ends)
            or ends[-1] > length
        ):
            raise StepFailedError(
                f"the placeholders of a {ref.modality} do not fit into the prompt of {length} tokens; gateway and language model serve "
                "different models or versions"
            )


def check_runs(request: Request, model: Any | None) -> None:
    """Compute rotary positions as the model does in its first step, where a missing fact would end the engine.

    `model`: None if it has no such positions.
    """
    if model is None:
        return
    tokens = request.prompt_token_ids or []
    try:
        positions, _ = model.get_mrope_input_positions(tokens, request.mm_features)
        if positions.shape[-1] != len(tokens):
            raise ValueError(f"{positions.shape[-1]} positions for {len(tokens)} tokens")
    except Exception as error:
        raise StepFailedError(
            f"vLLM cannot place the media of this prompt: {type(error).__name__}: {error}; gateway and language model serve different "
            "models or versions"
        ) from error


def check_unguided(companion_tokens: int) -> None:
    """Refuse a request with a companion. Its gateway does not know yet that vLLM is the engine.

    Raises:
        UnsupportedParameterError: the request has a companion.
    """
    if companion_tokens:
        raise UnsupportedParameterError(
            "guidance_scale is not supported with spec.engine.type VLLM; omit it, or set spec.engine.type to Native"
        )


def in_order(features: Sequence[FeatureRef]) -> list[FeatureRef]:
    """Sort media by their place in the prompt, as vLLM expects."""
    return sorted(features, key=lambda ref: ref.ranges[0][0])


def placeholder(ranges: Sequence[Sequence[int]], offset: int | None = None) -> PlaceholderRange:
    """Join a medium's runs of placeholders ([start, length]) into one range, with a mask if text is between them.

    The range begins at `offset`, if given, which is not after the first run.
    """
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
    """Join a feature's tensors as vLLM expects: embeddings, then deepstack levels, side by side [tokens, width]."""
    names = ["embeddings", *sorted(name for name in feature.tensors if name != "embeddings")]
    tensors = [feature.tensors[name] for name in names]
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=-1)


def _fact(value: Any) -> Any:
    """Convert a shape fact of one medium: vLLM has no axis for media."""
    if isinstance(value, list):
        tensor = torch.tensor(value)
        return tensor[0] if tensor.dim() > 1 and len(tensor) == 1 else tensor
    return value
