"""The same oracle for prompts with media: real encoder and language roles of random checkpoints, features that come late, every cut."""

import functools
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mmd_api.contract.sampling import Guidance
from mmd_workers.engine.interface import SamplingParams, SequenceInput
from mmd_workers.features.references import media_spans
from mmd_workers.prefill.kv_sender import prefix_of
from mmd_workers.wire.messages.message_parts import FeatureRef, Sampling
from mmd_workers.wire.messages.prefill import GenerateRequest
from support.oracles import model_zoo as zoo
from support.oracles import random_model
from support.oracles.engine_oracle import Outcome, make_engine, run

NEW_TOKENS = 12

pytestmark = pytest.mark.models

# plain, 3-row positions, deepstack, all modalities, bidirectional images with and without sliding layers, sound
ARCHITECTURES = [
    "llava",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen2_5_omni",
    "qwen3_omni_moe",
    "gemma3",
    "paligemma",
    "voxtral",
]

LONG = "tell me which of these is the larger one, and what else you see there"


@functools.cache
def served(arch):
    with tempfile.TemporaryDirectory() as folder:
        return zoo.serve(random_model.build(arch, Path(folder) / arch))


def requests(arch):
    takes = zoo.MODALITIES[arch]
    cases = []
    if arch != "paligemma":
        cases.append(["tell me what you know of this and of that and of all the rest"])
    if "image" in takes:
        cases.append([zoo.image(100, 64, 1), LONG])
        cases.append(
            [zoo.image(60, 60, 4), "and then some more words before the next", zoo.image(150, 40, 5), LONG]
        )
    if "video" in takes:
        cases.append([zoo.video(64, 80, 12, 6.0, 2), "tell me what moves"])
    if "audio" in takes:
        cases.append([zoo.audio(20000, 3), "tell me what sounds"])
    if len(takes) == 3:
        everything = [
            zoo.audio(9600, 8),
            "x",
            zoo.video(56, 84, 7, 5.0, 7),
            "y",
            zoo.image(30, 90, 6),
            "tell",
        ]
        cases.append(everything)
        films = [
            *zoo.video_with_sound(56, 84, 30, 6.0, 81000, 7),
            "and",
            zoo.image(30, 90, 6),
            *zoo.video_with_sound(60, 56, 18, 6.0, 81000, 9),
            "what moves and sounds",
        ]
        cases.append(films)
    return cases


@functools.cache
def answered(arch):
    """For each request: layout, media, features, and the answer of `generate`."""
    s = served(arch)
    out = []
    for parts in requests(arch):
        messages = zoo.conversation(*parts)
        media = [part for part in parts if isinstance(part, zoo.Medium)]
        layout = s.frontend.layout(messages, [m.info for m in media])
        answer = zoo.generate(s, zoo.hf_inputs(s, messages, media, layout), NEW_TOKENS)
        assert len(set(answer)) > 2
        features = []
        for medium, laid in zip(media, layout.media, strict=True):
            taken = zoo.decoded(medium, laid.sampling.frame_indices, laid.sampling.num_samples)
            features += s.encoder.encode([s.encoder.process(taken, laid)])
        out.append((layout, media, features, answer))
    return out


def sequence_input(arch, number, **more):
    layout, media, _, _ = answered(arch)[number]
    language = served(arch).language
    spans = [
        (start, length, f"{laid.modality} {medium.info.digest}")
        for medium, laid in zip(media, layout.media, strict=True)
        for start, length in laid.ranges
    ]
    sampling = SamplingParams(NEW_TOKENS, ignore_eos=True)
    return SequenceInput(str(number), language.lower(layout.token_ids, layout.media), sampling, spans, **more)


def engine_of(arch, **settings):
    return make_engine(served(arch).language, blocks=400, block_tokens=8, **settings)


def answers(arch):
    return {str(number): item[3] for number, item in enumerate(answered(arch))}


