"""Whole decoder layers by the CPU kernels: which are, that a wrong one is found at the start, and that the others serve the same tokens.

That fused layers answer as `generate` does is tested where the engine is: tests/engine/test_engine_equals_generate.py.
"""

import gc
import logging
import weakref

import pytest
import torch
import transformers

from mmd_workers.engine import fusion
from mmd_workers.engine.cpu import layer as cpu_layer
from mmd_workers.engine.cpu import library
from mmd_workers.engine.memory.kv_pool import KvPool
from mmd_workers.engine.profile import activation_bytes
from mmd_workers.model.prompt import KvLayout
from support.harness.needed import NO_COMPILER, needs
from support.oracles.devices import cpu_only
from support.oracles.engine_oracle import (
    SMALL,
    TEXT_MODELS,
    TextModel,
    generate,
    make_engine,
    prompt_of,
    run,
    text_input,
    vary,
)

LENGTHS = (3, 30, 21)
TOKENS = 12

pytestmark = [
    cpu_only,
    needs(library.load(), NO_COMPILER),
]


def fused(model):
    return [fusion.is_fused(layer) for layer in model.decoder.layers]


def answers(model, **settings):
    engine = make_engine(model, chunk_tokens=12, **settings)
    for number, length in enumerate(LENGTHS):
        engine.add(text_input(model, str(number), prompt_of(length, length), TOKENS))
    tokens = run(engine).tokens
    return [tokens[str(number)] for number in range(len(LENGTHS))]


def expected(reference):
    return [generate(reference, prompt_of(length, length), TOKENS) for length in LENGTHS]


@pytest.mark.parametrize("name", TEXT_MODELS)
def test_every_layer_of_these_architectures_is_fused(name, caplog):
    caplog.set_level(logging.INFO)
    model = TextModel(TEXT_MODELS[name]())
    assert answers(model) == expected(TEXT_MODELS[name]())
    assert fused(model) == [True, True]
    assert "2 of 2 decoder layers run as one call of the CPU kernels" in caplog.text


@pytest.mark.parametrize("name", TEXT_MODELS)
def test_the_path_of_other_architectures_serves_these_too(name):
    model = TextModel(TEXT_MODELS[name]())
    assert answers(model, fused_layers=False) == expected(TEXT_MODELS[name]())
    assert fused(model) == [False, False]
    linears = {type(m).__name__ for m in model.decoder.modules() if "Linear" in type(m).__name__}
    assert linears == {"PackedLinear"}


def test_layers_that_follow_one_another_are_one_call():
    """Gemma 3 gives sliding and full layers other rotary positions, so there a call ends."""
    calls = {}
    for name in ("llama", "gemma2", "gemma3"):
        model = TextModel(TEXT_MODELS[name]())
        make_engine(model)
        calls[name] = [
            layer.forward.indices for layer in model.decoder.layers if layer.forward is not fusion.passed
        ]
    assert calls == {"llama": [[0, 1]], "gemma2": [[0, 1]], "gemma3": [[0], [1]]}


def test_the_weights_of_a_fused_layer_are_not_held_twice():
    model = TextModel(TEXT_MODELS["llama"]())
    weights = [weakref.ref(p) for layer in model.decoder.layers for p in layer.parameters()]
    make_engine(model)
    gc.collect()
    assert [weight() for weight in weights if weight() is not None] == []


def test_a_second_engine_uses_the_layers_that_the_first_has_fused():
    model = TextModel(TEXT_MODELS["qwen3"]())
    assert answers(model) == answers(model) == expected(TEXT_MODELS["qwen3"]())


def test_a_pod_that_measures_a_step_first_serves_with_fused_layers():
    model = TextModel(TEXT_MODELS["llama"]())
    sizes = {"chunk_tokens": 64, "max_sequences": 4, "block_tokens": 8, "max_model_len": 256}
    measured = activation_bytes(model, **sizes)
    assert fused(model) == [True, True]
    rows, hidden = 67, 64
    assert measured > 4 * rows * (2 * hidden + 3 * hidden), "what is shared between threads counts too"
    assert answers(model) == expected(TEXT_MODELS["llama"]())


BROKEN = {
    "a bias is lost": lambda struct: setattr(struct.qkv, "bias", None),
    "a norm is lost": lambda struct: setattr(struct.query, "scale", None),
    "scores are scaled otherwise": lambda struct: setattr(struct, "scale", struct.scale * 1.01),
    "another activation": lambda struct: setattr(struct, "activation", 1),
}


