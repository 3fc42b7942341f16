"""What a tower needs in addition to its weights is measured, by workers as by `mmd plan-memory`, and left free by the KV pool."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from mmd_api.contract.errors import MemoryBudgetError
from mmd_api.contract.pools import Modality
from mmd_api.spec.deployment import MultimodalDeploymentSpec
from mmd_api.spec.media import MediaPolicy
from mmd_api.spec.model import ModelSpec
from mmd_api.spec.pools import EncoderBatching
from mmd_cli import plan_memory
from mmd_cli.local import up
from mmd_cli.plan_memory import PROCESS_BYTES
from mmd_cli.program import build
from mmd_workers.basics.memory import MEBIBYTE
from mmd_workers.encoder import profile
from mmd_workers.encoder.profile import Growth, tower_memory
from mmd_workers.model.encoder import HfEncoderModel, load_encoder
from mmd_workers.model.prompt import Feature, ProcessedMedium
from support.oracles import model_zoo as zoo

from .cases import small_media

CPU = torch.device("cpu")
EXAMPLES = Path(__file__).parents[2] / "examples"
ARCHITECTURES = [arch for arch, modalities in zoo.MODALITIES.items() if modalities]
Checkpoint = Callable[[str], Path]


@pytest.mark.parametrize(
    ("small_bytes", "expected"),
    [(2000, 40_000), (4000, 1_600_000), (3000, 820_000), (1100, 22_000)],
    ids=["linear", "quadratic", "both", "no less than linear"],
)
def test_memory_grows_with_the_size_of_a_medium(small_bytes: int, expected: int) -> None:
    """At 4000, where 100 take 1000 bytes."""
    growth = Growth((100, 1000), (200, small_bytes), 2 * small_bytes)
    assert growth.bytes_at(4000, 1) == expected
    assert growth.bytes_at(4000, 8) == 8 * expected


@pytest.mark.parametrize(
    ("pair_bytes", "expected"), [(4000, 160_000), (4600, 1_600_000)], ids=["apart", "one mask for all"]
)
def test_memory_grows_with_the_number_of_media(pair_bytes: int, expected: int) -> None:
    growth = Growth((100, 1000), (200, 2000), pair_bytes)
    assert growth.bytes_at(4000, 4) - (growth.bytes_at(4000, 1) * 4) == expected - 160_000


def test_sizes_that_are_equal_say_nothing_about_growth() -> None:
    assert Growth((100, 1000), (100, 1000), 2000).bytes_at(800, 1) == 8000


def test_an_image_that_makes_more_tiles_than_a_square_is_the_largest(checkpoint: Checkpoint) -> None:
    """internvl cuts 12 tiles from 4:3, 9 from a square, and adds the whole image."""
    model = load_encoder(ModelSpec(id=str(checkpoint("internvl"))), CPU)
    processor = model._processor.image_processor
    processor.max_patches, processor.crop_to_patches = 12, True
    policy = MediaPolicy()
    tile = processor.size["height"] ** 2 * 3
    assert profile.largest(model, model.frontend(), policy, "image").elements == 13 * tile


@pytest.mark.models
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_estimate_covers_the_batches_that_can_come(
    arch: str, checkpoint: Checkpoint, caplog: pytest.LogCaptureFixture
) -> None:
    """Few large media, and many small ones: a tower that pads sounds needs more for these."""
    model = load_encoder(ModelSpec(id=str(checkpoint(arch)), dtype="Float32"), CPU)
    policy, batching = small_media(), EncoderBatching(max_items=4, max_work=4096)
    most = 0
    for modality in sorted(model.modalities):
        frontend = model.frontend(policy)
        large = next(profile.from_largest(model, frontend, policy, modality, batching))
        estimate = profile.estimated(model, frontend, modality, large, batching)
        needed = max(
            _live_bytes(model, blank, batching)
            for blank in (large, *(profile.small(model, frontend, modality, times) for times in (1, 2, 3)))
        )
        assert 0.99 * needed <= estimate <= 2 * needed
        most = max(most, estimate)
    with caplog.at_level(logging.WARNING):
        assert tower_memory(model, policy, batching).num_bytes == most
    assert not caplog.records


@pytest.mark.parametrize("arch", ["qwen2_vl", "qwen3_vl", "llava"])
def test_a_measured_batch_has_the_most_work_that_any_can_have(arch: str, checkpoint: Checkpoint) -> None:
    """More than the largest medium alone, which leaves room in its batch for less than another."""
    model = load_encoder(ModelSpec(id=str(checkpoint(arch)), dtype="Float32"), CPU)
    policy, frontend = small_media(), model.frontend(small_media())
    for modality in sorted(model.modalities):
        large = profile.largest(model, frontend, policy, modality)
        batching = EncoderBatching(max_items=4, max_work=large.work * 7 // 4)
        full = profile.fullest(model, frontend, policy, modality, large, batching)
        items = profile.most_items(full.work, batching)
        assert items * full.work <= batching.max_work
        if arch == "llava":  # makes the same of every image
            assert full.work == large.work
        else:
            assert items * full.work > 0.8 * batching.max_work


@pytest.mark.models
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_plan_needs_no_weights_to_know_what_a_worker_measures(arch: str, checkpoint: Checkpoint) -> None:
    spec = _demo(str(checkpoint(arch)))
    gateway = spec.gateway.model_copy(update={"media": small_media()})
    spec = spec.model_copy(update={"gateway": gateway})
    model = load_encoder(spec.model, CPU)
    planned = plan_memory.plan(spec, {}).pools[0]
    assert spec.encoder is not None
    assert (
        planned.tower.num_bytes
        == tower_memory(model, spec.gateway.media, spec.encoder.batching).num_bytes
        > 0
    )


def test_a_medium_that_cannot_be_measured_is_logged_and_the_others_are(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_encoder(ModelSpec(id="builtin/demo"), CPU)
    encode = model.encode

    def no_video(batch):  # type: ignore[no-untyped-def]
        if batch[0].modality == "video":
            raise RuntimeError("no kernel")
        return encode(batch)

    monkeypatch.setattr(model, "encode", no_video)
    assert tower_memory(model, MediaPolicy(), EncoderBatching()).num_bytes > 0
    (record,) = caplog.records
    assert "a video in the tower" in record.getMessage()
    assert "RuntimeError: no kernel" in record.getMessage()


def test_a_pod_that_also_encodes_leaves_memory_for_its_tower() -> None:
    plan = plan_memory.plan(_together("kv_cache_percent", 10), {"prefill": 4 << 30, "decode": 4 << 30})
    prefill, decode = plan.pools
    assert prefill.roles == ("encode", "prefill")
    assert prefill.tower.num_bytes > 10 * MEBIBYTE
    left = (
        (4 << 30) - prefill.weights_bytes - prefill.activation_bytes - prefill.tower.num_bytes - PROCESS_BYTES
    )
    assert prefill.kv_bytes == left // 10
    assert decode.roles == ("decode",)
    assert decode.tower.num_bytes == 0
    left = (4 << 30) - decode.weights_bytes - decode.activation_bytes - PROCESS_BYTES
    assert decode.kv_bytes == left // 10
    shown = plan_memory.lines_of(plan)
    assert len([line for line in shown if "activations of the tower" in line]) == 1


def test_a_tower_that_leaves_too_little_for_one_request_is_refused() -> None:
    spec = _together("kv_cache_percent", 100)
    prefill = plan_memory.plan(spec, {}).pools[0]
    without_tower = prefill.weights_bytes + prefill.activation_bytes + PROCESS_BYTES
    one_request = plan_memory.plan(spec, {}).examples[0].kv_bytes
    memory = without_tower + one_request + prefill.tower.num_bytes // 2
    refused = plan_memory.plan(spec, {"prefill": memory}).pools[0].refusal
    assert f"{-(-prefill.tower.num_bytes // MEBIBYTE)} MiB by those of the tower" in refused
    assert "lower the limits of spec.gateway.media, or add an encoder pool" in refused
    assert not plan_memory.plan(spec, {"prefill": memory + prefill.tower.num_bytes}).pools[0].refusal


def test_an_encoder_that_cannot_run_its_largest_batch_is_reported() -> None:
    plan = plan_memory.plan(_demo("builtin/demo"), {"encoder": 1100 * MEBIBYTE})
    assert "lower the limits of spec.gateway.media" in plan.pools[0].refusal
    assert any("does not fit" in line for line in plan_memory.lines_of(plan))
    assert not plan_memory.plan(_demo("builtin/demo"), {"encoder": 4 << 30}).pools[0].refusal


class SmallGpu:
    """Where CUDA is, for a model on the CPU: its memory holds tower runs of `holds` patches or frames, each of which takes 1000 bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, model: HfEncoderModel, holds: int) -> None:
        self.holds, self.peak, self.ran = holds, 0, list[tuple[str, int, int]]()
        monkeypatch.setattr(model, "device", torch.device("cuda"))
        monkeypatch.setattr(model, "encode", self.encode)
        for name in ("synchronize", "reset_peak_memory_stats", "empty_cache"):
            monkeypatch.setattr(torch.cuda, name, lambda *_: None)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda *_: 0)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda *_: self.peak)

    def encode(self, batch: list[ProcessedMedium]) -> None:
        elements = sum(tensor.numel() for tensor in batch[0].tensors.values() if tensor.is_floating_point())
        self.peak = 1000 * min(elements * len(batch), self.holds)
        if elements * len(batch) > self.holds:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.ran.append((batch[0].modality, elements, len(batch)))