@pytest.mark.parametrize(
    ("chunk_tokens", "step_seconds"), [(16, None), (4096, None), (16, 1e-6), (64, 1e-6), (512, 0.005)]
)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_requests_whose_features_come_one_by_one_while_others_run(arch, chunk_tokens, step_seconds):
    engine = engine_of(arch, chunk_tokens=chunk_tokens, step_seconds=step_seconds)
    outcome, late = Outcome(), []
    for number, (_, _, features, _) in enumerate(answered(arch)):
        engine.add(sequence_input(arch, number))
        late += [(str(number), medium, feature) for medium, feature in enumerate(features)]
        outcome.take(engine.step())
    assert 0 < engine.stats().blocked_tokens <= engine.stats().waiting_tokens
    for name, medium, feature in reversed(late):
        for _ in range(2):
            outcome.take(engine.step())
        assert engine.fill(name, medium, feature)
    assert run(engine, outcome).tokens == answers(arch)
    assert engine.stats().blocks_free == engine.stats().blocks_total
    assert engine.stats().blocked_tokens == engine.stats().waiting_tokens == 0


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_repeated_prompts_with_media_use_the_cached_prefix(arch):
    engine = engine_of(arch, chunk_tokens=64)
    for _ in range(2):
        for number, (_, _, features, _) in enumerate(answered(arch)):
            engine.add(sequence_input(arch, number))
            for medium, feature in enumerate(features):
                engine.fill(str(number), medium, feature)
        outcome = run(engine)
        assert outcome.tokens == answers(arch)
    total = sum(len(layout.token_ids) for layout, *_ in answered(arch))
    assert sum(step.prefill_tokens for step in outcome.steps) < total / 2


@pytest.mark.parametrize("step_seconds", [None, 1e-6])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_prefill_here_decode_there_with_other_block_sizes(arch, step_seconds):
    language = served(arch).language
    prefill = engine_of(arch, chunk_tokens=24, step_seconds=step_seconds)
    decode = make_engine(language, blocks=400, block_tokens=6)
    outcome, inputs = Outcome(), {}
    for number, (layout, _, features, _) in enumerate(answered(arch)):
        name = str(number)
        inputs[name] = sequence_input(arch, number, stop_after_prefill=True)
        decode.reserve(name, len(layout.token_ids), NEW_TOKENS)
        prefill.add(inputs[name])
        for medium, feature in enumerate(features):
            prefill.fill(name, medium, feature)
    while prefill.has_work():
        step = prefill.step()
        outcome.take(step)
        for ready in step.kv_ready:
            name, item = ready.sequence_id, inputs[ready.sequence_id]
            for start in range(ready.start, ready.end, 11):
                end = min(ready.end, start + 11)
                decode.write_kv(name, start, prefill.read_kv(name, start, end))
            if ready.last:
                prompt = item.prompt
                decode.attach(
                    name,
                    prompt.token_ids,
                    item.sampling,
                    outcome.tokens[name],
                    prompt.next_position,
                    item.media_spans,
                )
                prefill.abort(name)
        outcome.take(decode.step())
    assert run(decode, outcome).tokens == answers(arch)


def questions(arch):
    """Prompts with a common beginning: several questions about the same media, and about others after them."""
    takes = zoo.MODALITIES[arch]
    media = {
        "image": zoo.image(100, 64, 1),
        "video": zoo.video(64, 80, 12, 6.0, 2),
        "audio": zoo.audio(20000, 3),
    }
    cases = []
    for kind in takes:
        cases += [
            [media[kind], "tell me what this is"],
            [media[kind], "tell me what else you see there, of all the rest"],
        ]
    if "image" in takes:
        cases.append([media["image"], "and", zoo.image(60, 60, 4), "tell me what this is"])
    if arch != "paligemma":
        cases += [["tell me what you know of this and of that"], ["tell me what you know of all the rest"]]
    return cases


@functools.cache
def handed_over(arch):
    """For each question: the request as it is placed, its features, and the answer of `generate`."""
    s, found = served(arch), []
    for number, parts in enumerate(questions(arch)):
        messages = zoo.conversation(*parts)
        media = [part for part in parts if isinstance(part, zoo.Medium)]
        layout = s.frontend.layout(messages, [m.info for m in media])
        answer = zoo.generate(s, zoo.hf_inputs(s, messages, media, layout), NEW_TOKENS)
        features, refs = [], []
        for medium, laid in zip(media, layout.media, strict=True):
            taken = zoo.decoded(medium, laid.sampling.frame_indices, laid.sampling.num_samples)
            features += s.encoder.encode([s.encoder.process(taken, laid)])
            identity, ranges = f"{laid.modality} {medium.info.digest}", [list(run) for run in laid.ranges]
            refs.append(
                FeatureRef(identity, "", laid.modality, 0, laid.num_tokens, ranges, laid.geometry, {}, 0)
            )
        sampling = Sampling(NEW_TOKENS, ignore_eos=True)
        request = GenerateRequest(str(number), 0, "g", layout.token_ids, refs, sampling, ["d"], 0.0, 0.0)
        found.append((request, layout, features, answer))
    return found


