"""LoRA adapters against `generate` of the model with W + scale * B A in place of W, and what is refused before anything is served."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mmd_api.contract.errors import (
    BadLogitsError,
    EngineSettingsError,
    MemoryBudgetError,
    StepFailedError,
    UnsupportedModelError,
)
from mmd_api.spec.adapters import AdapterSpec
from mmd_workers.caches.index import CacheIndex
from mmd_workers.engine.memory.blocks import root_of
from mmd_workers.features.references import media_spans
from mmd_workers.model import __file__ as model_package
from mmd_workers.model.adapters import adapter_for
from mmd_workers.model.source import load_config
from mmd_workers.vllm_engine.setup import arguments, lora
from mmd_workers.wire.messages.every_pod import CacheReport
from support.oracles import adapters
from support.oracles import model_zoo as zoo

from . import cores

TOKENS = zoo.NEW_TOKENS
LONG = "tell me which of these is the larger one, and what else you see there"
ARCHITECTURES = ["demo", "qwen2_vl", "llava"]
BASE = ""


class Adapted:
    """A checkpoint with two adapters of different ranks and layers, and what it answers with and without them."""

    def __init__(self, arch: str, folder: Path) -> None:
        demo = Path(model_package).parent / "demo"
        self.folder = demo if arch == "demo" else cores.checkpoint(arch, folder)
        self.text = cores.question(self.folder, LONG)
        self.image = cores.question(self.folder, "what is this", zoo.image(100, 64, 1), LONG)
        self.whole = self.text.served.model
        self.adapters = {
            "one": adapters.write(folder / "one", self.whole, seed=1, rank=8),
            "two": adapters.write(
                folder / "two", self.whole, seed=2, rank=3, targets=adapters.ALL_LINEAR, use_rslora=False
            ),
        }
        # vLLM changes the classes of transformers whose models it runs: what they answer comes first.
        self.answers = {
            (kind, name): asked.answer(TOKENS, self.adapters.get(name))
            for kind, asked in (("text", self.text), ("image", self.image))
            for name in (BASE, *self.adapters)
        }
        for kind in ("text", "image"):
            mine = [self.answers[kind, name] for name in (BASE, *self.adapters)]
            assert all(a != b for a, b in itertools.combinations(mine, 2)), "the adapters change nothing"

    def asked(self, kind: str) -> cores.Question:
        return self.text if kind == "text" else self.image


@pytest.fixture(scope="module", params=ARCHITECTURES)
def adapted(request, tmp_path_factory):
    return Adapted(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def pair(adapted):
    """A core that prefills and one that decodes; each could do both."""
    return [cores.make(adapted.folder, adapters=adapted.adapters) for _ in range(2)]


@pytest.fixture
def core(pair):
    yield pair[0]
    cores.clear(pair)


def test_requests_with_and_without_adapters_share_steps(core, adapted):
    for kind, name in adapted.answers:
        core.add(f"{kind} {name}", adapted.asked(kind).by(name), stop_after_prefill=False)
        cores.supply(core, f"{kind} {name}", adapted.asked(kind))
    outcome = cores.step(core)
    assert not outcome.failed
    assert max(step.decode_sequences for step in outcome.steps) == len(adapted.answers)
    for (kind, name), answer in adapted.answers.items():
        assert outcome.tokens[f"{kind} {name}"] == answer, (kind, name)
    cores.assert_empty(core)


def test_a_sequence_keeps_its_adapter_on_another_pod(core, pair, adapted):
    for kind, name in adapted.answers:
        asked, sequence = adapted.asked(kind), f"{kind} {name}"
        core.add(sequence, asked.by(name), stop_after_prefill=True)
        cores.supply(core, sequence, asked)
        outcome = cores.step(core)
        prompt = len(asked.request.token_ids)
        pair[1].reserve(sequence, prompt, TOKENS)
        for start, end in outcome.ready[sequence]:
            pair[1].write_kv(sequence, start, core.read_kv(sequence, start, end))
        pair[1].attach(sequence, asked.by(name), outcome.tokens[sequence])
        core.abort(sequence)
        adapted_first = outcome.tokens[sequence]
        rest = cores.step(pair[1], None, lambda done: not pair[1].has_work()).tokens[sequence]
        assert [*adapted_first, *rest] == adapted.answers[kind, name], (kind, name)


def test_a_cached_prefix_serves_only_the_adapter_that_computed_it(core, adapted):
    asked = adapted.image
    for name in (BASE, *adapted.adapters):
        assert core.cached_tokens(asked.by(name)) == 0, name
        first = cores.run(core, asked, asked.by(name))
        assert first.admitted["a"] == [0]
        assert core.cached_tokens(asked.by(name)) > 0
    for name in (BASE, *adapted.adapters):
        again = cores.run(core, asked, asked.by(name))
        assert again.admitted["a"][0] > 0
        assert again.tokens["a"] == adapted.answers["image", name], name


def test_routers_know_the_blocks_of_each_adapter_by_names_of_their_own(core, adapted):
    asked, known = adapted.image, set()
    for name in (BASE, *adapted.adapters):
        cores.run(core, asked, asked.by(name))
        core.prefix_changes.restart()
        reported, index = set(core.prefix_changes.take(1000).added), CacheIndex()
        index.take(CacheReport("p", "i", 1, cores.IDENTITY, list(reported), []))
        spans = media_spans(asked.request.features)
        wanted = index.prefix_of(asked.request.token_ids, spans, root_of(name, ""))[cores.IDENTITY]
        assert reported - known == reported & set(wanted)
        assert reported - known
        known |= reported


def test_a_request_for_an_adapter_that_is_not_loaded_fails_alone(core, adapted):
    for work in (core.cached_tokens, lambda request: core.add("a", request, stop_after_prefill=False)):
        with pytest.raises(StepFailedError, match="adapter three is not loaded on this pod"):
            work(adapted.text.by("three"))
    assert cores.ask(core, adapted.text) == adapted.answers["text", BASE]


def test_a_warm_up_runs_every_adapter_and_leaves_nothing(core, adapted):
    core.warm_up()
    cores.assert_empty(core)
    assert cores.ask(core, adapted.text, adapted.text.by("two")) == adapted.answers["text", "two"]


def test_vllms_metric_of_adapters_names_those_that_run_now(core, adapted):
    def series() -> list[dict[str, str]]:
        found = [f for f in core.metrics.registry.collect() if f.name == "vllm:lora_requests_info"]
        return [sample.labels for family in found for sample in family.samples]

    for name in ("two", "one", BASE):
        core.add(f"by {name}", adapted.text.by(name), stop_after_prefill=False)
    cores.step(core, None, lambda done: len(done.tokens) == 3)
    core.stats()
    (running,) = series()
    assert set(running["running_lora_adapters"].split(",")) == {"one", "two"}
    core.abort("by two")
    core.stats()
    assert [one["running_lora_adapters"] for one in series()] == ["one"]
    cores.step(core)
    core.stats()
    assert [one["running_lora_adapters"] for one in series()] == [""]


def test_ranks_and_slots_follow_the_adapters_with_a_spare_on_cpus(adapted):
    loras = lora.found(specs(adapted.adapters))
    assert [one.rank for one in loras] == [8, 3]
    assert lora.arguments(loras, cores.CPU) == {
        "enable_lora": True,
        "max_loras": 3,
        "max_cpu_loras": 3,
        "max_lora_rank": 8,
    }
    assert lora.arguments(loras, torch.device("cuda"))["max_loras"] == 2
    assert lora.arguments([], cores.CPU) == {}


def test_float32_with_adapters_is_refused_on_a_gpu_before_anything_is_loaded(adapted):
    loras, config = lora.found(specs(adapted.adapters)), load_config(adapted.folder)
    for dtype in ("Float32", "BFloat16"):
        pod = cores.pod_of(adapted.folder, dtype=dtype)
        given = (pod, adapted.folder, adapter_for(config), torch.device("cuda"), "engine")
        arguments.engine_arguments(*given)
        if dtype == "Float32":
            with pytest.raises(EngineSettingsError, match=r"^spec\.model\.dtype: on GPUs vLLM .* BFloat16"):
                arguments.engine_arguments(*given, loras)
        else:
            arguments.engine_arguments(*given, loras)


def test_what_adapters_take_is_counted_before_the_kv_pool_is_made(core, adapted):
    loras = lora.found(specs(adapted.adapters))
    counted = lora.memory_bytes(loras, adapted.folder, cores.CPU, 4, 0)
    manager = core._core.model_executor.driver_worker.worker.model_runner.lora_manager._adapter_manager
    slots = sum(
        tensor.nbytes
        for module in manager.modules.values()
        for name in ("lora_a_stacked", "lora_b_stacked")
        for tensor in getattr(module, name)
    )
    own = sum(weights.nbytes for model in manager.list_adapters().values() for weights in tensors_of(model))
    assert slots + own <= counted <= 4 * (slots + own)
    assert lora.memory_bytes([], adapted.folder, cores.CPU, 4, 64) == 0


@pytest.mark.parametrize(("itemsize", "copied"), [(4, 4), (2, 6)])
def test_a_steps_copies_of_half_precision_are_counted_in_both_precisions(adapted, itemsize, copied):
    """What vLLM's CPU kernel gathers for each token, it converts to float32."""
    loras = lora.found(specs(adapted.adapters))
    at_rest, in_a_step = (
        lora.memory_bytes(loras, adapted.folder, cores.CPU, itemsize, tokens) for tokens in (0, 10)
    )
    widest = max(columns for _, columns in lora._matrices(adapted.folder))
    assert in_a_step - at_rest == 10 * 8 * widest * copied