def test_memory_is_reserved_for_the_largest_medium_that_runs(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, policy, batching = (
        load_encoder(ModelSpec(id="builtin/demo"), CPU),
        MediaPolicy(),
        EncoderBatching(),
    )
    frontend = model.frontend(policy)
    large = {
        kind: next(profile.from_largest(model, frontend, policy, kind, batching)).elements
        for kind in model.modalities
    }
    holds = max(large.values()) * 2 // 3  # one of half the size, not two
    gpu = SmallGpu(monkeypatch, model, holds)
    reserved = tower_memory(model, policy, batching).num_bytes
    assert holds // 4 < reserved // 1000 < holds
    assert reserved == 1000 * max(elements * items for _, elements, items in gpu.ran)
    assert "larger ones may fail" in caplog.text


def test_a_gpu_too_small_for_the_smallest_medium_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_encoder(ModelSpec(id="builtin/demo"), CPU)
    SmallGpu(monkeypatch, model, 10)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (5 * MEBIBYTE, 80 * MEBIBYTE))
    with pytest.raises(
        MemoryBudgetError, match=r"of 80 MiB of GPU memory, 75 MiB are in use .* the 5 MiB left are too few"
    ):
        tower_memory(model, MediaPolicy(), EncoderBatching())


def test_a_plan_names_the_medium_that_cannot_be_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = HfEncoderModel.encode

    def no_video(model: HfEncoderModel, batch: list[ProcessedMedium]) -> list[Feature]:
        if batch[0].modality == "video":
            raise RuntimeError("no kernel [/red]")
        return encode(model, batch)

    monkeypatch.setattr(HfEncoderModel, "encode", no_video)
    run = CliRunner().invoke(
        build().app, ["plan-memory", "-f", str(EXAMPLES / "demo.yaml"), "--memory", "4Gi"]
    )
    assert run.exit_code == 3, run.output
    assert re.search(r"activations of the tower +\d+\.\d MiB", run.output)
    assert re.search(
        r"activations of the tower +unknown \(video: RuntimeError: no kernel \[/red\]\)", run.output
    )


