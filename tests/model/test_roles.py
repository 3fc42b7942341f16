"""Each role loads its own share of a checkpoint and no byte of the other's."""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AttentionInterface, AttentionMaskInterface

from mmd_api.contract.errors import BadLogitsError, CountMismatchError, UnsupportedModelError
from mmd_api.spec.media import MediaPolicy
from mmd_api.spec.model import ModelSpec
from mmd_workers.basics.device import run_isolating
from mmd_workers.engine.cpu import library
from mmd_workers.model import roles, source
from mmd_workers.model.encoder import load_encoder
from mmd_workers.model.frontend import load_frontend
from mmd_workers.model.language import load_language_model
from mmd_workers.model.prompt import Feature, LoweredPrompt
from mmd_workers.model.roles import Absent
from support.oracles import model_zoo as zoo

pytestmark = pytest.mark.models

Checkpoint = Callable[[str], Path]
FEATURE_LAYER_MODELS = ("llava", "llava_next", "video_llava")
MULTIMODAL = [arch for arch, takes in zoo.MODALITIES.items() if takes]


@pytest.mark.parametrize("arch", MULTIMODAL)
def test_the_roles_bytes_add_up_to_the_full_model(arch: str, checkpoint: Checkpoint) -> None:
    served = zoo.serve(checkpoint(arch))
    assert served.encoder is not None
    unread = _unread_layers(served.model) if arch in FEATURE_LAYER_MODELS else []
    left = {p for layer in unread for p in layer.parameters()}
    whole = sum(p.numel() * p.element_size() for p in served.model.parameters() if p not in left)
    assert served.encoder.loaded_bytes + served.language.loaded_bytes == whole
    assert min(served.encoder.loaded_bytes, served.language.loaded_bytes) > 0


@pytest.mark.parametrize("arch", MULTIMODAL)
def test_no_role_holds_the_others_weights(arch: str, checkpoint: Checkpoint) -> None:
    served = zoo.serve(checkpoint(arch))
    assert served.encoder is not None
    decoder = {id(m): n for n, m in served.model.named_modules()}[id(served.model.get_decoder())]
    ours = {n for n, _ in served.encoder.model.named_parameters()}
    theirs = {n for n, _ in served.language.model.named_parameters()}
    assert not ours & theirs
    assert not {n for n in ours if n.startswith(decoder) or n.startswith("lm_head")}
    assert all(n.startswith(decoder) or n.startswith("lm_head") for n in theirs)
    absent = [m for m in served.language.model.modules() if isinstance(m, Absent)]
    assert absent
    with pytest.raises(RuntimeError, match="another role"):
        absent[0](torch.zeros(1))


