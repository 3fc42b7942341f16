"""Cores with small random models, requests for them, and stepping until something has happened.

They run on the GPU where there is one, which is then the only device that vLLM is built for.
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from mmd_api.spec.deployment import MultimodalDeploymentSpec
from mmd_workers.basics.device import chosen_device
from mmd_workers.engine.interface import SamplingParams, SequenceInput, StepOutput
from mmd_workers.features.references import media_end
from mmd_workers.media.choice import SamplingChoice
from mmd_workers.model.prompt import Feature, LoweredPrompt, MediumLayout, PromptLayout
from mmd_workers.model.source import load_config, resolve_dtype
from mmd_workers.prefill.kv_sender import prefix_of
from mmd_workers.process.pod import Pod
from mmd_workers.vllm_engine.setup.environment import prepare_environment
from mmd_workers.wire.messages.message_parts import FeatureRef, Sampling
from mmd_workers.wire.messages.prefill import GenerateRequest
from support.oracles import adapters, engine_oracle, random_model
from support.oracles import model_zoo as zoo

prepare_environment()
os.environ["TRITON_F32_DEFAULT"] = (
    "ieee"  # attention of float32 is Triton's on a GPU, which rounds to TF32 otherwise
)

from vllm.model_executor.models import registry  # noqa: E402

from mmd_workers.vllm_engine.core import VllmCore  # noqa: E402
from mmd_workers.vllm_engine.setup import arguments  # noqa: E402
from mmd_workers.vllm_engine.setup import make as making  # noqa: E402

CPU = torch.device("cpu")
DEVICE = chosen_device(0, "decode")
if DEVICE.type == "cpu":
    # vLLM inspects each architecture in a new process, to keep CUDA out of this one; its imports take longer than all else in these tests
    registry._run_in_subprocess = lambda inspect: inspect()
WIDE = 128  # vLLM's attention on CPUs needs heads of 32 numbers or more
BLOCK = 32
IDENTITY = (
    16 if DEVICE.type == "cpu" else BLOCK
)  # on CPUs, blocks are larger than those that a spec and routers have
needs_ranks = pytest.mark.skipif(
    DEVICE.type == "cuda" and torch.cuda.device_count() < 2,
    reason="each rank needs a GPU, where there is one",
)
CHUNK = 64
_numbers = itertools.count()
_arrivals = itertools.count(1.0)  # each request of a test arrives after those made before it


def checkpoint(arch: str, folder: Path, layers: int = 2) -> Path:
    """A checkpoint with random weights that vLLM can run."""
    return random_model.build(
        arch, folder / f"{arch}-{layers}", size=random_model.Size(hidden=WIDE, layers=layers)
    )


@dataclass(frozen=True)
class Member:
    """Which pod of a replica of two it is, and where the ranks meet."""

    rank: int
    port: int
    size: int = 2
    leader: str = "127.0.0.1"


def pod_of(
    folder: Path,
    *,
    max_model_len: int = 512,
    chunk_tokens: int = CHUNK,
    max_sequences: int = 16,
    prefix_cache: bool = True,
    vllm: dict[str, Any] | None = None,
    moves: bool | None = None,
    adapters: dict[str, Path] | None = None,
    member: Member | None = None,
    kv_backend: str = "Gloo",
    dtype: str = "Float32",
) -> Pod:
    """A pod that serves a checkpoint. `vllm`: settings of vLLM. `moves`: whether its KV moves to or from others, as it does by default
    without such settings. `adapters`: LoRA by name. `member`: of a replica that spans pods."""
    pool = {"kvCacheMebibytes": 16, "gpus": 0}
    prefill = {**pool, "chunkTokens": chunk_tokens, "prefixCache": prefix_cache}
    moves = vllm is None if moves is None else moves
    layout = {"prefill": prefill} if moves else {}
    kv = (
        {"prefill": {"kvCacheDtype": vllm["kvCacheDtype"]}}
        if vllm and moves and "kvCacheDtype" in vllm
        else {}
    )
    loras = [{"name": name, "id": str(folder)} for name, folder in (adapters or {}).items()]
    spec = MultimodalDeploymentSpec.model_validate(
        {
            "model": {"id": str(folder), "dtype": dtype, "maxModelLen": max_model_len},
            "engine": {"type": "VLLM", "adapters": loras, **kv} | ({} if vllm is None else {"decode": vllm}),
            "decode": {**pool, "maxSequences": max_sequences, "kvBlockTokens": IDENTITY},
            "transfer": {"kv": {"backend": kv_backend}},
            **layout,
        }
    )
    settings = SimpleNamespace(
        incarnation=f"core-{next(_numbers)}",
        memory_fraction=1.0,
        compute_threads=1,
        group=member,
        turns="",
        pod_ip="127.0.0.1",
        ranks_port=member and member.port,
    )
    nothing: Any = SimpleNamespace()
    return Pod(settings, spec, "decode", ("prefill", "decode"), nothing, nothing, nothing, nothing)  # type: ignore[arg-type]


def make(
    folder: Path,
    *,
    blocks: int = 64,
    rank_lost: Callable[[str], object] = lambda _: None,
    compiled: bool = False,
    **settings: Any,
) -> VllmCore:
    """A core as a pod makes one, except that its KV pool may be smaller than a spec allows. `compiled`: with CUDA graphs on a GPU;
    a core of a test is not worth the minute. `settings`: those of `pod_of`."""
    pod = pod_of(folder, **settings)
    if pod.spec.engine.adapters and DEVICE.type != "cpu" and pod.spec.model.dtype == "Float32":
        pytest.skip("on GPUs vLLM's kernels for adapters take no float32")
    config = load_config(folder)
    text = config.get_text_config()
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    itemsize = resolve_dtype(pod.spec.model, config).itemsize
    block_bytes = BLOCK * 2 * text.num_hidden_layers * text.num_key_value_heads * head_dim * itemsize
    changes: dict[str, Any] = {
        "kv_cache_memory_bytes": (blocks + 1) * block_bytes  # vLLM keeps one block for itself
    }
    if DEVICE.type != "cpu" and not compiled:
        changes["enforce_eager"] = True

    def changed(*given: Any) -> dict[str, Any]:
        return arguments.engine_arguments(*given) | changes

    with mock.patch.object(making, "engine_arguments", changed):
        return making.make_core(pod, DEVICE, rank_lost)


def follow(folder: Path, port: int, vllm: dict[str, Any]) -> None:
    """Compute for the leader of a replica of two pods until this process's input ends."""
    pod = pod_of(folder, vllm=vllm, moves=True, member=Member(1, port))
    making.make_ranks(pod, DEVICE, print)
    sys.stdin.read()