@pytest.mark.parametrize("how", BROKEN)
def test_kernels_that_compute_something_else_are_found_at_the_start(how, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    name = "qwen3" if "norm" in how else "qwen2"
    pack = cpu_layer.PackedLayer.__init__

    def broken(self, layer, kernels, call):
        pack(self, layer, kernels, call)
        if layer.self_attn.layer_idx == 1:
            BROKEN[how](self.struct)

    monkeypatch.setattr(cpu_layer.PackedLayer, "__init__", broken)
    model = TextModel(TEXT_MODELS[name]())
    assert answers(model) == expected(TEXT_MODELS[name]())
    assert fused(model) == [True, False]
    assert "decoder layers 1 run module by module: the kernels differ from Qwen" in caplog.text
    assert "1 of 2 decoder layers run as one call" in caplog.text


def test_a_layer_that_does_more_than_its_modules_is_not_fused(caplog):
    """Granite has the modules of Llama, and multiplies what they return."""
    caplog.set_level(logging.INFO)

    def make():
        config = transformers.GraniteConfig(**SMALL, residual_multiplier=0.9, attention_multiplier=0.2)
        return vary(transformers.GraniteForCausalLM(config))

    model = TextModel(make())
    assert answers(model) == expected(make())
    assert fused(model) == [False, False]
    assert (
        "decoder layers 0-1 run module by module: the kernels differ from GraniteDecoderLayer" in caplog.text
    )


@pytest.mark.parametrize("original", [16, 8192])
def test_a_layer_that_reads_its_positions_otherwise_stays_as_it_is(original, caplog):
    """Ministral 3 has the modules of Mistral, and scales queries from the position `original` on; the check may see no such position."""
    caplog.set_level(logging.INFO)
    scaled = {"llama_4_scaling_beta": 1.0, "original_max_position_embeddings": original}

    def make():
        config = transformers.Ministral3Config(
            **SMALL,
            head_dim=16,
            sliding_window=None,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0, **scaled},
        )
        return vary(transformers.Ministral3ForCausalLM(config))

    model = TextModel(make())
    assert answers(model) == expected(make())
    assert fused(model) == [False, False]
    assert "run module by module: Ministral3DecoderLayer reads position_ids" in caplog.text