def test_a_tower_that_cannot_be_measured_is_printed_as_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(HfEncoderModel, "encode", fails)
    shown = [
        line for line in plan_memory.lines_of(plan_memory.plan(_demo("builtin/demo"), {})) if "tower" in line
    ]
    assert [line.split("tower")[1].split() for line in shown] == [
        ["unknown", f"({modality}:", "RuntimeError:", "no", "kernel)"]
        for modality in ("audio", "image", "video")
    ]


def test_a_batch_that_does_not_run_is_halved_until_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    model, policy = load_encoder(ModelSpec(id="builtin/demo"), CPU), MediaPolicy()
    small = profile.small(model, model.frontend(policy), "image", 1)
    tried = list[int]()

    def run(_: ProcessedMedium, items: int) -> int:
        tried.append(items)
        if items > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return items * 100

    assert profile.measured(run, [small], EncoderBatching(max_items=8, max_work=8 * small.work)) == 200
    assert tried == [8, 4, 2]


@pytest.mark.parametrize("modality", ["video", "audio"])
def test_media_to_measure_shrink_from_the_largest_to_a_small_one(modality: Modality) -> None:
    model, policy = load_encoder(ModelSpec(id="builtin/demo"), CPU), MediaPolicy()
    frontend = model.frontend(policy)
    batching = EncoderBatching(max_work=2**20)
    works = [blank.work for blank in profile.from_largest(model, frontend, policy, modality, batching)]
    assert works[0] == profile.largest(model, frontend, policy, modality).work
    assert works[-1] == profile.small(model, frontend, modality, 1).work
    assert works == sorted(set(works), reverse=True)
    assert len(works) > 2


def test_the_largest_video_has_all_frames_that_a_request_may_choose() -> None:
    """By itself the demo model's processor takes 8."""
    model, policy = load_encoder(ModelSpec(id="builtin/demo"), CPU), MediaPolicy()
    large = profile.largest(model, model.frontend(policy), policy, "video")
    assert large.medium.geometry["video_grid_thw"][0][0] == policy.video.max_frames / 2


def test_where_all_images_become_one_size_there_is_one_to_measure() -> None:
    model, policy = load_encoder(ModelSpec(id="builtin/demo"), CPU), MediaPolicy()
    media = profile.from_largest(model, model.frontend(policy), policy, "image", EncoderBatching())
    assert len(list(media)) == 1


def _live_bytes(model: HfEncoderModel, blank: profile._Blank, batching: EncoderBatching) -> int:
    with profile.LiveBytes() as live:
        model.encode([blank.medium] * profile.most_items(blank.work, batching))
    return int(live.peak)


def _demo(model: str) -> MultimodalDeploymentSpec:
    spec = up.load(EXAMPLES / "demo.yaml").spec
    return spec.model_copy(update={"model": ModelSpec(id=model, dtype="Float32")})


def _together(field: str, value: int) -> MultimodalDeploymentSpec:
    """The demo without an encoder pool, and this for the KV of its pools."""
    spec, kv = _demo("builtin/demo"), {"kv_cache_mebibytes": None, field: value}
    assert spec.prefill is not None
    pools = {"prefill": spec.prefill.model_copy(update=kv), "decode": spec.decode.model_copy(update=kv)}
    return spec.model_copy(update={"encoder": None, **pools})