# --- requests -----------------------------------------------------------------------------------------------------


@dataclass
class Question:
    """A request, the features of its media, and what `generate` answers to it."""

    request: GenerateRequest
    features: list[Feature]
    served: zoo.Served
    messages: list[dict[str, Any]]
    media: list[zoo.Medium]
    layout: PromptLayout

    def answer(self, tokens: int, adapter: Path | None = None) -> list[int]:
        """The greedy tokens of the whole model, with an adapter merged into its weights."""
        size = next((laid.sampling.size for laid in self.layout.media if laid.sampling.size), None)
        inputs = zoo.hf_inputs(self.served, self.messages, self.media, self.layout, size)
        with adapters.merged(self.served.model, adapter):
            return zoo.generate(self.served, inputs, tokens)

    def with_(self, **sampling: Any) -> GenerateRequest:
        """The request with other sampling."""
        return replace(self.request, sampling=replace(self.request.sampling, **sampling))

    def by(self, adapter: str) -> GenerateRequest:
        """The request for an adapter."""
        return replace(self.request, adapter=adapter)

    def after(self, outputs: Sequence[int]) -> GenerateRequest:
        """The request with tokens that were generated already."""
        return replace(self.request, output_token_ids=list(outputs))


@functools.cache
def served(folder: Path) -> zoo.Served:
    """The native roles of a checkpoint and the whole model."""
    return zoo.serve(folder)


