"""The engine's paged attention with real split checkpoints: mixed batches of every case equal `generate`, one by one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mmd_api.spec.model import ModelSpec
from mmd_workers.engine.cpu import library
from mmd_workers.engine.engine import Engine
from mmd_workers.engine.fusion import is_fused
from mmd_workers.engine.interface import SamplingParams, SequenceInput
from mmd_workers.model.language import load_language_model
from support.oracles import model_zoo as zoo
from support.oracles.devices import DEVICE

from .cases import CASES, ORACLE

pytestmark = pytest.mark.models


NOT_FUSED = {"qwen3_omni_moe"}  # experts
CHUNKS = (1, 7, 48, 64, 4096)


@pytest.mark.parametrize("arch", list(zoo.MODALITIES))
def test_a_mixed_batch_equals_generate(arch: str, checkpoint: Callable[[str], Path]) -> None:
    """Whatever the chunks. Decoder layers run as one call of the CPU kernels wherever they have the shape."""
    served = zoo.serve(checkpoint(arch))
    language = load_language_model(ModelSpec(id=str(served.folder), dtype="Float32"), DEVICE)
    expected: dict[str, list[int]] = {}
    inputs: list[SequenceInput] = []
    for name in [case for a, case in ORACLE if a == arch]:
        parts = CASES[name][1]()
        media = [p for p in parts if isinstance(p, zoo.Medium)]
        messages = zoo.conversation(*parts)
        layout = served.frontend.layout(messages, [m.info for m in media])
        expected[name] = zoo.generate(served, zoo.hf_inputs(served, messages, media, layout))
        sampling = SamplingParams(
            max_tokens=zoo.NEW_TOKENS, ignore_eos=True, suppress_token_ids=language.suppress_token_ids
        )
        spans = [
            (s, n, f"{laid.modality} {m.info.digest}")
            for m, laid in zip(media, layout.media, strict=True)
            for s, n in laid.ranges
        ]
        inputs.append(SequenceInput(name, zoo.lowered(served, layout, media), sampling, spans))
    for chunk_tokens in CHUNKS:
        engine = Engine(
            language,
            kv_cache_bytes=16 * 2**20,
            block_tokens=16,
            max_sequences=8,
            chunk_tokens=chunk_tokens,
            prefix_cache=True,
            max_model_len=4096,
        )
        assert served_in_turn(engine, inputs) == expected, chunk_tokens
    fused = {is_fused(layer) for layer in language.decoder.layers}
    fusible = DEVICE.type == "cpu" and library.load() is not None and arch not in NOT_FUSED
    assert fused == {fusible}


def served_in_turn(engine: Engine, inputs: list[SequenceInput]) -> dict[str, list[int]]:
    """The tokens of each; one joins at each step."""
    waiting = list(inputs)
    got: dict[str, list[int]] = {item.sequence_id: [] for item in inputs}
    while waiting or engine.has_work():
        if waiting:
            engine.add(waiting.pop(0))
        output = engine.step()
        assert not output.failed
        assert output.sequences, "the engine stands still"
        for token in output.tokens:
            got[token.sequence_id].append(token.token_id)
    return got