def hand_over(prefill, decode, arch, number):
    """Answer a question on two engines, with the prefix that the sender offers. Returns the answer and the tokens that the decoder reused."""
    request, layout, features, _ = handed_over(arch)[number]
    language, name, spans = served(arch).language, request.request_id, media_spans(request.features)
    bidirectional = language.bidirectional_prompt
    offered = prefix_of(request, decode.blocks.block_tokens, bidirectional_prompt=bidirectional)
    expected_at_decode = decode.prefix(request.token_ids, spans)[1]
    reused = decode.reserve(name, len(request.token_ids), NEW_TOKENS, offered)
    assert reused - expected_at_decode in (0, decode.blocks.block_tokens), (
        "an offer may cover the last token too"
    )
    identities, expected = prefill.prefix(request.token_ids, spans)
    sampling = SamplingParams(NEW_TOKENS, ignore_eos=True)
    prompt = language.lower(request.token_ids, layout.media)
    prefill.add(SequenceInput(name, prompt, sampling, spans, stop_after_prefill=True, identities=identities))
    for medium, feature in enumerate(features):
        if sum(request.features[medium].ranges[-1]) > expected:  # the others need no encoding
            prefill.fill(name, medium, feature)
    outcome, admitted = Outcome(), {}
    while prefill.has_work():
        step = prefill.step()
        assert step.prefill_tokens, "the prompt waits for a medium that looked cached"
        outcome.take(step)
        admitted |= step.admitted
    assert admitted == {name: expected}
    length = len(request.token_ids)
    if reused < length:
        decode.write_kv(name, reused, prefill.read_kv(name, reused, length))
    decode.attach(name, request.token_ids, sampling, outcome.tokens[name], prompt.next_position, spans)
    prefill.abort(name)
    return run(decode, outcome).tokens[name], reused