def question(
    folder: Path, *parts: str | zoo.Medium, max_tokens: int = 12, choices: Sequence[SamplingChoice] = ()
) -> Question:
    """One user message of text and media. `choices`: how these are sampled."""
    roles = served(folder)
    messages = zoo.conversation(*parts)
    media = [part for part in parts if isinstance(part, zoo.Medium)]
    layout = roles.frontend.layout(messages, [medium.info for medium in media], choices=choices)
    features = []
    for medium, laid in zip(media, layout.media, strict=True):
        assert roles.encoder is not None
        taken = zoo.decoded(medium, laid.sampling.frame_indices, laid.sampling.num_samples)
        features += roles.encoder.encode([roles.encoder.process(taken, laid)])
    refs = [reference(medium, laid) for medium, laid in zip(media, layout.media, strict=True)]
    sampling = Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    request = GenerateRequest("r", 0, "", list(layout.token_ids), refs, sampling, [], 0.0, next(_arrivals))
    return Question(request, features, roles, messages, media, layout)


def reference(medium: zoo.Medium, laid: MediumLayout) -> FeatureRef:
    """What the gateway writes of a medium."""
    return FeatureRef(
        feature_id=medium.info.digest,
        digest=medium.info.digest,
        modality=laid.modality,
        num_bytes=medium.info.num_bytes,
        num_tokens=laid.num_tokens,
        ranges=[list(span) for span in laid.ranges],
        geometry=laid.geometry,
        sampling={},
        work=laid.work,
    )


def text_request(token_ids: Sequence[int], max_tokens: int = 8, **sampling: Any) -> GenerateRequest:
    """A request without media."""
    wanted = Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return GenerateRequest(
        "r", 0, "", list(token_ids), [], replace(wanted, **sampling), [], 0.0, next(_arrivals)
    )


# --- steps --------------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What the steps of a core did."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[float | None]] = field(default_factory=dict)
    top: dict[str, list[tuple[tuple[int, float], ...]]] = field(default_factory=dict)
    reasons: dict[str, str | None] = field(default_factory=dict)
    failed: dict[str, Exception] = field(default_factory=dict)
    ready: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    admitted: dict[str, list[int]] = field(default_factory=dict)
    steps: list[StepOutput] = field(default_factory=list)

    def take(self, output: StepOutput) -> None:
        self.steps.append(output)
        for token in output.tokens:
            mine = self.tokens.setdefault(token.sequence_id, [])
            mine.append(token.token_id)
            self.logprobs.setdefault(token.sequence_id, []).append(token.logprob)
            self.top.setdefault(token.sequence_id, []).append(token.top_logprobs)
            self.reasons[token.sequence_id] = token.finish_reason
        for event in output.kv_ready:
            spans = self.ready.setdefault(event.sequence_id, [])
            assert event.start == (spans[-1][1] if spans else 0)
            spans.append((event.start, event.end))
        for name, cached in output.admitted.items():
            self.admitted.setdefault(name, []).append(cached)
        self.failed.update(dict(output.failed))


def bring_again(core: VllmCore, output: StepOutput, outcome: Outcome, asked: Mapping[str, Question]) -> bool:
    """Fill what a step reports to be lacking once there are tokens, as a role does. Whether anything was."""
    brought = False
    for name, cached in output.admitted.items():
        if name not in asked or not outcome.tokens.get(name):
            continue
        for number, ref in enumerate(asked[name].request.features):
            if media_end([ref]) > cached:
                core.fill(name, number, asked[name].features[number])
                brought = True
    return brought


def step(
    core: VllmCore,
    outcome: Outcome | None = None,
    until: Callable[[Outcome], Any] | None = None,
    asked: Mapping[str, Question] | None = None,
) -> Outcome:
    """Step until `until` holds, or nothing is left to do; a core that stands still fails. `asked`: of the sequences that get their features
    again after a preemption."""
    outcome = outcome or Outcome()
    for _ in range(500):
        if until is not None and until(outcome):
            return outcome
        if not core.has_work():
            assert until is None, "nothing is left to do"
            return outcome
        output = core.step()
        outcome.take(output)
        brought = bring_again(core, output, outcome, asked or {})
        moved = output.prefill_tokens or output.decode_sequences or output.failed or output.tokens
        moved = moved or output.changed or brought
        assert moved or until is not None or not core.has_work(), "the core stands still"
    raise AssertionError("the core does not finish")