def test_a_layer_that_takes_other_inputs_stays_as_it_is(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    own = transformers.models.llama.modeling_llama.LlamaAttention.forward

    def forward(self, hidden_states, position_embeddings=None, per_layer_input=None, **kwargs):
        return own(self, hidden_states, position_embeddings, **kwargs)

    monkeypatch.setattr(transformers.models.llama.modeling_llama.LlamaAttention, "forward", forward)
    model = TextModel(TEXT_MODELS["llama"]())
    make_engine(model)
    assert fused(model) == [False, False]
    assert "run module by module: LlamaAttention takes per_layer_input" in caplog.text


def test_the_check_reaches_the_positions_of_a_full_context():
    model, seen = TextModel(TEXT_MODELS["llama"]()), []
    forward = model.forward
    model.forward = lambda embeds, positions, extras: (
        seen.append(positions) or forward(embeds, positions, extras)
    )
    make_engine(model)
    assert max(int(positions.max()) for positions in seen) == model.max_model_len - 1
    assert any(int(positions.min()) >= model.max_model_len // 2 for positions in seen)


def test_a_layer_whose_check_fails_with_an_error_stays_as_it_is(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    pack = cpu_layer.PackedLayer.__init__

    def broken(self, layer, kernels, call):
        if layer.self_attn.layer_idx == 1:
            raise ValueError("no such stride")
        pack(self, layer, kernels, call)

    monkeypatch.setattr(cpu_layer.PackedLayer, "__init__", broken)
    model = TextModel(TEXT_MODELS["llama"]())
    assert answers(model) == expected(TEXT_MODELS["llama"]())
    assert fused(model) == [True, False]
    assert "no such stride" in caplog.text
    assert "decoder layers 1 run module by module: the check failed with ValueError" in caplog.text


def test_a_layer_that_the_decoder_calls_otherwise_keeps_its_modules(monkeypatch, caplog):
    """What the decoder gives it by position, the kernels' forward does not take."""
    caplog.set_level(logging.INFO)
    layer = transformers.models.llama.modeling_llama.LlamaDecoderLayer
    call = layer.__call__

    def by_position(self, hidden_states, attention_mask=None, position_ids=None, **kwargs):
        return call(self, hidden_states, attention_mask, position_ids, **kwargs)

    monkeypatch.setattr(layer, "__call__", by_position)
    model = TextModel(TEXT_MODELS["llama"]())
    assert answers(model) == expected(TEXT_MODELS["llama"]())
    assert fused(model) == [False, False]
    assert "decoder layers 0-1 run module by module: the check failed with TypeError" in caplog.text


def test_a_decoder_that_cannot_be_observed_stays_as_it_is(monkeypatch, caplog):
    model = TextModel(TEXT_MODELS["llama"]())
    forward = model.forward
    model.forward = lambda *_: 1 // 0
    make_engine(model)
    model.forward = forward
    assert answers(model) == expected(TEXT_MODELS["llama"]())
    assert fused(model) == [False, False]
    assert "decoder layers run module by module: they cannot be checked" in caplog.text


def other_sizes(name, outputs, inputs):
    def change(layer):
        parent = layer.self_attn if name in cpu_layer.PROJECTIONS else layer.mlp
        setattr(parent, name, torch.nn.Linear(inputs, outputs, bias=False))

    return change


SIZES = {
    "q_proj": other_sizes("q_proj", 128, 64),
    "k_proj": other_sizes("k_proj", 24, 64),
    "v_proj": other_sizes("v_proj", 16, 64),
    "o_proj": other_sizes("o_proj", 64, 32),
    "up_proj": other_sizes("up_proj", 96, 64),
    "down_proj": other_sizes("down_proj", 64, 96),
    "bias": lambda layer: setattr(
        layer.mlp.gate_proj, "bias", torch.nn.Parameter(torch.zeros(128, dtype=torch.float64))
    ),
    "norm": lambda layer: layer.input_layernorm.double(),
}


@pytest.mark.parametrize("what", SIZES)
def test_weights_whose_sizes_do_not_fit_each_other_are_refused(what):
    """The kernels would read beyond them."""
    layer = TextModel(TEXT_MODELS["llama"]()).decoder.layers[0]
    kernels, call = library.load(), cpu_layer.AttentionCall(4, 16, 0.25, None, None)
    cpu_layer.PackedLayer(layer, kernels, call)
    SIZES[what](layer)
    with pytest.raises(cpu_layer.UnsuitedLayerError):
        cpu_layer.PackedLayer(layer, kernels, call)


@pytest.mark.parametrize("what", ["rank", "dtype"])
def test_rotary_positions_of_another_shape_are_refused(what, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding
    own = rotary.forward

    def other(self, x, position_ids):
        cos, sin = own(self, x, position_ids)
        return (cos.double(), sin.double()) if what == "dtype" else (cos[0, :, :], sin[0, :, :])

    monkeypatch.setattr(rotary, "forward", other)
    llama = transformers.models.llama.modeling_llama
    apply = llama.apply_rotary_pos_emb
    shape = (1, -1, 16)
    monkeypatch.setattr(
        llama,
        "apply_rotary_pos_emb",
        lambda q, k, cos, sin: apply(q, k, cos.float().view(shape), sin.float().view(shape)),
    )
    model = TextModel(TEXT_MODELS["llama"]())
    make_engine(model)
    assert fused(model) == [False, False]
    assert "decoder layers 0-1 run module by module: it is given torch.float" in caplog.text


def test_a_pool_of_other_heads_is_refused(caplog):
    """Of a layer whose code repeats its keys before attention."""
    caplog.set_level(logging.INFO)
    model = TextModel(TEXT_MODELS["llama"]())
    model.kv_layout = KvLayout(2, [4, 4], [16, 16], "float32")
    paged = fusion.attention.paged_attention
    make = lambda module, q, k, v, *a, **more: paged(  # noqa: E731
        module, q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), *a, **more
    )
    transformers.AttentionInterface.register(fusion.attention.NAME, make)
    try:
        make_engine(model)
    finally:
        transformers.AttentionInterface.register(fusion.attention.NAME, paged)
    assert fused(model) == [False, False]
    assert "its pool has heads [4, 16], not [2, 16]" in caplog.text


def test_a_model_does_not_keep_the_pool_of_a_deleted_engine():
    def pools_here() -> list[KvPool]:
        return [thing for thing in gc.get_objects() if isinstance(thing, KvPool)]

    model = TextModel(TEXT_MODELS["llama"]())
    of_other_tests = set(map(id, pools_here()))
    engine = make_engine(model)
    engine.add(text_input(model, "a", prompt_of(5, 1), 2))
    run(engine)
    pools = [weakref.ref(pool) for pool in pools_here() if id(pool) not in of_other_tests]
    assert pools
    del engine
    gc.collect()
    assert [pool() for pool in pools if pool() is not None] == []


def test_a_second_engine_of_an_unfused_model_logs_no_reason_again(caplog):
    caplog.set_level(logging.INFO)
    config = transformers.Olmo2Config(**SMALL)
    model = TextModel(vary(transformers.Olmo2ForCausalLM(config)))
    make_engine(model)
    caplog.clear()
    make_engine(model)
    assert "decoder layers" not in caplog.text


MUTATIONS = {
    "the feed-forward is lost where rows are many": (
        "layer.h",
        "for (int64_t r = 0; r < m; r++) add_to(to + r * size, one + r * size, l.after_mlp, size, to + r * size);",
        "",
    ),
    "only the first tile of a context is seen": (
        "attention.h",
        "for (int64_t start = begin; start < end; start += TILE) {",
        "for (int64_t start = begin; start < std::min<int64_t>(end, begin + TILE); start += TILE) {",
    ),
    "the sum of a context is not rescaled": ("attention.h", "if (moved)", "if (false)"),
}


@pytest.mark.parametrize("how", MUTATIONS)
def test_kernels_wrong_in_long_contexts_or_many_rows_are_rejected(how, monkeypatch, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    name, right, wrong = MUTATIONS[how]
    for path in (library.SOURCE, *(library.SOURCE.with_name(header) for header in library.HEADERS)):
        text = path.read_text()
        if path.name == name:
            assert text.count(right) == 1
            text = text.replace(right, wrong)
        (tmp_path / path.name).write_text(text)
    monkeypatch.setattr(library, "SOURCE", tmp_path / library.SOURCE.name)
    monkeypatch.setattr(library, "FLAGS", ["-O1", *library.FLAGS[1:]])
    mutant = library.Library(library._build(library._compiler(), "native", tmp_path / "mutant.so"))
    monkeypatch.setattr(library, "load", lambda: mutant)
    model = TextModel(TEXT_MODELS["llama"]())
    make_engine(model)
    assert fused(model) == [False, False]
    assert "run module by module: the kernels differ from LlamaDecoderLayer" in caplog.text


def test_a_window_that_the_kernels_ignore_is_found_however_large_it_is(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    run_layer = cpu_layer.PackedLayers.run

    def everything(self, x, rotary, pools, step, visible):
        return run_layer(self, x, rotary, pools, step, lambda _: visible(None))

    monkeypatch.setattr(cpu_layer.PackedLayers, "run", everything)
    config = transformers.MistralConfig(**SMALL, head_dim=16, sliding_window=1000)
    model = TextModel(vary(transformers.MistralForCausalLM(config)))
    make_engine(model)
    assert fused(model) == [False, False]
    assert "run module by module: the kernels differ from MistralDecoderLayer" in caplog.text


def test_layers_that_are_wrong_only_when_joined_are_calls_of_their_own(monkeypatch, caplog):
    run_layer = cpu_layer.PackedLayers.run

    def broken(self, *given):
        made = run_layer(self, *given)
        return made.flip(-1) if len(self._layers) > 1 else made

    monkeypatch.setattr(cpu_layer.PackedLayers, "run", broken)
    model = TextModel(TEXT_MODELS["gemma2"]())
    assert answers(model) == expected(TEXT_MODELS["gemma2"]())
    assert [layer.forward.indices for layer in model.decoder.layers] == [[0], [1]]
    assert "with all layers in one call the decoder returns something else" in caplog.text


SHAPES = {
    "Olmo2": "Olmo2DecoderLayer consists of",
    "Phi3": "Phi3DecoderLayer consists of",
    "Qwen3Moe": "Qwen3MoeSparseMoeBlock consists of",
    "StableLm": "StableLmDecoderLayer has no rotary positions for all dimensions of a head",
}


@pytest.mark.parametrize("family", SHAPES)
def test_a_layer_of_another_shape_stays_as_it_is(family, caplog):
    caplog.set_level(logging.INFO)
    more = {
        "Qwen3Moe": {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
    }.get(family, {})

    def make():
        config = getattr(transformers, f"{family}Config")(**SMALL, **more)
        return vary(getattr(transformers, f"{family}ForCausalLM")(config))

    model = TextModel(make())
    assert answers(model) == expected(make())
    assert fused(model) == [False, False]
    assert SHAPES[family] in caplog.text


def test_values_that_are_not_finite_fail_the_check(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    run_layer = cpu_layer.PackedLayers.run
    monkeypatch.setattr(
        cpu_layer.PackedLayers,
        "run",
        lambda self, *given: run_layer(self, *given) * torch.tensor(float("nan")),
    )
    model = TextModel(TEXT_MODELS["llama"]())
    make_engine(model)
    assert fused(model) == [False, False]
