"""The encode role: only a model's own processors, towers and projectors. Independent of the network and caches."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from mmd_api.contract.errors import (
    BadLogitsError,
    CountMismatchError,
    UnsupportedInputError,
    UnsupportedModelError,
)
from mmd_api.contract.pools import Modality
from mmd_api.spec.media import MediaPolicy
from mmd_api.spec.model import ModelSpec
from mmd_workers.engine.cpu import library as cpu_library
from mmd_workers.engine.cpu.modules import own_memory, pack_linears
from mmd_workers.media.medium import Decoded, DecodedAudio, DecodedImage, DecodedVideo, MediumInfo
from mmd_workers.model import inputs as media_inputs
from mmd_workers.model import requirements, source
from mmd_workers.model.adapters import adapter_for
from mmd_workers.model.adapters.base import EMBEDDINGS, Adapter
from mmd_workers.model.frontend import HfFrontend, load_processor
from mmd_workers.model.inputs import MediaInputs
from mmd_workers.model.prompt import Feature, MediumLayout, ProcessedMedium
from mmd_workers.model.roles import load_role
from mmd_workers.model.tiles import follow_tiles


class HfEncoderModel:
    """Towers and projectors of one model. `process` may run in many threads, `encode` in one at a time."""

    def __init__(
        self,
        model: Any,
        processor: Any,
        adapter: Adapter,
        device: torch.device,
        dtype: torch.dtype,
        loaded_bytes: int,
        pooled_frames: int = 1,
    ) -> None:
        """`pooled_frames`: number of successive frames of a video that become one."""
        self.model = model
        self.loaded_bytes = loaded_bytes
        self.modalities: frozenset[Modality] = adapter.modalities(processor)
        self.device = device
        self.dtype = dtype
        self._adapter = adapter
        self._processor = processor
        self._pooled_frames = pooled_frames
        self._inputs = MediaInputs(processor, shapes_only=False)
        self._hidden_size = int(adapter.config.get_text_config().hidden_size)
        self._placeholder = {
            m: str(processor.tokenizer.convert_ids_to_tokens(adapter.placeholder_id(m)))
            for m in self.modalities
        }
        self._lock = threading.Lock()

    def frontend(self, policy: MediaPolicy | None = None) -> HfFrontend:
        """A frontend that lays out media with this model's own processor, within a policy's limits (None: the default policy)."""
        return HfFrontend(
            self._processor.tokenizer,
            self._processor,
            self._adapter,
            policy or MediaPolicy(),
            frozenset(),
            0,
            self._pooled_frames,
        )

    def feature_headers(self, modality: Modality, num_tokens: int) -> dict[str, tuple[str, list[int]]]:
        """Name -> (dtype, shape) of the tensors that `encode` will return for a medium of this many tokens."""
        names = [EMBEDDINGS] + (self._adapter.extra_names() if modality != "audio" else [])
        dtype = str(self.dtype).removeprefix("torch.")
        return {name: (dtype, [num_tokens, self._hidden_size]) for name in names}

    def process(self, medium: Decoded, layout: MediumLayout) -> ProcessedMedium:
        """Preprocess a medium, or one of its `frame_pooling.clips`, on the CPU with the model's own processor; safe in a thread.

        Raises:
            UnsupportedInputError: the medium has another modality than the layout.
            CountMismatchError: processing arrived at other numbers than the layout.
        """
        return self._processed(self._run_processor(medium, layout), layout)

    def blank(self, info: MediumInfo, layout: MediumLayout) -> ProcessedMedium:
        """The result of `process` for a medium of these dimensions without content, for measuring."""
        blank = self._processed(self._blank(info, layout), layout)
        for name, tensor in blank.tensors.items():
            if not any(tensor.stride()):  # only a shape; some towers drop zeros as padding
                blank.tensors[name] = torch.ones((), dtype=tensor.dtype).expand(tensor.shape)
        return blank

    def _blank(self, info: MediumInfo, layout: MediumLayout) -> media_inputs.Processed:
        shapes, sampling = MediaInputs(self._processor, shapes_only=True), layout.sampling
        if layout.modality == "audio":
            silence = np.broadcast_to(np.float32(0), (sampling.num_samples,))
            return self._adapter.audio(shapes, silence)
        count = len(sampling.timed_indices)
        size = [count] * (layout.modality == "video") + [3, info.height, info.width]
        pixels = torch.empty(size, dtype=torch.uint8, device="meta")
        if layout.modality == "image":
            return self._adapter.image(shapes, pixels, sampling.size)
        frames, fps, total = sampling.timed_indices, info.fps, info.num_frames
        return self._adapter.video(shapes, pixels, frames, fps, total, sampling.size)

    def _processed(self, processed: media_inputs.Processed, layout: MediumLayout) -> ProcessedMedium:
        count = processed.replacement.count(self._placeholder[layout.modality])
        facts = media_inputs.geometry(processed.outputs)
        expected = {name: layout.geometry.get(name) for name in facts}
        if count != layout.num_tokens or facts != expected:
            raise CountMismatchError(
                f"the {layout.modality} was laid out as {layout.num_tokens} tokens with {expected}, but processing it produced "
                f"{count} with {facts}; the decoded size differs from its header"
            )
        tensors = media_inputs.tensors(processed.outputs)
        run = self._adapter.tower_run(layout.modality)
        return ProcessedMedium(
            layout.modality,
            tensors,
            facts,
            count,
            (layout.modality, run.key(tensors, count)),
            run.part_tokens(tensors, count),
        )

    def part(self, medium: ProcessedMedium, first: int, last: int) -> ProcessedMedium:
        """The parts [first, last) of a medium, to be run without the others. They give the rows of the medium at that place."""
        if (first, last) == (0, medium.parts):
            return medium
        tensors = self._adapter.tower_run(medium.modality).part(medium.tensors, first, last)
        tokens = medium.part_tokens[first:last]
        return replace(medium, tensors=tensors, num_tokens=sum(tokens), part_tokens=tokens)

    def encode(self, batch: Sequence[ProcessedMedium]) -> list[Feature]:
        """Run the tower and projector on media of one `shape_key`. Features are contiguous and in CPU memory.

        Raises:
            ValueError: the media cannot share a run.
            CountMismatchError: the tower returned another number of rows than was laid out.
            BadLogitsError: the tower returned values that are not finite. An engine would notice only at the logits, and its prefix cache
                would have their KV until then.
        """
        if len({medium.shape_key for medium in batch}) != 1:
            raise ValueError("all media of a batch must have the same shape_key")
        modality = batch[0].modality
        joined = self._adapter.tower_run(modality).join([medium.tensors for medium in batch])
        with self._lock, torch.no_grad():
            moved = {name: self._moved(tensor) for name, tensor in joined.items()}
            output = self._adapter.features(self.model, modality, moved)
            rows = {EMBEDDINGS: self._adapter.scale_features(_rows(_main(output)))}
            for level, extra in enumerate(getattr(output, "deepstack_features", None) or []):
                rows[f"deepstack.{level}"] = _rows(extra)
        counts = [m.num_tokens for m in batch]
        names = set(self.feature_headers(modality, 0))
        for name, tensor in rows.items():
            if tensor.shape[0] != sum(counts):
                raise CountMismatchError(
                    f"the {modality} tower returned {tensor.shape[0]} rows of {name} where {sum(counts)} were laid out; "
                    "the processor settings and the weights of this checkpoint do not match"
                )
        if names != set(rows):
            raise CountMismatchError(
                f"the {modality} tower returned {sorted(rows)}, but {sorted(names)} were declared"
            )
        rows = {name: tensor.to("cpu", self.dtype) for name, tensor in rows.items()}
        if not all(torch.isfinite(torch.stack(torch.aminmax(tensor))).all() for tensor in rows.values()):
            raise BadLogitsError(
                f"the {modality} tower computed a feature that is not finite; check the model's weights and spec.model.dtype"
            )
        split = {name: torch.split(tensor, counts) for name, tensor in rows.items()}
        return [
            Feature(
                modality,
                {
                    name: parts[i].clone(memory_format=torch.contiguous_format)
                    for name, parts in split.items()
                },
            )
            for i in range(len(batch))
        ]

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device, self.dtype if tensor.is_floating_point() else None)

    def _run_processor(self, medium: Decoded, layout: MediumLayout) -> media_inputs.Processed:
        if isinstance(medium, DecodedImage) and layout.modality == "image":
            pixels = torch.from_numpy(medium.pixels).permute(2, 0, 1)
            return self._adapter.image(self._inputs, pixels, layout.sampling.size)
        if isinstance(medium, DecodedVideo) and layout.modality == "video":
            frames = torch.from_numpy(medium.frames).permute(0, 3, 1, 2)
            fps, total = layout.geometry["source_fps"], layout.geometry["source_num_frames"]
            sampling = layout.sampling
            return self._adapter.video(
                self._inputs, frames, sampling.timed_indices, fps, total, sampling.size
            )
        if isinstance(medium, DecodedAudio) and layout.modality == "audio":
            return self._adapter.audio(self._inputs, medium.waveform)
        raise UnsupportedInputError(
            f"a {layout.modality} was laid out, but {type(medium).__name__} was decoded"
        )


def _main(output: Any) -> Any:
    """The rows of a `get_*_features` result, whose form depends on the architecture."""
    if isinstance(output, (list, tuple, torch.Tensor)) and not hasattr(output, "last_hidden_state"):
        return output
    pooled = getattr(output, "pooler_output", None)
    return pooled if pooled is not None else output.last_hidden_state


def _rows(value: Any) -> torch.Tensor:
    """Tensors at any depth of nesting as [rows, hidden]."""
    if isinstance(value, (list, tuple)):
        return torch.cat([_rows(v) for v in value])
    return value.reshape(-1, value.shape[-1])  # type: ignore[no-any-return]


def takes_media(model: ModelSpec) -> bool:
    """Whether a model has towers. Reads settings alone, no weights.

    Raises:
        UnsupportedModelError: the model is missing, or cannot be served.
    """
    folder = source.resolve(model, weights=False)
    adapter = adapter_for(source.load_config(folder))
    _, processor = load_processor(folder, adapter, model)
    return processor is not None and bool(adapter.modalities(processor))


def load_encoder(model: ModelSpec, device: torch.device) -> HfEncoderModel:
    """Load the towers and projectors of a model. On a CPU their float32 linear layers run on packed weights.

    From then on cuDNN's convolutions in this process compute float32 without TF32, whose errors are larger than rounding and differ
    between batches.

    Raises:
        UnsupportedModelError: the model is missing, takes no media, or lacks weights; the message names the field and the remedy.
    """
    folder = source.resolve(model, weights=True)
    config = source.load_config(folder)
    adapter = adapter_for(config)
    _, processor = load_processor(folder, adapter, model)
    if processor is None or not adapter.modalities(processor):
        raise UnsupportedModelError(
            f"spec.encoder: {model.id!r} accepts text only and needs no encoder; remove the pool or choose a multimodal model"
        )
    follow_tiles(config, processor)
    dtype = source.resolve_dtype(model, config)
    loaded, loaded_bytes = load_role(folder, config, "encoder", dtype, device)
    requirements.check(loaded, adapter)
    if (kernels := cpu_library.kernels(device, dtype)) is not None:
        pack_linears(loaded, kernels)
        own_memory(loaded)
    torch.backends.cudnn.allow_tf32 = False
    return HfEncoderModel(loaded, processor, adapter, device, dtype, loaded_bytes, model.pooled_video_frames)
