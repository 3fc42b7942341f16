"""Tiny random models with varied outputs, a minimal LanguageModel over each, and `generate` as the oracle."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

import torch
import transformers

from mmd_api.contract.errors import CountMismatchError, PreemptedError
from mmd_workers.engine.engine import Engine
from mmd_workers.engine.interface import SamplingParams, SequenceInput, StepOutput
from mmd_workers.model.prompt import Feature, KvLayout, LoweredPrompt
from support.oracles.devices import DEVICE

warnings.filterwarnings("ignore")
transformers.logging.set_verbosity_error()
torch.set_num_threads(1)

VOCAB = 200
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}


def vary(model: torch.nn.Module, embedding_std: float = 1.0, std: float = 0.15) -> torch.nn.Module:
    """Re-randomise the weights so that greedy output is not one token repeated."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            scale = embedding_std if "embed" in name and parameter.shape[0] == VOCAB else std
            parameter.data = torch.randn(parameter.shape, generator=generator) * scale
        elif "bias" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.02
    model.eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.to(DEVICE)


def llama() -> torch.nn.Module:
    return vary(transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)))


def qwen2() -> torch.nn.Module:
    return vary(transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SMALL)))


def odd() -> torch.nn.Module:
    """A model with biases everywhere, and sizes that fill no vector or panel."""
    sizes = {"hidden_size": 72, "intermediate_size": 100, "num_attention_heads": 3, "num_key_value_heads": 1}
    config = transformers.LlamaConfig(**(SMALL | sizes), head_dim=48, attention_bias=True, mlp_bias=True)
    return vary(transformers.LlamaForCausalLM(config))


def qwen3() -> torch.nn.Module:
    """A model with norms of queries and keys."""
    return vary(transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SMALL, head_dim=32)))


def mistral() -> torch.nn.Module:
    """A model with a sliding window in every layer."""
    return vary(
        transformers.MistralForCausalLM(transformers.MistralConfig(**SMALL, head_dim=16, sliding_window=8))
    )


def gemma() -> torch.nn.Module:
    return vary(transformers.GemmaForCausalLM(transformers.GemmaConfig(**SMALL, head_dim=16)), 0.05, 0.3)


def gemma2() -> torch.nn.Module:
    """A model with a sliding window, and soft-capped attention and logits."""
    config = transformers.Gemma2Config(
        **SMALL,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=8,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=10.0,
        layer_types=["sliding_attention", "full_attention"],
    )
    config._attn_implementation = "eager"
    return vary(transformers.Gemma2ForCausalLM(config), 0.05, 0.3)


def gemma3() -> torch.nn.Module:
    config = transformers.Gemma3TextConfig(
        **SMALL, head_dim=16, sliding_window=8, layer_types=["sliding_attention", "full_attention"]
    )
    return vary(transformers.Gemma3ForCausalLM(config), 0.02, 0.3)


TEXT_MODELS = {build.__name__: build for build in (llama, odd, qwen2, qwen3, mistral, gemma, gemma2, gemma3)}


