"""Videos with their own sound: two media of one file, whose tokens are among each other."""

from __future__ import annotations

import copy
from typing import Any

import httpx
import pytest

from mmd_api.contract.errors import UnprocessableMediumError
from mmd_workers.gateway.basics.api_errors import ApiError
from mmd_workers.gateway.basics.media_hold import MediaHold
from mmd_workers.gateway.content.chat_request import ChatRequest
from mmd_workers.gateway.intake.intake import Intake
from mmd_workers.gateway.placement.timeline import Timeline
from mmd_workers.media.sandbox import DecodePool
from mmd_workers.observe.metrics import Metrics
from mmd_workers.wire.media import read_medium
from mmd_workers.wire.messages.prefill import GenerateRequest
from support.oracles.films import film
from tests.gateway.media import png, url, wav
from tests.gateway.running import Launch, Running, pipeline_config
from tests.gateway.scripted import Script, ScriptedWorker, answer_well

MODEL = "builtin/demo"
SOUNDING, SILENT = film(3, 2.5), film(3, 0)
OPTION = "mm_processor_kwargs.use_audio_in_video"


def part(data: bytes, **more: Any) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": url("video/mp4", data)}, **more}


def picture() -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url("image/png", png())}}


def body(*parts: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
    content = [*parts, {"type": "text", "text": "what happens?"}]
    kwargs.setdefault("use_audio_in_video", True)
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": content}],
        "mm_processor_kwargs": kwargs,
    }


async def ask(gateway: Running, *parts: dict[str, Any], **kwargs: Any) -> httpx.Response:
    return await gateway.http.post("/v1/chat/completions", json=body(*parts, **kwargs))


def failing(modality: str) -> Script:
    """Every encoder fails on the first medium of this kind, once."""

    async def script(worker: ScriptedWorker, request: GenerateRequest) -> None:
        media = [one.feature_id for one in request.features if one.modality == modality]
        if request.attempt == 0:
            await worker.fail(
                request, UnprocessableMediumError.code, "3 encoders failed on it", False, media[0]
            )
        else:
            await answer_well(worker, request)

    return script


async def refusal(intake: Intake) -> ApiError:
    request = ChatRequest.model_validate(body(part(SOUNDING)))
    with pytest.raises(ApiError) as caught:
        await intake.prepare(request, MediaHold(100).reservation(), Timeline("r", 0.0), 0)
    return caught.value


async def test_a_video_and_its_sound_are_two_media_of_one_file(launch: Launch) -> None:
    gateway = await launch()
    read: list[bytes] = []

    async def encode_then_answer(worker: ScriptedWorker, request: GenerateRequest) -> None:
        for feature in request.features:
            read.append(
                await read_medium(
                    worker.bus, request.gateway, feature.digest, feature.num_bytes, request.deadline
                )
            )
        await answer_well(worker, request)

    worker = await gateway.worker("the red circle", encode_then_answer)
    answer = await ask(gateway, part(SOUNDING), picture())
    assert answer.status_code == 200, answer.text
    (request,) = worker.requests
    video, sound, _ = request.features
    assert [f.modality for f in request.features] == ["video", "audio", "image"]
    assert video.digest == sound.digest != request.features[2].digest
    assert video.feature_id != sound.feature_id
    assert read[0] == read[1] == SOUNDING
    assert (video.sampling.get("of_video"), sound.sampling["of_video"]) == (None, True)
    assert len(video.ranges) > 1, "the sound is between the frames"
    assert video.ranges[0][0] < sound.ranges[0][0] < video.ranges[-1][0]
    taken = [at for f in (video, sound) for start, count in f.ranges for at in range(start, start + count)]
    assert sorted(taken) == list(range(min(taken), max(taken) + 1))
    assert min(sound.work, sound.host_bytes, video.work, video.host_bytes) > 0
    usage = answer.json()["usage"]
    details = usage["prompt_tokens_details"]
    assert details["video_tokens"] == video.num_tokens
    assert details["audio_tokens"] == sound.num_tokens
    parts = sum(details[f"{kind}_tokens"] for kind in ("text", "image", "video", "audio"))
    assert parts == usage["prompt_tokens"] == len(request.token_ids)
    await gateway.until_metric("mmd_media_held_bytes", 0)
    await gateway.until_metric("mmd_gateway_media_items", 0)


async def test_a_video_without_a_sound_track_is_as_before(launch: Launch) -> None:
    gateway = await launch()
    worker = await gateway.worker()
    assert (await ask(gateway, part(SILENT))).status_code == 200
    assert (await ask(gateway, part(SILENT), use_audio_in_video=False)).status_code == 200
    assert worker.requests[0].features == worker.requests[1].features
    assert worker.requests[0].token_ids == worker.requests[1].token_ids


async def test_a_videos_frames_are_the_same_feature_with_or_without_sound(launch: Launch) -> None:
    gateway = await launch()
    worker = await gateway.worker()
    assert (await ask(gateway, part(SOUNDING))).status_code == 200
    assert (await ask(gateway, part(SOUNDING), use_audio_in_video=False)).status_code == 200
    first, alone = worker.requests
    assert len(alone.features) == 1
    assert first.features[0].feature_id == alone.features[0].feature_id


async def test_frames_of_a_video_are_chosen_beside_its_sound(launch: Launch) -> None:
    gateway = await launch()
    worker = await gateway.worker()
    assert (await ask(gateway, part(SOUNDING, timestamps=[0.5, 1]), picture())).status_code == 200
    (request,) = worker.requests
    assert [f.modality for f in request.features] == ["video", "audio", "image"]
    assert len(request.features[0].sampling["frame_indices"]) == 2


