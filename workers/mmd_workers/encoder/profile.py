"""Measures the memory of a tower run, besides the weights, with blank media. Independent of the network and the sandbox.

On a GPU the largest batches are run. On a CPU, where that would take long, a few small runs show how memory grows.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch

from mmd_api.contract.errors import MemoryBudgetError, UnsupportedInputError
from mmd_api.contract.pools import Modality
from mmd_api.spec.media import MediaPolicy
from mmd_api.spec.pools import EncoderBatching
from mmd_workers.basics.device import check_device
from mmd_workers.basics.memory import MEBIBYTE
from mmd_workers.engine.profile import LiveBytes
from mmd_workers.media.choice import SamplingChoice
from mmd_workers.media.medium import MediumInfo
from mmd_workers.model.interfaces import EncoderModel, Frontend
from mmd_workers.model.prompt import ProcessedMedium

log = logging.getLogger(__name__)

SMALL_SIDE, SMALL_FRAMES, SMALL_SECONDS, SMALL_FPS = 112, 2, 1.0, 2.0
FULLEST_TRIES = 6
SHAPES = (1.0, 4 / 3, 3 / 2, 2.0)
"""Aspect ratios among which the largest image is sought: models that cut tiles cut fewer from a square."""


@dataclass(frozen=True, slots=True)
class _Blank:
    """A medium without content, or parts of one, and its encoder work."""

    medium: ProcessedMedium
    work: int

    @property
    def elements(self) -> int:
        """Size of the tower's inputs, padding included."""
        return sum(tensor.numel() for tensor in self.medium.tensors.values() if tensor.is_floating_point())


@dataclass(frozen=True, slots=True)
class Growth:
    """How the bytes of a run grow with the size of its media and with their number, from three small runs.

    `smaller`, `small`: (size, bytes) of runs of one medium; `pair_bytes`: bytes of a run of two media of the size of `small`.
    """

    smaller: tuple[int, int]
    small: tuple[int, int]
    pair_bytes: int

    def bytes_at(self, size: float, items: int) -> int:
        """Bytes of a run of `items` media of this size.

        They are at least linear in the size, and quadratic if attention keeps its scores or a mask, for one medium or for the
        whole batch.
        """
        (smaller_size, fewer_bytes), (small_size, num_bytes) = self.smaller, self.small
        excess = 0.0
        if smaller_size < small_size < size:
            excess = max(
                0.0, (num_bytes / small_size - fewer_bytes / smaller_size) / (small_size - smaller_size)
            )
        item_bytes = num_bytes * size / small_size + excess * size * (size - small_size)
        shared_bytes = max(0, self.pair_bytes - 2 * num_bytes) / 2 * (size / small_size) ** 2
        return math.ceil(items * item_bytes + shared_bytes * items * (items - 1))


@dataclass(frozen=True, slots=True)
class TowerMemory:
    """Peak bytes of the largest tower run of all measurable modalities; `unknown`: each other modality, with the reason."""

    num_bytes: int = 0
    unknown: tuple[str, ...] = ()


def tower_memory(model: EncoderModel, policy: MediaPolicy, batching: EncoderBatching) -> TowerMemory:
    """The memory of the largest run within the limits on media and batches. An estimate on CPUs.

    On a GPU that does not hold the largest medium, the largest one that runs counts: the limits are upper bounds, and a larger
    medium fails alone, by name, while a pod that did not start would fail all of them.

    Raises:
        MemoryBudgetError: the GPU does not hold a run on the smallest medium of a modality.
    """
    audio = policy.audio.model_copy(update={"too_long": "Truncate"})  # cut to the model's window
    frontend = model.frontend(policy.model_copy(update={"audio": audio}))
    num_bytes, unknown = 0, []
    for modality in sorted(model.modalities):
        try:
            num_bytes = max(num_bytes, _of_modality(model, frontend, policy, batching, modality))
        except MemoryBudgetError:
            raise
        except Exception as error:  # noqa: BLE001  a processor may refuse the size, a model may need content
            check_device(error, model.device)
            reason = f"{type(error).__name__}: {str(error)[:300]}"
            log.warning(
                "no memory reserved for a %s in the tower: measuring it failed (%s); lower kvCachePercent if such media fail",
                modality,
                reason,
            )
            unknown.append(f"{modality}: {reason}")
    return TowerMemory(num_bytes, tuple(unknown))


