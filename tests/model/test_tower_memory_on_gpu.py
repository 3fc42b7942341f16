"""What towers take of a GPU's memory is what was measured at the start, also where the largest media do not fit."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from mmd_api.contract.errors import MemoryBudgetError
from mmd_api.spec.media import MediaPolicy
from mmd_api.spec.model import ModelSpec
from mmd_api.spec.pools import EncoderBatching
from mmd_workers.basics.memory import MEBIBYTE
from mmd_workers.encoder import profile
from mmd_workers.encoder.profile import tower_memory
from mmd_workers.model.encoder import HfEncoderModel, load_encoder
from support.oracles import model_zoo as zoo
from support.oracles.devices import DEVICE, needs_gpu

from .cases import small_media

pytestmark = [needs_gpu, pytest.mark.models]
ARCHITECTURES = [arch for arch, modalities in zoo.MODALITIES.items() if modalities]
BATCHING = EncoderBatching(max_items=4, max_work=4096)


def peak(model: HfEncoderModel, blank: profile._Blank) -> int:
    """Bytes that the largest batch of these media takes at once."""
    torch.cuda.synchronize(DEVICE)
    torch.cuda.reset_peak_memory_stats(DEVICE)
    before = torch.cuda.memory_allocated(DEVICE)
    model.encode([blank.medium] * profile.most_items(blank.work, BATCHING))
    torch.cuda.synchronize(DEVICE)
    return torch.cuda.max_memory_allocated(DEVICE) - before


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_no_batch_takes_more_than_was_measured(
    arch: str, checkpoint: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    model = load_encoder(ModelSpec(id=str(checkpoint(arch)), dtype="BFloat16"), DEVICE)
    with caplog.at_level(logging.WARNING):
        memory = tower_memory(model, small_media(), BATCHING)
    assert not caplog.records
    assert not memory.unknown
    frontend = model.frontend(small_media())
    for modality in model.modalities:
        large = next(profile.from_largest(model, frontend, small_media(), modality, BATCHING))
        for blank in (large, *(profile.small(model, frontend, modality, times) for times in (1, 2, 3))):
            if blank.work <= large.work:
                assert 0 < peak(model, blank) <= memory.num_bytes * 1.02, (modality, blank.work)


@pytest.fixture
def limit() -> Iterator[Callable[[int], None]]:
    """Let this process have so many bytes in addition to what it has."""
    total = torch.cuda.get_device_properties(DEVICE).total_memory

    def leave(num_bytes: int) -> None:
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(
            (torch.cuda.memory_reserved(DEVICE) + num_bytes) / total, DEVICE
        )

    yield leave
    torch.cuda.set_per_process_memory_fraction(1.0, DEVICE)


def test_media_that_do_not_fit_reserve_what_the_largest_that_fits_takes(
    limit: Callable[[int], None], caplog: pytest.LogCaptureFixture
) -> None:
    model, policy, batching = (
        load_encoder(ModelSpec(id="builtin/demo"), DEVICE),
        MediaPolicy(),
        EncoderBatching(),
    )
    large = tower_memory(model, policy, batching).num_bytes
    limit(large // 2)
    with caplog.at_level(logging.WARNING):
        reserved = tower_memory(model, policy, batching).num_bytes
    assert large // 64 < reserved <= large // 2 + 2 * MEBIBYTE
    assert "device memory is too small for a tower run of" in caplog.text


def test_a_gpu_that_does_not_hold_the_smallest_medium_is_refused(limit: Callable[[int], None]) -> None:
    model = load_encoder(ModelSpec(id="builtin/demo"), DEVICE)
    limit(0)
    filler = [
        torch.empty(256, dtype=torch.uint8, device=DEVICE)
    ]  # what is free of blocks that are reserved already
    with suppress(torch.OutOfMemoryError):
        while True:
            filler.append(torch.empty(4096, dtype=torch.uint8, device=DEVICE))
    with pytest.raises(MemoryBudgetError, match="are too few for the smallest"):
        tower_memory(model, MediaPolicy(), EncoderBatching())