def test_where_adapters_leave_too_little_memory_the_message_has_what_they_take(adapted, monkeypatch):
    def pool(*_: object, **__: object) -> int:
        raise MemoryBudgetError("enough KV for 3 tokens")

    monkeypatch.setattr(arguments, "kv_pool_bytes", pool)
    pod, config = cores.pod_of(adapted.folder), load_config(adapted.folder)
    for loras, words in (
        (lora.found(specs(adapted.adapters)), "MiB are for spec.engine.adapters"),
        ([], "3 tokens"),
    ):
        with pytest.raises(MemoryBudgetError, match=f"{words}.*$") as refused:
            arguments.engine_arguments(pod, adapted.folder, adapter_for(config), cores.CPU, "engine", loras)
        assert ("adapters" in refused.value.message) == bool(loras)


def test_the_kv_pool_is_made_of_what_adapters_leave(adapted, monkeypatch):
    pod, seen = cores.pod_of(adapted.folder), []

    def pool(*_: object, weight_bytes: int, **__: object) -> int:
        seen.append(weight_bytes)
        return 0

    monkeypatch.setattr(arguments, "kv_pool_bytes", pool)
    config = load_config(adapted.folder)
    loras = lora.found(specs(adapted.adapters))
    for those in ([], loras):
        arguments.engine_arguments(pod, adapted.folder, adapter_for(config), cores.CPU, "engine", those)
    assert seen[1] - seen[0] == lora.memory_bytes(loras, adapted.folder, cores.CPU, 4, cores.CHUNK)