def _of_modality(
    model: EncoderModel,
    frontend: Frontend,
    policy: MediaPolicy,
    batching: EncoderBatching,
    modality: Modality,
) -> int:
    if model.device.type != "cuda":
        large = one_run(model, largest(model, frontend, policy, modality), batching)
        return estimated(model, frontend, modality, large, batching)
    run, least = partial(_bytes_on_gpu, model), small(model, frontend, modality, 1)
    media = from_largest(model, frontend, policy, modality, batching)
    large = next(media)
    full = fullest(model, frontend, policy, modality, large, batching)
    other_blanks = [least] if full is large else [full, least]
    num_bytes = max(
        measured(run, candidates, batching)
        for candidates in (chain([large], media), *([blank] for blank in other_blanks))
    )
    if not num_bytes:
        free, total = (number // MEBIBYTE for number in torch.cuda.mem_get_info(model.device))
        raise MemoryBudgetError(
            f"of {total} MiB of GPU memory, {total - free} MiB are in use before the tower runs, and the {free} MiB left are too few for "
            f"the smallest {modality} ({least.medium.num_tokens} tokens); give the pod a GPU with more memory, or choose a smaller model"
        )
    return num_bytes


def one_run(model: EncoderModel, blank: _Blank, batching: EncoderBatching) -> _Blank:
    """The share of a medium in one run: as many parts as a run's work allows, and at least one."""
    parts = blank.medium.parts
    last = max(1, min(parts, parts * batching.max_work // blank.work))
    return _Blank(model.part(blank.medium, 0, last), -(-blank.work * last // parts))


def estimated(
    model: EncoderModel, frontend: Frontend, modality: Modality, large: _Blank, batching: EncoderBatching
) -> int:
    """Bytes of the largest batch: few large media, or many small ones that some models pad to the large size."""
    first, second = (small(model, frontend, modality, times) for times in (1, 2))
    first_bytes, second_bytes = (_live_bytes(model, blank.medium, 1) for blank in (first, second))
    pair_bytes = _live_bytes(model, second.medium, 2) if batching.max_items > 1 else 2 * second_bytes
    # Inputs padded to one size take the same memory whatever their work; inputs padded and cut again do not.
    by_work = first.work < second.work and first_bytes < second_bytes

    def size(blank: _Blank) -> int:
        return blank.work if by_work else blank.elements

    growth = Growth((size(first), first_bytes), (size(second), second_bytes), pair_bytes)
    sizes = {1: float(max(size(large), size(second)))}
    for items in range(2, most_items(first.work, batching) + 1):
        share = min(1.0, batching.max_work / items / large.work)
        sizes[items] = max(share * size(large), size(first))
    return max(growth.bytes_at(item_size, items) for items, item_size in sizes.items())


def most_items(work: int, batching: EncoderBatching) -> int:
    """The number of media with this work that share a batch."""
    return max(1, min(batching.max_items, batching.max_work // work))


def _live_bytes(model: EncoderModel, medium: ProcessedMedium, items: int) -> int:
    with LiveBytes() as live:
        model.encode([medium] * items)
    return int(live.peak)


def measured(
    run: Callable[[ProcessedMedium, int], int], media: Iterable[_Blank], batching: EncoderBatching
) -> int:
    """Bytes of the largest batch that runs, for the first of `media` that runs at all; 0 if none does.

    `run(medium, items)`: the bytes of one run; it raises `torch.OutOfMemoryError` if they exceed the memory. A batch that
    does not run needs no memory: it is halved when it occurs, and a medium that does not run alone fails.
    """
    failed = False
    for blank in media:
        items, medium = most_items(blank.work, batching), blank.medium
        while items:
            try:
                num_bytes = run(medium, items)
            except torch.OutOfMemoryError:
                log.warning(
                    "device memory is too small for a tower run of %d x %s of %d tokens; lower the limits of "
                    "spec.gateway.media or spec.encoder.batching.maxWork",
                    items,
                    medium.modality,
                    medium.num_tokens,
                )
                items //= 2
                continue
            if failed:
                log.warning(
                    "memory reserved for a %s of at most %d tokens; larger ones may fail",
                    medium.modality,
                    medium.num_tokens,
                )
            return num_bytes
        failed = True
    return 0


def _bytes_on_gpu(model: EncoderModel, medium: ProcessedMedium, items: int) -> int:
    """Peak bytes of one run.

    Raises:
        torch.OutOfMemoryError: the device does not hold it.
    """
    device = model.device
    torch.cuda.empty_cache()  # also frees an earlier, failed run: its frames, which held tensors, are gone only now
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    allocated_before = torch.cuda.memory_allocated(device)
    try:
        model.encode([medium] * items)
        torch.cuda.synchronize(device)
        return int(torch.cuda.max_memory_allocated(device) - allocated_before)
    finally:
        torch.cuda.empty_cache()


def from_largest(
    model: EncoderModel,
    frontend: Frontend,
    policy: MediaPolicy,
    modality: Modality,
    batching: EncoderBatching,
) -> Iterator[_Blank]:
    """One-run shares of the largest medium, then of ever smaller ones, each with at most three quarters of the previous work."""
    blank = one_run(model, largest(model, frontend, policy, modality), batching)
    yield blank
    for halvings in range(1, math.ceil(_halvings(policy, modality))):
        smaller = one_run(model, largest(model, frontend, policy, modality, halvings), batching)
        if 4 * smaller.work <= 3 * blank.work:  # otherwise the processor makes nearly the same of both
            blank = smaller
            yield blank
    least = small(model, frontend, modality, 1)
    if least.work < blank.work:
        yield least


def _halvings(policy: MediaPolicy, modality: Modality) -> float:
    """How often the largest medium can be halved until it is small."""
    if modality == "audio":
        factor = policy.audio.max_duration_seconds / SMALL_SECONDS
    else:
        factor = policy.image.max_pixels / SMALL_SIDE**2
        if modality == "video":
            factor *= max(1, policy.video.max_frames / SMALL_FRAMES)
    return math.log2(max(1.0, factor))


def largest(
    model: EncoderModel, frontend: Frontend, policy: MediaPolicy, modality: Modality, halvings: float = 0
) -> _Blank:
    """The medium with the most work within the limits.

    Its size (for a video, all frames together) is halved `halvings` times.

    Raises:
        UnsupportedInputError: the model takes none of the shapes that were tried.
    """
    video, scale = policy.video, 2.0**-halvings
    pixels = int(policy.image.max_pixels * scale)
    if modality == "audio":
        return _blank(model, frontend, _sound(policy.audio.max_duration_seconds * scale))
    if modality == "video":
        frames = max(min(SMALL_FRAMES, video.max_frames), int(video.max_frames * scale))
        pixels = int(policy.image.max_pixels * video.max_frames * scale) // frames
        info = _picture("video", pixels, 1.0, frames, video.frames_per_second_milli / 1000)
        return _blank(model, frontend, info)
    blanks, refusal = [], None
    for shape in SHAPES:
        try:
            blanks.append(_blank(model, frontend, _picture("image", pixels, shape)))
        except UnsupportedInputError as error:
            refusal = error
    if not blanks and refusal is not None:
        raise refusal
    return max(blanks, key=lambda blank: blank.work)


def fullest(
    model: EncoderModel,
    frontend: Frontend,
    policy: MediaPolicy,
    modality: Modality,
    large: _Blank,
    batching: EncoderBatching,
) -> _Blank:
    """A medium of such a size that no batch has more work than a batch of it.

    If a batch of the largest medium has room left, but not for another one, several of medium size have more work.
    """
    items = math.ceil(min(batching.max_work, batching.max_items * large.work) / large.work)
    blanks, low, high = [large], 0.0, _halvings(policy, modality)
    for _ in range(FULLEST_TRIES if items > 1 else 0):
        halvings = (low + high) / 2
        try:
            medium = largest(model, frontend, policy, modality, halvings)
            blanks.append(one_run(model, medium, batching))
        except UnsupportedInputError:  # too small for this model
            high = halvings
            continue
        if most_items(blanks[-1].work, batching) < items:
            low = halvings
        else:
            high = halvings
    return max(blanks, key=lambda blank: blank.work * most_items(blank.work, batching))


def small(model: EncoderModel, frontend: Frontend, modality: Modality, times: int) -> _Blank:
    """A medium that runs quickly, enlarged `times` in each direction or in length."""
    if modality == "audio":
        return _blank(model, frontend, _sound(SMALL_SECONDS * times))
    pixels = (SMALL_SIDE * times) ** 2
    return _blank(model, frontend, _picture(modality, pixels, 1.0, SMALL_FRAMES * times, SMALL_FPS))


def _blank(model: EncoderModel, frontend: Frontend, info: MediumInfo) -> _Blank:
    """A medium of this shape without content.

    A video has all its frames, which a request may choose, or as many as the processor samples by default if those are more.
    """
    message = {"role": "user", "content": [{"type": info.modality}]}
    (layout,) = frontend.layout([message], [info]).media
    if info.modality == "video":
        with contextlib.suppress(UnsupportedInputError):  # the processor samples by rate alone
            choice = SamplingChoice(num_frames=info.num_frames)
            (chosen,) = frontend.layout([message], [info], choices=[choice]).media
            layout = max(layout, chosen, key=lambda candidate: candidate.work)
    return _Blank(model.blank(info, layout), layout.work)


def _picture(
    modality: Modality, pixels: int, shape: float, frames: int = 0, fps: float = SMALL_FPS
) -> MediumInfo:
    height = max(1, math.isqrt(int(pixels / shape)))
    width = pixels // height if shape > 1 else height
    if modality == "image":
        return MediumInfo("image", "0" * 64, 1, "png", width=width, height=height)
    return MediumInfo(
        "video",
        "0" * 64,
        1,
        "mp4",
        width=width,
        height=height,
        num_frames=frames,
        fps=fps,
        duration_seconds=frames / fps,
    )


def _sound(seconds: float, rate: int = 16_000) -> MediumInfo:
    return MediumInfo(
        "audio",
        "0" * 64,
        1,
        "wav",
        num_samples=int(seconds * rate),
        sample_rate_hz=rate,
        duration_seconds=seconds,
    )