async def test_silent_videos_and_sounds_of_their_own_stand_beside_videos_with_sound(launch: Launch) -> None:
    gateway = await launch()
    worker = await gateway.worker()
    sound = {"type": "audio_url", "audio_url": {"url": url("audio/wav", wav())}}
    answer = await ask(gateway, part(SILENT), part(SOUNDING), sound, part(SOUNDING))
    assert answer.status_code == 200, answer.text
    (request,) = worker.requests
    modalities = ["video", "video", "audio", "audio", "video", "audio"]
    assert [f.modality for f in request.features] == modalities
    assert [bool(f.sampling.get("of_video")) for f in request.features] == [
        False,
        False,
        True,
        False,
        False,
        True,
    ]
    firsts = [f.ranges[0][0] for f in request.features]
    assert firsts == sorted(firsts)


async def test_the_sound_of_a_video_counts_among_the_media_of_a_request(launch: Launch) -> None:
    gateway = await launch(media={"maxItemsPerRequest": 2})
    await gateway.worker()
    assert (await ask(gateway, part(SOUNDING))).status_code == 200
    answer = await ask(gateway, picture(), part(SOUNDING))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages[0].content[1].video_url.url"
    assert "has 3 media items, more than the limit of 2" in answer.json()["error"]["message"]


async def test_a_videos_sound_obeys_the_sound_duration_and_video_size_limits(launch: Launch) -> None:
    gateway = await launch(media={"audio": {"maxDurationSeconds": 2, "maxBytes": 1024}})
    await gateway.worker()
    answer = await ask(gateway, part(SOUNDING))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages[0].content[0].video_url.url"
    assert "2.5 seconds" in answer.json()["error"]["message"]
    assert "raise spec.gateway.media.audio.maxDurationSeconds" in answer.json()["error"]["message"]
    assert (await ask(gateway, part(film(3, 1.5)))).status_code == 200


async def test_a_video_that_became_text_has_lost_its_sound_too(launch: Launch) -> None:
    gateway = await launch(media={"failurePolicy": "TextOnly"})
    worker = await gateway.worker("the red circle", failing("video"))
    answer = await ask(gateway, part(SOUNDING), picture())
    assert answer.status_code == 200, answer.text
    assert [f.modality for f in worker.requests[-1].features] == ["image"]
    assert answer.json()["usage"]["prompt_tokens_details"]["replaced_media"] == 2


async def test_a_video_whose_sound_became_text_keeps_its_frames(launch: Launch) -> None:
    gateway = await launch(media={"failurePolicy": "TextOnly"})
    worker = await gateway.worker("the red circle", failing("audio"))
    answer = await ask(gateway, part(SOUNDING), picture())
    assert answer.status_code == 200, answer.text
    assert [f.modality for f in worker.requests[-1].features] == ["video", "image"]
    assert answer.json()["usage"]["prompt_tokens_details"]["replaced_media"] == 1


@pytest.mark.parametrize("path", ["/v1/responses", "/tokenize"])
async def test_other_paths_take_it_too(launch: Launch, path: str) -> None:
    gateway = await launch()
    await gateway.worker()
    asked_for = body(part(SOUNDING))
    count = {}
    for sound in (True, False):
        sent = {**asked_for, "mm_processor_kwargs": {"use_audio_in_video": sound}}
        if path == "/v1/responses":
            sent["input"] = sent.pop("messages")
        answer = await gateway.http.post(path, json=sent)
        assert answer.status_code == 200, answer.text
        found = answer.json()
        count[sound] = found["count"] if path == "/tokenize" else found["usage"]["input_tokens"]
    assert count[True] > count[False]


async def test_a_model_without_sound_of_videos_refuses_the_option(frontend: Any) -> None:
    deaf = copy.copy(frontend)
    deaf.takes_sound_of_videos = False
    intake = Intake(pipeline_config("deaf", {}), deaf, DecodePool(1, 10), Metrics(["gateway"]))
    error = await refusal(intake)
    assert (error.status, error.code, error.param) == (400, "unsupported_input", OPTION)
    assert "this model takes no video with its own sound; omit it, or use another model" in error.message


async def test_vllm_is_named_where_it_would_get_no_sound(frontend: Any) -> None:
    config = pipeline_config("vllm", {}, engine={"type": "VLLM"})
    intake = Intake(config, frontend, DecodePool(1, 10), Metrics(["gateway"]))
    error = await refusal(intake)
    assert (error.status, error.code, error.param) == (400, "unsupported_input", OPTION)
    assert "spec.engine.type" in error.message


async def test_a_long_video_loses_frames_but_none_of_its_sound(
    launch: Launch,
) -> None:
    gateway = await launch()
    whole = body(part(SOUNDING))
    tokens = (await gateway.http.post("/tokenize", json=whole)).json()["count"]
    worker = await gateway.worker()
    assert (await ask(gateway, part(SOUNDING))).status_code == 200
    narrow = await launch({"maxModelLen": tokens}, media={"video": {"tooLong": "FewerFrames"}})
    other = await narrow.worker()
    answer = await ask(narrow, part(SOUNDING))
    assert answer.status_code == 200, answer.text
    (first,), (second,) = worker.requests, other.requests
    assert second.features[1].num_tokens == first.features[1].num_tokens
    assert second.features[0].num_tokens < first.features[0].num_tokens
    assert len(second.token_ids) < tokens
    assert answer.json()["usage"]["prompt_tokens_details"]["omitted_video_frames"] > 0