class TextModel:
    """The LanguageModel protocol over any HF causal language model, text and given embeddings only."""

    def __init__(self, full: torch.nn.Module) -> None:
        self.full = full
        self.decoder = full.get_decoder()
        self.head = full.get_output_embeddings()
        config = self.decoder.config
        layers = config.num_hidden_layers
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.kv_layout = KvLayout(
            layers, [config.num_key_value_heads] * layers, [head_dim] * layers, str(self.dtype).split(".")[1]
        )
        self.loaded_bytes = 0
        self.hidden_size = config.hidden_size
        self.vocab_size = config.vocab_size
        self.max_model_len = config.max_position_embeddings
        self.position_axes = 1
        self.bidirectional_prompt = False
        self.eos_token_ids: frozenset[int] = frozenset()
        self.suppress_token_ids: tuple[int, ...] = ()
        self.softcap = getattr(config, "final_logit_softcapping", None)

    @property
    def device(self) -> torch.device:
        return self.head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.head.weight.dtype

    def lower(self, token_ids, media=(), output_token_ids=()) -> LoweredPrompt:
        ids = list(token_ids) + list(output_token_ids)
        positions = torch.arange(len(ids)).expand(self.position_axes, -1)
        return LoweredPrompt(ids, positions, len(ids), {}, [])

    def fill(self, prompt: LoweredPrompt, medium: int, feature: Feature) -> None:
        first, last = prompt.missing[medium]
        if last - first != feature.num_tokens:
            raise CountMismatchError("feature of another size")
        prompt.features[medium], prompt.ranges[medium] = feature, [(first, last - first)]
        del prompt.missing[medium]

    def rows(self, prompt: LoweredPrompt, start: int, end: int):
        embeds, extras = self.embed(torch.tensor(prompt.token_ids))
        for medium, feature in prompt.features.items():
            ((first, length),) = prompt.ranges[medium]
            embeds[first : first + length] = feature.tensors["embeddings"]
        for first, last in prompt.missing.values():
            embeds[first:last] = 0
        return embeds[start:end], prompt.positions[:, start:end].to(self.device), extras

    def embed(self, token_ids: torch.Tensor):
        return self.decoder.get_input_embeddings()(token_ids.to(self.device)), {}

    def forward(self, embeds, positions, extras) -> torch.Tensor:
        ids = positions[:, None] if self.position_axes > 1 else positions
        out = self.decoder(inputs_embeds=embeds[None], position_ids=ids, use_cache=False, **extras)
        return out.last_hidden_state[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.head(hidden).float()
        return torch.tanh(logits / self.softcap) * self.softcap if self.softcap else logits


def make_engine(
    model, *, blocks=64, block_tokens=8, max_sequences=16, chunk_tokens=512, prefix_cache=True, **more
):
    kv_layout = model.kv_layout.packed_as(more.get("kv_dtype", "Model"))
    block_bytes = kv_layout.bytes_per_token() * block_tokens
    return Engine(
        model,
        kv_cache_bytes=blocks * block_bytes,
        block_tokens=block_tokens,
        max_sequences=max_sequences,
        chunk_tokens=chunk_tokens,
        prefix_cache=prefix_cache,
        **({"max_model_len": 1024} | more),
    )


def prompt_of(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, 180, (length,), generator=generator).tolist()


def greedy(max_tokens: int, **more) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **more)


def text_input(model, name: str, token_ids: list[int], max_tokens: int, **more) -> SequenceInput:
    return SequenceInput(name, model.lower(token_ids), greedy(max_tokens), **more)


@torch.inference_mode()
def generate(full: torch.nn.Module, token_ids: list[int], max_tokens: int, **more) -> list[int]:
    """The tokens that `generate` of an untouched model returns."""
    ids = torch.tensor([token_ids], device=full.device)
    out = full.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False, **more
    )
    return out[0, len(token_ids) :].tolist()


@dataclass
class Outcome:
    tokens: dict[str, list[int]] = field(default_factory=dict)
    steps: list[StepOutput] = field(default_factory=list)
    first_index: dict[str, int] = field(default_factory=dict)

    def take(self, output: StepOutput) -> None:
        assert not output.failed, output.failed
        self.steps.append(output)
        for token in output.tokens:
            tokens = self.tokens.setdefault(token.sequence_id, [])
            first = self.first_index.setdefault(token.sequence_id, token.index)
            assert token.index == first + len(tokens)
            tokens.append(token.token_id)


def run(engine: Engine, outcome: Outcome | None = None, max_steps: int = 2000) -> Outcome:
    """Step until no work is left. An engine that stands still fails."""
    outcome = outcome or Outcome()
    for _ in range(max_steps):
        if not engine.has_work():
            return outcome
        outcome.take(engine.step())
    raise AssertionError("the engine does not finish")


def decoded_elsewhere(decoders, count, place):
    """Output tokens of `count` requests, and how often one was preempted.

    Requests are placed wherever there is room, the oldest first, and again after each preemption.
    `place(decoder, number, outputs)`: hand the request over with its tokens so far, and note its next one;
    False: no room.
    """
    outputs = {number: [] for number in range(count)}
    waiting, yields = set(outputs), 0
    for _ in range(2000):
        for number in sorted(waiting):
            if not any(place(decoder, number, outputs[number]) for decoder in decoders):
                break
            waiting.discard(number)
        for decoder in decoders:
            output = decoder.step()
            for token in output.tokens:
                assert token.index == len(outputs[int(token.sequence_id)])
                outputs[int(token.sequence_id)].append(token.token_id)
            for sequence, error in output.failed:
                assert isinstance(error, PreemptedError)
                assert error.retryable
                waiting.add(int(sequence))
                yields += 1
        if not waiting and not any(decoder.has_work() for decoder in decoders):
            break
    return list(outputs.values()), yields