def supply(core: VllmCore, name: str, asked: Question) -> None:
    """Give a sequence all of its features."""
    for number, feature in enumerate(asked.features):
        core.fill(name, number, feature)


def run(core: VllmCore, asked: Question, request: GenerateRequest | None = None, name: str = "a") -> Outcome:
    """What a core does for a question alone."""
    core.add(name, request or asked.request, stop_after_prefill=False)
    supply(core, name, asked)
    outcome = step(core)
    assert not outcome.failed, outcome.failed
    return outcome


def ask(
    core: VllmCore, asked: Question, request: GenerateRequest | None = None, name: str = "a"
) -> list[int]:
    """The tokens that a core generates for a question alone."""
    return run(core, asked, request, name).tokens[name]


def native(
    asked: Question, tokens: int, prompt: LoweredPrompt | None = None, params: SamplingParams | None = None
) -> tuple[list[int], list[float | None]]:
    """Tokens of the native engine, greedy ones unless `params` differ, and their log probabilities."""
    engine = engine_oracle.make_engine(asked.served.language, blocks=64, block_tokens=BLOCK, chunk_tokens=128)
    lowered = prompt or zoo.lowered(asked.served, asked.layout, asked.media)
    engine.add(SequenceInput("a", lowered, params or SamplingParams(tokens, logprobs=0, ignore_eos=True)))
    made = [token for output in engine_oracle.run(engine).steps for token in output.tokens]
    return [token.token_id for token in made], [token.logprob for token in made]


def hand_over(
    source: VllmCore, target: VllmCore, asked: Question, outcome: Outcome | None = None, name: str = "a"
) -> list[int]:
    """Prefill on one core and decode on another; the KV moves as it is announced."""
    request = asked.request
    source.add(name, request, stop_after_prefill=True)
    supply(source, name, asked)
    prefix = prefix_of(request, IDENTITY)
    cached = target.reserve(name, len(request.token_ids), request.sampling.max_tokens, prefix)
    outcome = outcome or Outcome()
    step(source, outcome, until=lambda o: o.tokens.get(name))
    for first, end in outcome.ready[name]:
        if (start := max(first, cached)) >= end:
            continue
        read = source.read_kv(name, start, end)
        assert read is not None
        target.write_kv(name, start, read)
    target.attach(name, request, outcome.tokens[name])
    source.abort(name)
    done = step(target)
    assert not done.failed, done.failed
    return outcome.tokens[name] + done.tokens[name]


def assert_empty(core: VllmCore) -> None:
    """Nothing is held for any sequence."""
    stats = core.stats()
    assert (stats.blocks_free, stats.blocks_reserved) == (stats.blocks_total, 0)
    assert (stats.waiting_sequences, stats.running_sequences) == (0, 0)
    assert (stats.held_sequences, stats.reserved_sequences) == (0, 0)
    assert (stats.waiting_tokens, stats.blocked_tokens) == (0, 0)
    assert not core._shelf._features
    assert not core._shelf._users
    assert not core._shelf._held


def preempt(core: VllmCore, name: str) -> int:
    """Take all blocks from a sequence, as vLLM does where another needs them. Returns how many tokens it has made: with one more, it runs
    again.
    """
    request = core.table.sequences[name].request
    core._scheduler.running.remove(request)
    core._scheduler._preempt_request(request, time.monotonic())
    return int(request.num_output_tokens)


def forget(core: VllmCore) -> None:
    """Empty the prefix cache, and vLLM's cache of features, which outlives requests."""
    while core.has_work():
        core.step()
    assert core.forget_prefixes()
    core._core.reset_encoder_cache()


def clear(cores: Iterable[VllmCore]) -> None:
    """Forget all sequences, prefixes and features of cores that several tests use."""
    for core in cores:
        for name in [*core.table.sequences, *core.table.reservations]:
            core.abort(name)
        forget(core)