def tensors_of(model):
    for layer in model.loras.values():
        for part in (layer.lora_a, layer.lora_b):
            yield from part if isinstance(part, list) else [part]


def specs(folders: dict[str, Path]) -> list[AdapterSpec]:
    return [AdapterSpec(name=name, id=str(folder)) for name, folder in folders.items()]


# --- other architectures ------------------------------------------------------------------------------------------

OTHERS = [
    "qwen2_5_vl",
    "qwen3_vl",
    "internvl",
    "gemma3",
    "llava_next",
    "mistral3",
    "idefics3",
    "smolvlm",
    "qwen2_5_omni",
    "audioflamingo3",
]
WITHOUT = ["llava_onevision", "qwen2_audio"]


@pytest.mark.parametrize("arch", OTHERS)
def test_an_architecture_answers_with_an_adapter_as_the_merged_model_does(arch, tmp_path):
    """In a step with a request for the model alone."""
    folder = cores.checkpoint(arch, tmp_path)
    asked = cores.question(folder, LONG)
    loras = {"one": adapters.write(tmp_path / "one", asked.served.model, seed=1, targets=adapters.ALL_LINEAR)}
    answers = {name: asked.answer(TOKENS, loras.get(name)) for name in (BASE, "one")}
    assert answers[BASE] != answers["one"]
    core = cores.make(folder, adapters=loras)
    for name in answers:
        core.add(f"by {name}", asked.by(name), stop_after_prefill=False)
    assert cores.step(core).tokens == {f"by {name}": answer for name, answer in answers.items()}


PATTERNS: dict[str, dict[str, Any]] = {
    "ranks": {"rank_pattern": {"q_proj": 2, "0.self_attn.v_proj": 16}},
    "alphas": {"alpha_pattern": {"self_attn.o_proj": 64, "0.self_attn.q_proj": 1}},
    "rslora": {
        "use_rslora": True,
        "lora_alpha": 4,
        "rank_pattern": {"v_proj": 4},
        "alpha_pattern": {"k_proj": 9},
    },
}


def test_ranks_and_alphas_of_single_layers_and_rslora_scale_as_peft_does(tmp_path):
    folder = cores.checkpoint("qwen2_vl", tmp_path)
    asked = cores.question(folder, LONG)
    loras = {
        name: adapters.write(tmp_path / name, asked.served.model, seed=1, **config)
        for name, config in PATTERNS.items()
    }
    answers = {name: asked.answer(TOKENS, folder) for name, folder in loras.items()}
    core = cores.make(folder, adapters=loras)
    assert {name: cores.ask(core, asked, asked.by(name)) for name in answers} == answers