@pytest.mark.parametrize("arch", zoo.MODALITIES)
def test_handovers_that_share_what_the_sender_offers_equal_generate(arch):
    """Whatever was asked before, whatever the size of blocks, and however few of each prompt's blocks remain cached."""

    @settings(max_examples=6, deadline=None, database=None, derandomize=True)
    @given(
        st.lists(st.integers(0, len(questions(arch)) - 1), min_size=3, max_size=6),
        st.sampled_from([4, 8, 16]),
        st.sampled_from([4, 8, 16]),
        st.none() | st.integers(0, 12),
    )
    @example(list(range(len(questions(arch)))) * 2, 8, 4, None)
    @example(list(range(len(questions(arch)))) * 2, 4, 4, 3)
    def check(order, prefill_block, decode_block, kept_blocks):
        language = served(arch).language
        prefill = make_engine(
            language, blocks=6400 // prefill_block, block_tokens=prefill_block, chunk_tokens=64
        )
        decode = make_engine(language, blocks=6400 // decode_block, block_tokens=decode_block)
        seen = set()
        for number in order:
            answer, reused = hand_over(prefill, decode, arch, number)
            request, _, _, expected = handed_over(arch)[number]
            assert answer == expected
            if kept_blocks is not None:
                for engine in (prefill, decode):
                    identities, _ = engine.prefix(request.token_ids, media_spans(request.features))
                    engine.blocks.forget(identities[kept_blocks:])
            elif number in seen:
                assert reused == len(request.token_ids) // decode_block * decode_block
            seen.add(number)

    check()


@pytest.mark.parametrize("arch", zoo.MODALITIES)
def test_atomic_ranges_are_whole_prompts_or_runs_of_one_medium(arch):
    """The identities of its blocks rely on this."""
    language = served(arch).language
    for request, layout, _, _ in handed_over(arch):
        ranges = language.lower(request.token_ids, layout.media).atomic_ranges
        if language.bidirectional_prompt:
            assert ranges == [(0, len(request.token_ids))]
        else:
            runs = {(start, start + length) for start, length, _ in media_spans(request.features)}
            assert set(ranges) <= runs


@pytest.mark.parametrize("arch", ["qwen2_5_vl", "qwen3_vl", "gemma3"])
def test_preempted_prompts_are_computed_again_with_their_media(arch):
    needed = sum(-(-len(layout.token_ids) // 8) for layout, *_ in answered(arch))
    engine = make_engine(
        served(arch).language, blocks=needed + len(answered(arch)) - 1, block_tokens=8, prefix_cache=False
    )
    for number, (_, _, features, _) in enumerate(answered(arch)):
        engine.add(sequence_input(arch, number))
        for medium, feature in enumerate(features):
            engine.fill(str(number), medium, feature)
    assert run(engine).tokens == answers(arch)
    assert engine.stats().preemptions > 0


def test_a_feature_of_another_size_is_refused():
    engine = engine_of("llava")
    engine.add(sequence_input("llava", 1))
    feature = answered("llava")[1][2][0]
    from mmd_api.contract.errors import CountMismatchError
    from mmd_workers.model.prompt import Feature

    short = Feature("image", {"embeddings": torch.zeros(3, feature.tensors["embeddings"].shape[1])})
    with pytest.raises(CountMismatchError):
        engine.fill("1", 0, short)


GUIDED = ["llava", "gemma3", "qwen3_vl"]
ONE_AXIS = GUIDED[:2]  # of rotary positions


def guidances(arch, number):
    """One with the prompt's last token, and one with a text."""
    layout = answered(arch)[number][0]
    negative = served(arch).frontend.layout(zoo.conversation("what else is there to say"), []).token_ids
    return [Guidance(1.5, layout.token_ids[-1:]), Guidance(4.0, negative)]


@functools.cache
def guided_answers(arch):
    """For each request, those to its guidances."""
    found, s = [], served(arch)
    for number, parts in enumerate(requests(arch)):
        layout, media, _, _ = answered(arch)[number]
        inputs = zoo.hf_inputs(s, zoo.conversation(*parts), media, layout)
        for guidance in guidances(arch, number):
            ids = torch.tensor([guidance.token_ids], device=s.model.device)
            more = {"guidance_scale": guidance.scale, "negative_prompt_ids": ids}
            if arch not in ONE_AXIS:
                more = zoo.guidance(s, guidance.scale, guidance.token_ids)
            found.append(zoo.generate(s, inputs, NEW_TOKENS, **more))
    return found


@pytest.mark.parametrize(("chunk_tokens", "preempts"), [(7, False), (64, False), (4096, True)])
@pytest.mark.parametrize("arch", GUIDED)
def test_guided_answers_about_media_are_those_of_generate(arch, chunk_tokens, preempts):
    """In one engine, and handed over to another one."""
    each = [
        (number, guidance) for number in range(len(answered(arch))) for guidance in guidances(arch, number)
    ]
    lengths = [len(ids) for n, g in each for ids in (answered(arch)[n][0].token_ids, g.token_ids)]
    spare = len(lengths) * (1 if preempts else 4)  # blocks: answers need about three each
    language = served(arch).language
    alone = make_engine(
        language,
        blocks=sum(-(-length // 4) for length in lengths) + spare,
        block_tokens=4,
        chunk_tokens=chunk_tokens,
        max_sequences=len(lengths),
        prefix_cache=not preempts,
    )
    prefill = make_engine(language, blocks=400, block_tokens=8, chunk_tokens=chunk_tokens)
    decode = make_engine(language, blocks=900, block_tokens=6, max_sequences=40, chunk_tokens=16)
    here, there = Outcome(), Outcome()
    for name, (number, guidance) in enumerate(each):
        layout, _, features, _ = answered(arch)[number]
        for engine in (alone, prefill):
            item = sequence_input(arch, number, stop_after_prefill=engine is prefill, guidance=guidance)
            item.sequence_id = str(name)
            engine.add(item)
            for medium, feature in enumerate(features):
                engine.fill(str(name), medium, feature)
        there = run(prefill, there)
        decode.reserve(str(name), len(layout.token_ids), NEW_TOKENS, (), len(guidance.token_ids))
        decode.write_kv(str(name), 0, prefill.read_kv(str(name), 0, len(layout.token_ids)))
        decode.attach(
            *(str(name), layout.token_ids, item.sampling, there.tokens[str(name)], item.prompt.next_position),
            item.media_spans,
            guidance=guidance,
        )
        prefill.abort(str(name))
    expected = {str(name): tokens for name, tokens in enumerate(guided_answers(arch))}
    assert run(alone, here).tokens == expected
    assert run(decode, there).tokens == expected
    assert bool(alone.stats().preemptions) == preempts
    for engine in (alone, prefill, decode):
        assert engine.stats().blocks_free == engine.stats().blocks_total
