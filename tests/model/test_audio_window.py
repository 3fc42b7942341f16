"""Sound longer than the model's window: read in windows where the tower can, else rejected with its seconds, or truncated and reported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mmd_api.contract.errors import UnsupportedInputError
from mmd_api.spec.media import AudioPolicy, MediaPolicy
from mmd_api.spec.model import ModelSpec
from mmd_workers.gateway.answers.usage import prompt_details
from mmd_workers.model.frontend import HfFrontend, load_frontend
from support.oracles import model_zoo as zoo

Checkpoint = Callable[[str], Path]
RATE = 16_000
LONGER_THAN_QWEN2_AUDIO = zoo.audio(5 * RATE + 8000, 1)  # the checkpoint's window is 4 s


def frontend(folder: Path, policy: AudioPolicy) -> HfFrontend:
    return load_frontend(ModelSpec(id=str(folder)), MediaPolicy(audio=policy))


def test_sound_beyond_the_window_is_rejected_with_its_seconds_and_the_limit(checkpoint: Checkpoint) -> None:
    medium = LONGER_THAN_QWEN2_AUDIO
    served = frontend(checkpoint("qwen2_audio"), AudioPolicy())
    with pytest.raises(
        UnsupportedInputError, match=r"lasts 5\.5 s, but this model accepts at most 4\.0 s.*tooLong"
    ):
        served.layout(zoo.conversation(medium, "tell me what it is"), [medium.info])


def test_sound_as_long_as_the_window_is_taken(checkpoint: Checkpoint) -> None:
    medium = zoo.audio(4 * RATE, 1)
    (laid,) = (
        frontend(checkpoint("qwen2_audio"), AudioPolicy())
        .layout(zoo.conversation(medium, "tell me what it is"), [medium.info])
        .media
    )
    assert (laid.sampling.num_samples, laid.truncated_seconds) == (4 * RATE, 0.0)


def test_truncation_needs_the_resource_to_allow_it_and_is_reported(checkpoint: Checkpoint) -> None:
    medium = LONGER_THAN_QWEN2_AUDIO
    served = frontend(checkpoint("qwen2_audio"), AudioPolicy(too_long="Truncate"))
    layout = served.layout(zoo.conversation(medium, "tell me what it is"), [medium.info])
    assert layout.media[0].sampling.num_samples == 4 * RATE
    assert prompt_details([layout]).truncated_audio_seconds == 1.5


@pytest.mark.models
def test_sound_beyond_the_longest_of_the_processor_is_rejected_or_truncated(checkpoint: Checkpoint) -> None:
    folder, medium = checkpoint("audioflamingo3"), zoo.audio(7 * RATE, 1)
    messages = zoo.conversation(medium, "tell me what it is")
    served = frontend(folder, AudioPolicy(max_duration_seconds=900))
    assert served._adapter.max_audio_samples(served._processor) == 600 * RATE
    assert served.layout(messages, [medium.info]).media[0].sampling.num_samples == 7 * RATE
    served._processor.max_audio_len = 6
    with pytest.raises(UnsupportedInputError, match=r"lasts 7\.0 s, but this model accepts at most 6\.0 s"):
        served.layout(messages, [medium.info])
    served = frontend(folder, AudioPolicy(too_long="Truncate"))
    served._processor.max_audio_len = 6
    (laid,) = served.layout(messages, [medium.info]).media
    assert (laid.sampling.num_samples, laid.truncated_seconds) == (6 * RATE, 1.0)


def test_a_feature_extractor_without_a_window_limits_nothing(checkpoint: Checkpoint) -> None:
    medium = LONGER_THAN_QWEN2_AUDIO
    served = frontend(checkpoint("qwen2_audio"), AudioPolicy())
    del served._processor.feature_extractor.n_samples
    assert served._adapter.max_audio_samples(served._processor) == 0
    with pytest.raises(
        UnsupportedInputError, match="the model's processor rejected it"
    ):  # which itself needs one
        served.layout(zoo.conversation(medium, "tell me what it is"), [medium.info])


@pytest.mark.models
@pytest.mark.parametrize("arch", ["qwen2_5_omni", "qwen3_omni_moe", "voxtral"])
def test_a_tower_that_reads_in_windows_takes_sound_of_any_length(checkpoint: Checkpoint, arch: str) -> None:
    served = zoo.serve(checkpoint(arch))
    window = served.frontend._processor.feature_extractor.n_samples
    medium = zoo.audio(2 * window + 5000, 1)
    messages = zoo.conversation(medium, "tell me what it is")
    layout = served.frontend.layout(messages, [medium.info])
    (laid,) = layout.media
    assert laid.sampling.num_samples == 2 * window + 5000
    assert laid.truncated_seconds == 0
    short = served.frontend.layout(messages, [zoo.audio(window, 1).info]).media[0]
    assert laid.num_tokens > 1.9 * short.num_tokens
    inputs = zoo.hf_inputs(served, messages, [medium], layout)
    assert inputs["input_ids"][0].tolist() == layout.token_ids
    assert zoo.greedy(served, zoo.lowered(served, layout, [medium]), 4) == zoo.generate(served, inputs, 4)