@pytest.mark.parametrize("arch", WITHOUT)
def test_an_architecture_that_vllm_runs_without_adapters_is_refused(arch, tmp_path):
    folder = cores.checkpoint(arch, tmp_path)
    loras = {"one": adapters.write(tmp_path / "one", cores.served(folder).model, seed=1)}
    with pytest.raises(
        EngineSettingsError, match=r"^spec\.engine\.adapters: vLLM .* has no LoRA adapters for "
    ):
        cores.make(folder, adapters=loras)


@pytest.mark.alone
@cores.needs_ranks
def test_ranks_answer_with_adapters_and_report_what_does_not_fit(tmp_path):
    adapted = Adapted("llava", tmp_path)
    core = cores.make(adapted.folder, vllm={"tensorParallelSize": 2}, adapters=adapted.adapters)
    try:
        for name in (BASE, *adapted.adapters):
            assert cores.ask(core, adapted.image, adapted.image.by(name)) == adapted.answers["image", name]
        tensor = f"{adapters.PREFIX}model.vision_tower.lora_A.weight"
        bad = adapters.write(tmp_path / "bad", adapted.whole, seed=3, also={tensor: torch.zeros(8, 8)})
        assert f"cannot serve it: its tensor {tensor} changes no linear layer" in refused(core, bad)
    finally:
        core.shut_down()


@pytest.mark.alone
@cores.needs_ranks
def test_ranks_that_share_a_kv_head_answer_with_an_adapter(tmp_path):
    """vLLM counts the copies of such a head, and the adapter has it once."""
    size = cores.random_model.Size(hidden=128, kv_heads=1)
    folder = cores.random_model.build("qwen2_vl", tmp_path / "model", size=size)
    asked = cores.question(folder, LONG)
    loras = {"one": adapters.write(tmp_path / "one", asked.served.model, seed=1, targets=adapters.ALL_LINEAR)}
    answers = {name: asked.answer(TOKENS, loras.get(name)) for name in (BASE, "one")}
    core = cores.make(folder, vllm={"tensorParallelSize": 2}, adapters=loras)
    try:
        assert {name: cores.ask(core, asked, asked.by(name)) for name in answers} == answers
    finally:
        core.shut_down()


# --- what is refused ----------------------------------------------------------------------------------------------

KINDS = {
    "another method": ({"peft_type": "IA3"}, "its peft_type is IA3, and only LORA is served"),
    "weights that are split into direction and magnitude": (
        {"use_dora": True},
        "vLLM does not yet support DoRA",
    ),
    "layers that are replaced": ({"modules_to_save": ["embed_tokens"]}, "modules_to_save"),
    "a rank beyond vLLM's": ({"r": 1024}, "its rank is 1024, and the largest is 512"),
    "no rank at all": ({"r": None}, "cannot serve it"),
    "a pattern that is none": ({"alpha_pattern": {"(": 8}}, "cannot serve it"),
}


@pytest.mark.parametrize(("config", "words"), KINDS.values(), ids=KINDS)
def test_an_unsupported_kind_of_adapter_is_refused_in_one_line(adapted, tmp_path, config, words):
    folder = adapters.write(tmp_path / "bad", adapted.whole, seed=3, **config)
    with pytest.raises(
        EngineSettingsError, match=r"spec\.engine\.adapters\[bad\]: vLLM .* cannot serve it: "
    ) as refused:
        lora.found(specs({"bad": folder}))
    assert words in refused.value.message
    assert "\n" not in refused.value.message


@pytest.mark.parametrize("content", ["{", "[]", "{}"])
def test_a_configuration_that_is_none_is_refused_in_one_line(tmp_path, content):
    (tmp_path / "adapter_config.json").write_text(content)
    with pytest.raises(
        EngineSettingsError, match=r"spec\.engine\.adapters\[bad\]: .*; set id to another adapter"
    ):
        lora.found(specs({"bad": tmp_path}))


def test_an_adapter_that_is_not_there_is_named(tmp_path):
    with pytest.raises(
        UnsupportedModelError, match=r"spec\.engine\.adapters\[gone\]\.id: .* has no adapter_config\.json"
    ):
        lora.found(specs({"gone": tmp_path / "gone"}))