def test_a_role_reads_only_its_own_bytes_of_a_shard(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Bytes of the towers are overwritten with noise on disk: the language model does not notice."""
    folder = _copy(checkpoint("qwen2_5_vl"), tmp_path)
    before = load_language_model(ModelSpec(id=str(folder)), zoo.CPU)
    weights = load_file(folder / "model.safetensors")
    spoilt = {n: torch.full_like(t, float("nan")) if "visual" in n else t for n, t in weights.items()}
    assert any("visual" in n for n in weights)
    save_file(spoilt, folder / "model.safetensors", metadata={"format": "pt"})
    after = load_language_model(ModelSpec(id=str(folder)), zoo.CPU)
    same = zip(before.model.parameters(), after.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in same)


@pytest.mark.parametrize("arch", FEATURE_LAYER_MODELS)
def test_layers_behind_the_one_that_features_are_made_of_are_not_loaded(
    arch: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    served = zoo.serve(checkpoint(arch))
    assert served.encoder is not None
    assert _unread_layers(served.model)
    for layer in _unread_layers(served.encoder.model):
        assert not list(layer.parameters())
    for index in (1, -1):  # the hidden states behind the first of two layers, and behind the last
        folder = _copy(checkpoint(arch), tmp_path / str(index))
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"vision_feature_layer": index}))
        held = load_encoder(ModelSpec(id=str(folder)), zoo.CPU).model
        for first, last in _layers(held):
            assert list(first.parameters())
            assert bool(list(last.parameters())) == (index == -1)


def test_a_role_loads_from_shards_as_from_one_file(checkpoint: Checkpoint, tmp_path: Path) -> None:
    whole = zoo.serve(checkpoint("llava")).model
    folder = _copy(checkpoint("llava"), tmp_path)
    (folder / "model.safetensors").unlink()
    whole.save_pretrained(folder, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 3
    served = zoo.serve(checkpoint("llava"))
    assert served.encoder is not None
    spec = ModelSpec(id=str(folder))
    assert load_encoder(spec, zoo.CPU).loaded_bytes == served.encoder.loaded_bytes
    assert load_language_model(spec, zoo.CPU).loaded_bytes == served.language.loaded_bytes


def test_models_that_are_loaded_at_once_are_loaded_one_after_the_other(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two loads that overlap would leave transformers without tied weights: the model that is loaded after them would miss some."""
    folder, sliced, both = checkpoint("llava"), roles.sliced_class, threading.Barrier(2)
    met = []

    def waiting_for_another(cls: type[Any], role: roles.ModelPart) -> type[Any]:
        class Waiting(sliced(cls, role)):  # type: ignore[misc]
            def __init__(self, config: Any) -> None:
                super().__init__(config)
                with contextlib.suppress(threading.BrokenBarrierError):
                    met.append(both.wait(1))

        Waiting.__name__, Waiting.__qualname__, Waiting.__module__ = (
            cls.__name__,
            cls.__qualname__,
            cls.__module__,
        )
        return Waiting

    monkeypatch.setattr(roles, "sliced_class", waiting_for_another)
    with ThreadPoolExecutor(2) as threads:
        loads = [threads.submit(load_language_model, ModelSpec(id=str(folder)), zoo.CPU) for _ in range(2)]
    assert all(load.result() for load in loads)
    assert not met


@pytest.mark.parametrize(
    ("lost", "load"), [("language_model.layers.1", load_language_model), ("visual", load_encoder)]
)
def test_missing_weights_are_refused_by_name(
    lost: str, load: Callable[..., object], checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder = _copy(checkpoint("qwen2_5_vl"), tmp_path)
    weights = load_file(folder / "model.safetensors")
    lost = lost if any(lost in n for n in weights) else "layers.1."
    kept = {n: t for n, t in weights.items() if lost not in n}
    assert len(kept) < len(weights)
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=r"spec\.model\.id.*missing or misshapen"):
        load(ModelSpec(id=str(folder)), zoo.CPU)


def test_the_thinker_of_a_full_omni_checkpoint_is_served(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = _copy(checkpoint("qwen2_5_omni"), tmp_path)
    thinker = json.loads((folder / "config.json").read_text())
    config = {"model_type": "qwen2_5_omni", "architectures": ["Qwen2_5OmniForConditionalGeneration"]}
    (folder / "config.json").write_text(json.dumps(config | {"thinker_config": thinker}))
    weights = {"thinker." + n: t for n, t in load_file(folder / "model.safetensors").items()}
    weights["talker.thinker_to_talker_proj.weight"] = torch.zeros(8, 8)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    alone = zoo.serve(checkpoint("qwen2_5_omni"))
    spec = ModelSpec(id=str(folder))
    assert load_frontend(spec, MediaPolicy()).modalities == {"image", "video", "audio"}
    ours = load_language_model(spec, zoo.CPU).model.state_dict()
    theirs = alone.language.model.state_dict()
    assert all(torch.equal(t, theirs[n].cpu()) for n, t in ours.items())
    assert alone.encoder is not None
    assert load_encoder(spec, zoo.CPU).loaded_bytes == alone.encoder.loaded_bytes


@pytest.mark.parametrize("arch", list(zoo.MODALITIES))
def test_the_engines_attention_replaces_every_layers(arch: str, checkpoint: Checkpoint) -> None:
    language = load_language_model(ModelSpec(id=str(checkpoint(arch)), dtype="Float32"), zoo.CPU)
    seen: dict[int, tuple[int, int, int | None]] = {}

    def attend(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: object,
        **more: object,
    ) -> tuple[torch.Tensor, None]:
        assert attention_mask is None
        seen[module.layer_idx] = (key.shape[1], key.shape[3], more.get("sliding_window"))
        return torch.zeros(1, query.shape[2], query.shape[1], value.shape[3]), None

    AttentionInterface.register("recorded", attend)
    AttentionMaskInterface.register("recorded", lambda *a, **k: None)
    language.decoder.set_attn_implementation("recorded")
    embeds, extras = language.embed(torch.tensor([5, 6, 7]))
    hidden = language.forward(embeds, torch.arange(3).expand(language.position_axes, -1), extras)
    assert hidden.shape == (3, language.hidden_size)
    assert language.logits(hidden).shape == (3, language.vocab_size)
    assert language.logits(hidden).dtype == torch.float32
    layout = language.kv_layout
    assert [seen[i][:2] for i in range(layout.num_layers)] == list(
        zip(layout.num_kv_heads, layout.head_dim, strict=True)
    )
    assert len(seen) == layout.num_layers
    if arch == "gemma3":
        assert [seen[i][2] for i in range(2)] == [16, None]


@pytest.mark.parametrize("arch", MULTIMODAL)
def test_linear_layers_of_towers_have_packed_weights_on_a_cpu(arch: str, checkpoint: Checkpoint) -> None:
    assert library.load() is not None
    loaded = load_encoder(ModelSpec.model_validate({"id": str(checkpoint(arch))}), torch.device("cpu"))
    kinds = Counter(type(module).__name__ for module in loaded.model.modules())
    assert kinds["PackedLinear"] >= 4
    assert not kinds["Linear"]


def test_an_encoder_computes_float32_without_tf32(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What convolutions of a batch of media gave on a GPU differed by more than rounding from what they gave of each alone."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)  # PyTorch's default
    load_encoder(ModelSpec(id=str(checkpoint("llava")), dtype="Float32"), zoo.CPU)
    assert not torch.backends.cudnn.allow_tf32


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_feature_that_is_not_finite_fails_only_its_medium(checkpoint: Checkpoint, value: float) -> None:
    served = zoo.serve(checkpoint("llava"))
    assert served.encoder is not None
    media = []
    for seed in range(2):
        medium = zoo.image(100, 64, seed)
        (laid,) = served.frontend.layout(zoo.conversation(medium), [medium.info]).media
        media.append(served.encoder.process(zoo.decoded(medium, [], 0), laid))
    media[1].tensors["pixel_values"][..., 0, 0] = value
    good, bad = run_isolating(media, served.encoder.encode, zoo.CPU)
    assert isinstance(good, Feature)
    assert isinstance(bad, BadLogitsError)
    assert "the image tower computed a feature that is not finite" in bad.message


def test_prefill_may_go_up_to_the_first_missing_feature(checkpoint: Checkpoint) -> None:
    served = zoo.serve(checkpoint("qwen3_vl"))
    assert served.encoder is not None
    media = [zoo.image(60, 60, 1), zoo.image(80, 40, 2)]
    layout = served.frontend.layout(
        zoo.conversation(media[0], "and", media[1], "tell"), [m.info for m in media]
    )
    prompt = served.language.lower(layout.token_ids, layout.media)
    assert prompt.filled_until == layout.media[0].ranges[0][0]
    features = []
    for medium, laid in zip(media, layout.media, strict=True):
        (feature,) = served.encoder.encode([served.encoder.process(zoo.decoded(medium, [], 0), laid)])
        features.append(feature)
    served.language.fill(prompt, 1, features[1])  # the later one first
    assert prompt.filled_until == layout.media[0].ranges[0][0]
    served.language.fill(prompt, 0, features[0])
    assert prompt.filled_until == len(layout.token_ids)
    rows = slice(layout.media[1].ranges[0][0], layout.media[1].ranges[0][0] + layout.media[1].num_tokens)
    whole = embeds, positions, extras = served.language.rows(prompt, 0, len(layout.token_ids))
    assert torch.equal(embeds[rows].cpu(), features[1].tensors["embeddings"])
    assert torch.equal(extras["deepstack.1"][rows].cpu(), features[1].tensors["deepstack.1"])
    for size in (1, 7):
        assert_rows_are_those_of(served.language, prompt, whole, size)
    prompt.features.pop(0)
    (start, length), *_ = layout.media[0].ranges
    late, _, late_extras = served.language.rows(prompt, start, start + length)
    assert not late.any(), "a feature that is missing leaves zeros"
    assert not any(level.any() for level in late_extras.values())
    assert positions.device == served.language.device


def assert_rows_are_those_of(
    language: Any, prompt: LoweredPrompt, whole: tuple[Any, Any, Any], size: int
) -> None:
    """Made in pieces of `size` tokens they are what they are in one."""
    tokens = len(prompt.token_ids)
    parts = [language.rows(prompt, start, min(start + size, tokens)) for start in range(0, tokens, size)]
    assert torch.equal(torch.cat([part[0] for part in parts]), whole[0])
    assert torch.equal(torch.cat([part[1] for part in parts], dim=1), whole[1])
    for name, level in whole[2].items():
        assert torch.equal(torch.cat([part[2][name] for part in parts]), level)


def test_a_feature_of_another_length_is_refused_and_changes_nothing(checkpoint: Checkpoint) -> None:
    served = zoo.serve(checkpoint("llava"))
    picture = zoo.image(60, 60)
    layout = served.frontend.layout(zoo.conversation(picture, "tell"), [picture.info])
    prompt = served.language.lower(layout.token_ids, layout.media)
    with pytest.raises(CountMismatchError, match="16 placeholders of width 64"):
        served.language.fill(prompt, 0, Feature("image", {"embeddings": torch.ones(15, 64)}))
    assert not prompt.features
    assert 0 in prompt.missing


def test_no_encoder_is_made_for_a_text_model(checkpoint: Checkpoint) -> None:
    with pytest.raises(UnsupportedModelError, match=r"spec\.encoder.*remove the pool"):
        load_encoder(ModelSpec(id=str(checkpoint("llama"))), zoo.CPU)


def test_a_model_whose_state_is_not_kv_is_rejected(tmp_path: Path) -> None:
    import transformers

    config = transformers.MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=64, state_size=4)
    transformers.MambaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="choose"):
        load_language_model(ModelSpec(id=str(tmp_path)), zoo.CPU)


def test_dtype_auto_is_the_checkpoints(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = _copy(checkpoint("qwen2_5_vl"), tmp_path)
    assert load_language_model(ModelSpec(id=str(folder)), zoo.CPU).dtype == torch.float32
    half = load_language_model(ModelSpec(id=str(folder), dtype="BFloat16"), zoo.CPU)
    assert {p.dtype for p in half.model.parameters()} == {torch.bfloat16}
    assert half.kv_layout.dtype == "bfloat16"
    assert half.embed(torch.tensor([4]))[0].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("model_id", "says"),
    [
        ("/no/such/folder", "has no config.json"),
        ("three/part/name", "nor a hub id"),
        ("nobody/nothing-here", "could not be fetched|does not exist on the hub"),
    ],
)
def test_a_model_that_is_not_there_is_named_with_a_remedy(
    model_id: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UnsupportedModelError, match=rf"spec\.model\.id.*({says})"):
        source.resolve(ModelSpec(id=model_id), weights=True)


def test_a_model_longer_than_it_was_made_for_is_refused(checkpoint: Checkpoint) -> None:
    spec = ModelSpec(id=str(checkpoint("llama")), max_model_len=4097)
    with pytest.raises(
        UnsupportedModelError, match=r"spec\.model\.maxModelLen: 4097 exceeds the model's 4096"
    ):
        load_frontend(spec, MediaPolicy())
    assert load_frontend(spec.model_copy(update={"max_model_len": 100}), MediaPolicy()).max_model_len == 100


def test_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "from_the_future"}')
    with pytest.raises(UnsupportedModelError, match="code from model repositories is never run"):
        load_frontend(ModelSpec(id=str(tmp_path)), MediaPolicy())


def _copy(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to / "copy"))


def _layers(model: torch.nn.Module) -> list[torch.nn.ModuleList]:
    """Of each vision tower."""
    towers = [module for name, module in model.named_modules() if name.split(".")[-1].endswith("_tower")]
    return [m for tower in towers for m in tower.modules() if isinstance(m, torch.nn.ModuleList)]


def _unread_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The last of each tower: these checkpoints make features of the hidden states before it."""
    return [layers[-1] for layers in _layers(model)]
