"""Tokens a second of the native engine on a GPU beside `generate`, on a decoder of a realistic size with random weights in bfloat16.

    python -m bench.engine_on_gpu [--prompt 512] [--tokens 64] [--batches 1,16,64]

The decoder has the shape of Qwen2-VL-2B's (28 layers, hidden size 1536, 12 heads, 2 of KV). `generate` gets the
same prompts as one batch, all of one length, so it pads nothing. Prefill and decode are timed apart: the first token of all, and the
steps after it.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

from bench.report import keep
from mmd_workers.engine.engine import Engine
from support.oracles.engine_oracle import TextModel, prompt_of, text_input

BLOCK_TOKENS = 16  # of KV, the default
SHAPE = {
    "vocab_size": 151_936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
}


def decoder(device: torch.device) -> torch.nn.Module:
    """Random weights, made on the device."""
    config = transformers.Qwen2Config(**SHAPE)
    torch.manual_seed(0)
    with device:
        model = transformers.Qwen2ForCausalLM._from_config(config, dtype=torch.bfloat16)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval().to(device)


def seconds_of_generate(model: torch.nn.Module, prompts: list[list[int]], tokens: int) -> tuple[float, float]:
    """Of the first tokens, and of all those after them."""
    ids = torch.tensor(prompts, device=model.device)
    took = []
    for count in (1, tokens):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        with torch.inference_mode():
            model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
            )
        torch.cuda.synchronize()
        took.append(time.perf_counter() - begun)
    return took[0], took[1] - took[0]


def seconds_of_engine(
    engine: Engine, model: TextModel, prompts: list[list[int]], tokens: int
) -> tuple[float, float]:
    """Until every sequence has its first token, and of all steps after that."""
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for number, prompt in enumerate(prompts):
        engine.add(text_input(model, str(number), prompt, tokens))
    started, first = set[str](), 0.0
    while engine.has_work():
        started |= {token.sequence_id for token in engine.step().tokens}
        if not first and len(started) == len(prompts):
            first = time.perf_counter()
    return first - begun, time.perf_counter() - first


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--batches", default="1,16,64")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    device = torch.device(options.device)
    batches = [int(batch) for batch in options.batches.split(",")]
    rows: list[dict[str, Any]] = []

    def note(system: str, batch: int, run: Any) -> None:
        run()  # kernels are chosen and workspaces made
        best = [min(times) for times in zip(*(run() for _ in range(options.rounds)), strict=True)]
        rows.append(
            {
                "system": system,
                "sequences": batch,
                "prefill_tokens_per_second": round(batch * options.prompt / best[0], 1),
                "decode_tokens_per_second": round(batch * (options.tokens - 1) / best[1], 1),
            }
        )

    def prompts_of(batch: int) -> list[list[int]]:
        return [prompt_of(options.prompt, number) for number in range(batch)]

    with torch.inference_mode():
        full = decoder(device)
    for batch in batches:
        note("generate", batch, lambda b=batch: seconds_of_generate(full, prompts_of(b), options.tokens))
    model = TextModel(full)
    blocks = max(batches) * (-(-(options.prompt + options.tokens) // BLOCK_TOKENS) + 1)
    engine = Engine(
        model,
        kv_cache_bytes=blocks * BLOCK_TOKENS * model.kv_layout.bytes_per_token(),
        block_tokens=BLOCK_TOKENS,
        max_sequences=max(batches),
        chunk_tokens=4096,
        prefix_cache=False,
        max_model_len=options.prompt + options.tokens,
    )
    for batch in batches:
        note("engine", batch, lambda b=batch: seconds_of_engine(engine, model, prompts_of(b), options.tokens))
    table = Table("system", "sequences", "prefill tok/s", "decode tok/s")
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    Console().print(table)
    print(keep("engine_on_gpu", {"options": vars(options), "shape": SHAPE, "systems": rows}))


if __name__ == "__main__":
    main()