def test_a_tensor_that_changes_no_layer_of_the_language_model_is_named(core, adapted, tmp_path):
    """vLLM itself would leave it out, and the adapter would answer in part as the model alone."""
    layers = (name for name, module in adapted.whole.named_modules() if isinstance(module, torch.nn.Linear))
    tower = next(name for name in layers if name not in adapters.linears(adapted.whole) and name != "lm_head")
    first = next(iter(adapters.linears(adapted.whole)))
    for place in (tower, first.replace("layers.0", "layers.77"), f"another.{first}"):
        name = f"{adapters.PREFIX}{place}.lora_A.weight"
        also = {name: torch.zeros(8, 8)}
        folder = adapters.write(tmp_path / place, adapted.whole, seed=3, also=also)
        refusal = refused(core, folder)
        assert f"its tensor {name} changes no linear layer" in refusal


def test_an_adapter_for_a_model_of_another_size_is_refused(core, adapted, tmp_path):
    """vLLM itself would fill a part of the layer with it."""
    folder = adapters.write(tmp_path / "small", adapted.whole, seed=3)
    name = f"{adapters.PREFIX}{next(iter(adapters.linears(adapted.whole)))}"
    for end, shape, words in (("A", (8, 5), "inputs"), ("B", (5, 8), "outputs")):
        tensor = f"{name}.lora_{end}.weight"
        adapters.write(folder, adapted.whole, seed=3, also={tensor: torch.zeros(shape)})
        refusal = refused(core, folder)
        assert f"its tensor {tensor} has the shape {list(shape)}, and the model's layer has " in refusal
        assert words in refusal


def test_half_a_layer_or_a_rank_unlike_the_configuration_is_refused(core, adapted, tmp_path):
    """vLLM itself would answer as the model alone there, or scale what the tensors make wrongly."""
    name = f"{adapters.PREFIX}{next(iter(adapters.linears(adapted.whole)))}"
    folder = adapters.write(tmp_path / "bad", adapted.whole, seed=3)
    whole = load_file(folder / "adapter_model.safetensors")
    for missing, left in (("A", "B"), ("B", "A")):
        some = {key: value for key, value in whole.items() if key != f"{name}.lora_{missing}.weight"}
        save_file(some, folder / "adapter_model.safetensors")
        assert f"it has lora_{left} alone" in refused(core, folder)
    save_file({}, folder / "adapter_model.safetensors")
    assert "it has no tensors" in refused(core, folder)
    adapters.write(folder, adapted.whole, seed=3, rank=4, r=8)
    assert "are 4 and 4, and its configuration has 8 there" in refused(core, folder)
    adapters.write(folder, adapted.whole, seed=3)
    config = json.loads((folder / "adapter_config.json").read_text()) | {"rank_pattern": {"q_proj": 16}}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    assert "are 8 and 8, and its configuration has 16 there" in refused(core, folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_adapter_with_values_that_are_not_finite_is_refused(core, adapted, tmp_path, value):
    layer, module = next(iter(adapters.linears(adapted.whole).items()))
    tensor = f"{adapters.PREFIX}{layer}.lora_A.weight"
    bad = torch.full((8, module.in_features), value)
    folder = adapters.write(tmp_path / "bad", adapted.whole, seed=3, also={tensor: bad})
    assert f"its tensor {tensor} has values that are not numbers, or infinite" in refused(core, folder)


def test_an_adapter_whose_values_overflow_is_named_before_the_pod_is_ready(adapted, tmp_path):
    folder = adapters.write(tmp_path / "huge", adapted.whole, seed=3, strength=1e30)
    core = cores.make(adapted.folder, adapters={"huge": folder, **adapted.adapters})
    with pytest.raises(
        BadLogitsError, match="adapter huge and the model computed logits that are not numbers"
    ):
        core.warm_up()


def refused(core, folder: Path) -> str:
    with pytest.raises(EngineSettingsError) as error:
        lora.load(core._core, [replace(one, name="bad") for one in lora.found(specs({"bad": folder}))])
    return error.value.message


def test_a_pod_with_an_adapter_that_does_not_fit_makes_no_core(tmp_path):
    folder = cores.checkpoint("llava", tmp_path)
    small = zoo.serve(
        cores.random_model.build("llava", tmp_path / "small", size=cores.random_model.Size(hidden=64))
    )
    bad = adapters.write(tmp_path / "bad", small.model, seed=1)
    assert json.loads((bad / "adapter_config.json").read_text())["r"] == 8
    dtype = "Float32" if cores.DEVICE.type == "cpu" else "BFloat16"  # of which vLLM takes adapters
    with pytest.raises(
        EngineSettingsError, match=r"spec\.engine\.adapters\[bad\]: .* the model's layer has 128 inputs"
    ):
        cores.make(folder, adapters={"bad": bad}, dtype=dtype)
