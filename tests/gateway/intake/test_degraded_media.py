"""Media with fewer pixels and frames, or a text in their place: under load, and after no encoder could encode them. Never without saying so."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from mmd_api.contract.errors import BadMediaError, DeadlineError, UnprocessableMediumError
from mmd_api.contract.load import PodLoad
from mmd_api.tenants import new_key
from mmd_workers.gateway.api import choices
from mmd_workers.gateway.intake.fallback import unread
from mmd_workers.model.frontend import HfFrontend
from mmd_workers.wire.messages.prefill import GenerateRequest
from tests.gateway.media import mp4, png, url, wav
from tests.gateway.running import Launch, Running, assert_nothing_is_left
from tests.gateway.scripted import Script, ScriptedWorker, answer_well, say_nothing
from tests.gateway.tenancy import AUTH, bearer, tenant, write

MODEL = "builtin/demo"
LOADED = PodLoad(kv_blocks_total=1000, kv_blocks_free=50, kv_block_tokens=16)
HALF_LOADED = PodLoad(kv_blocks_total=1000, kv_blocks_free=150, kv_block_tokens=16)
IDLE = PodLoad(kv_blocks_total=1000, kv_blocks_free=1000, kv_block_tokens=16)


def film(**more: Any) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": url("video/mp4", mp4())}, **more}


def picture(**more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url("image/png", png())}, **more}


def sound() -> dict[str, Any]:
    return {"type": "audio_url", "audio_url": {"url": url("audio/wav", wav())}}


async def ask(gateway: Running, *parts: dict[str, Any], stream: bool = False, **more: Any) -> httpx.Response:
    request = {
        "model": MODEL,
        "messages": [{"role": "user", "content": list(parts)}],
        "stream": stream,
        **more,
    }
    if stream:
        request["stream_options"] = {"include_usage": True}
    answer = await gateway.http.post("/v1/chat/completions", json=request)
    assert answer.status_code == 200, answer.text
    return answer


def details(answer: httpx.Response) -> dict[str, Any]:
    events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    found: dict[str, Any] = json.loads(events[-1] if events else answer.text)["usage"][
        "prompt_tokens_details"
    ]
    return found


async def in_tier(gateway: Running, tier: int, load: PodLoad, **spec: Any) -> ScriptedWorker:
    worker = await gateway.worker("the red circle", load=load, **spec)
    await gateway.until_metric("mmd_media_quality_tier_state", tier)
    return worker


@pytest.mark.parametrize("stream", [True, False])
async def test_load_reduces_pixels_and_frames_and_the_answer_reports_it(launch: Launch, stream: bool) -> None:
    tier = {"memoryPercent": 80, "backlogMilliseconds": 1000, "pixelsPercent": 25, "framesPercent": 50}
    gateway = await launch(media={"underLoad": {"tiers": [tier]}})
    worker = await in_tier(gateway, 1, LOADED)
    answer = await ask(gateway, film(), picture(), sound(), stream=stream)
    sent = worker.requests[0]
    video, image, _ = sent.features
    assert len(video.sampling["frame_indices"]) == 4
    assert (image.num_tokens, video.num_tokens) == (4, 2 * 4)
    reported = details(answer)
    assert reported["omitted_video_frames"] == int(answer.headers["x-mmd-omitted-video-frames"]) == 4
    assert reported["omitted_pixels"] == int(answer.headers["x-mmd-omitted-pixels"]) == 5 * (4096 - 1024)
    assert reported["degraded_by"] == [answer.headers["x-mmd-degraded-by"]] == ["load"]
    assert reported["image_tokens"] == 4, "usage counts what the model got"
    timeline = (await gateway.admin.get(f"/debug/requests/{answer.headers['x-request-id']}")).json()
    assert (timeline["media_tier"], timeline["degraded_by"]) == (1, ["load"])
    assert (await gateway.admin.get("/debug/state")).json()["media_tier"] == 1
    assert await gateway.metric("mmd_media_by_quality_tier_total") == 3


async def test_frames_and_pixels_under_load_are_the_feature_of_the_same_choice(launch: Launch) -> None:
    tier = {"memoryPercent": 80, "backlogMilliseconds": 1000, "maxFrames": 4}
    gateway = await launch(media={"underLoad": {"tiers": [tier], "holdSeconds": 1}})
    worker = await in_tier(gateway, 1, LOADED)
    await ask(gateway, film(), picture())
    worker.load = IDLE
    await gateway.until_metric("mmd_media_quality_tier_state", 0)
    await ask(gateway, film(max_frames=4), picture())
    loaded, chosen = worker.requests
    assert (chosen.token_ids, chosen.features) == (loaded.token_ids, loaded.features), "as exact as a choice"


async def test_under_load_a_request_gets_a_share_of_what_it_chooses(launch: Launch) -> None:
    gateway = await launch(media={"underLoad": {}})
    worker = await in_tier(gateway, 1, HALF_LOADED)
    answer = await ask(
        gateway, film(num_frames=4), film(max_frames=2), picture(max_pixels=1024), picture(min_pixels=4096)
    )
    some, least, small, large = worker.requests[0].features
    assert [len(one.sampling["frame_indices"]) for one in (some, least)] == [2, 2], "3 of 4, in whole pairs"
    assert [small.num_tokens, large.num_tokens] == [1, 4], "56 % of what it would have had"
    assert details(answer)["omitted_video_frames"] == 2


async def test_a_request_with_nothing_to_leave_out_is_not_reported_degraded(launch: Launch) -> None:
    gateway = await launch(media={"underLoad": {}})
    await in_tier(gateway, 2, LOADED)
    for parts in ([sound()], [{"type": "text", "text": "red"}], [picture(max_pixels=256)]):
        answer = await ask(gateway, *parts)
        assert details(answer)["degraded_by"] == []
        assert not [name for name in answer.headers if name.startswith(("x-mmd-omitted", "x-mmd-degraded"))]


async def test_load_lowers_quality_only_where_allowed_and_only_until_calm(
    launch: Launch,
) -> None:
    gateway = await launch(media={"underLoad": {"holdSeconds": 1}})
    worker = await in_tier(gateway, 2, LOADED)
    worker.load = IDLE
    await gateway.until_metric("mmd_media_quality_tier_state", 0)
    assert details(await ask(gateway, film()))["degraded_by"] == []
    plain = await launch()
    full = await plain.worker("the red circle", load=LOADED)
    assert details(await ask(plain, film()))["degraded_by"] == []
    assert full.requests[0].features == worker.requests[0].features
    assert await plain.metric("mmd_media_quality_tier_state") == 0


async def test_a_long_prompt_under_load_loses_more_frames_and_reports_both(
    launch: Launch,
) -> None:
    tier = {"memoryPercent": 80, "backlogMilliseconds": 1000, "framesPercent": 75}
    media = {"underLoad": {"tiers": [tier]}, "video": {"tooLong": "FewerFrames"}}
    gateway = await launch(media=media)
    worker = await in_tier(gateway, 1, LOADED, max_model_len=100)
    answer = await ask(gateway, film(), film(), max_tokens=9)
    frames = [len(one.sampling["frame_indices"]) for one in worker.requests[0].features]
    reported = details(answer)
    assert reported["degraded_by"] == ["context", "load"]
    assert reported["omitted_video_frames"] == 16 - sum(frames)


async def test_videos_that_do_not_fit_with_fewest_frames_lose_pixels_too(
    launch: Launch,
) -> None:
    roomy = await launch()
    whole = await roomy.worker("the red circle")
    await ask(roomy, film(num_frames=2), film(num_frames=2))
    least = len(whole.requests[0].token_ids)
    gateway = await launch(media={"video": {"tooLong": "FewerFrames"}})
    worker = await gateway.worker("the red circle", max_model_len=least - 2)
    answer = await ask(gateway, film(), film(), max_tokens=1)
    (request,) = worker.requests
    assert len(request.token_ids) < least - 2
    assert all(len(one.sampling["frame_indices"]) == 2 and one.size for one in request.features)
    reported = details(answer)
    assert reported["degraded_by"] == ["context"]
    assert reported["omitted_video_frames"] > 0
    assert reported["omitted_pixels"] > 0


@pytest.mark.parametrize("parts", [[], [picture()]], ids=["text", "image"])
async def test_a_prompt_without_videos_that_is_too_long_is_laid_out_once(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, parts: list[dict[str, Any]]
) -> None:
    gateway = await launch(media={"video": {"tooLong": "FewerFrames"}})
    await gateway.worker("the red circle", max_model_len=100)
    rendered, render = [], HfFrontend.render

    def counted(self: HfFrontend, *args: Any, **more: Any) -> Any:
        rendered.append(1)
        return render(self, *args, **more)

    monkeypatch.setattr(HfFrontend, "render", counted)
    content = [*parts, {"type": "text", "text": "red circle " * 80}]
    request = {"model": MODEL, "messages": [{"role": "user", "content": content}]}
    assert (await gateway.http.post("/v1/chat/completions", json=request)).status_code == 400
    assert len(rendered) == 1


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
async def test_other_apis_report_it_too(launch: Launch, path: str) -> None:
    gateway = await launch(media={"underLoad": {}})
    await in_tier(gateway, 2, LOADED)
    if path == "/v1/messages":
        data = base64.b64encode(png()).decode()
        source = {"type": "base64", "media_type": "image/png", "data": data}
        request: dict[str, Any] = {
            "max_tokens": 8,
            "messages": [{"role": "user", "content": [{"type": "image", "source": source}]}],
        }
    else:
        part = {"type": "input_image", "image_url": url("image/png", png())}
        request = {"input": [{"role": "user", "content": [part]}], "store": False}
    answer = await gateway.http.post(path, json={"model": MODEL, **request})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-mmd-degraded-by"] == "load"
    assert answer.headers["x-mmd-omitted-pixels"] == str(4096 - 1024)
    if path == "/v1/responses":
        assert answer.json()["usage"]["input_tokens_details"]["degraded_by"] == ["load"]
    await assert_nothing_is_left(gateway)


# --- no encoder could encode it -------------------------------------------------------------------------------------


def failing(
    times: int, modality: str, code: str = UnprocessableMediumError.code, *, retryable: bool = False
) -> Script:
    """Every encoder fails on the first medium of this kind, in so many layouts of the prompt."""

    async def script(worker: ScriptedWorker, request: GenerateRequest) -> None:
        media = [one.feature_id for one in request.features if one.modality == modality]
        if request.attempt < times and media:
            await worker.fail(request, code, "3 encoders failed on it", retryable, media[0])
        else:
            await answer_well(worker, request)

    return script


async def with_policy(
    launch: Launch, policy: str, script: Script, **more: Any
) -> tuple[Running, ScriptedWorker]:
    gateway = await launch(media={"failurePolicy": policy}, **more)
    return gateway, await gateway.worker("the red circle", script)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("code", "retryable"), [(UnprocessableMediumError.code, False), (DeadlineError.code, True)]
)
async def test_degrade_frames_halves_a_videos_frames_in_a_new_attempt(
    launch: Launch, stream: bool, code: str, retryable: bool
) -> None:
    script = failing(1, "video", code, retryable=retryable)
    gateway, worker = await with_policy(launch, "DegradeFrames", script)
    answer = await ask(gateway, picture(), film(), sound(), stream=stream, max_tokens=20)
    first, second = worker.requests
    assert (first.request_id, first.attempt + 1) == (second.request_id, second.attempt)
    assert [len(one.sampling["frame_indices"]) for one in (first.features[1], second.features[1])] == [8, 4]
    assert [first.features[0].feature_id, first.features[2].feature_id] == [
        second.features[0].feature_id,
        second.features[2].feature_id,
    ]
    reported = details(answer)
    assert reported["degraded_by"] == [answer.headers["x-mmd-degraded-by"]] == ["failure"]
    assert reported["omitted_video_frames"] == int(answer.headers["x-mmd-omitted-video-frames"]) == 4
    assert reported["video_tokens"] == second.features[1].num_tokens
    assert answer.text.count("circle") == 1
    await gateway.until_metric("mmd_media_fallbacks_total", 1)
    timeline = (await gateway.admin.get(f"/debug/requests/{answer.headers['x-request-id']}")).json()
    assert timeline["degraded_by"] == ["failure"]
    assert "3 encoders failed" in timeline["attempts"][0]["lost"]
    assert timeline["media"][1]["tokens"] == second.features[1].num_tokens
    await assert_nothing_is_left(gateway)

    await ask(gateway, picture(), film(max_frames=4), sound(), max_tokens=20)
    chosen = worker.requests[2]
    assert (chosen.token_ids, chosen.features) == (second.token_ids, second.features), "as exact as a choice"


async def test_degrade_resolution_halves_an_images_pixels_at_most_twice(launch: Launch) -> None:
    gateway, worker = await with_policy(launch, "DegradeResolution", failing(2, "image"))
    reported = details(await ask(gateway, picture()))
    pixels = [one.features[0].work for one in worker.requests]
    assert pixels[1] <= pixels[0] // 2
    assert pixels[2] <= pixels[1] // 2
    assert reported["omitted_pixels"] == (pixels[0] - pixels[2]) * 32, "a patch of 64 pixels counts twice"
    worker.script = failing(9, "image")
    await assert_fails(gateway, picture())
    assert len(worker.requests) == 6, "as laid out first, and two halves"
    await assert_nothing_is_left(gateway)


async def assert_fails(
    gateway: Running, *parts: dict[str, Any], code: str = UnprocessableMediumError.code, **more: Any
) -> None:
    request = {"model": MODEL, "messages": [{"role": "user", "content": list(parts)}], **more}
    answer = await gateway.http.post("/v1/chat/completions", json=request)
    assert answer.json()["error"]["code"] == code, answer.text


@pytest.mark.parametrize("stream", [True, False])
async def test_with_text_only_a_sentence_stands_where_the_medium_was(launch: Launch, stream: bool) -> None:
    gateway, worker = await with_policy(launch, "TextOnly", failing(1, "video"))
    text = {"type": "text", "text": "what is it?"}
    answer = await ask(gateway, film(), picture(), film(), text, stream=stream)
    first, second = worker.requests
    assert [one.modality for one in second.features] == ["image"], "both parts had the same file"
    assert second.features[0].feature_id == first.features[1].feature_id
    prompt = gateway.tokenizer.decode(second.token_ids)
    assert prompt.count(unread("video")) == 2
    reported = details(answer)
    assert (reported["replaced_media"], reported["video_tokens"]) == (2, 0)
    assert reported["degraded_by"] == [answer.headers["x-mmd-degraded-by"]] == ["failure"]
    assert answer.headers["x-mmd-replaced-media"] == "2"
    await assert_nothing_is_left(gateway)


async def test_headers_are_those_of_the_prompt_that_was_answered(launch: Launch) -> None:
    tier = {"memoryPercent": 80, "backlogMilliseconds": 1000, "pixelsPercent": 25, "framesPercent": 50}
    gateway = await launch(media={"underLoad": {"tiers": [tier]}, "failurePolicy": "TextOnly"})
    worker = await in_tier(gateway, 1, LOADED)
    worker.script = failing(1, "video")
    answer = await ask(gateway, film(), {"type": "text", "text": "?"})
    assert details(answer)["omitted_video_frames"] == 0
    assert "x-mmd-omitted-video-frames" not in answer.headers
    assert "x-mmd-omitted-pixels" not in answer.headers
    assert answer.headers["x-mmd-replaced-media"] == "1"


async def test_all_media_of_a_request_may_become_text_one_after_another(launch: Launch) -> None:
    async def script(worker: ScriptedWorker, request: GenerateRequest) -> None:
        if request.features:
            lost = request.features[-1].feature_id
            await worker.fail(request, UnprocessableMediumError.code, "no", False, lost)
        else:
            await answer_well(worker, request)

    gateway, worker = await with_policy(launch, "TextOnly", script)
    reported = details(await ask(gateway, film(), picture(), sound()))
    assert [len(one.features) for one in worker.requests] == [3, 2, 1, 0]
    assert reported["replaced_media"] == 3
    assert reported["text_tokens"] == len(worker.requests[-1].token_ids)


@pytest.mark.parametrize(
    ("policy", "part", "modality"),
    [
        ("Fail", film(), "video"),
        ("DegradeFrames", picture(), "image"),
        ("DegradeFrames", film(num_frames=2), "video"),
        ("DegradeResolution", sound(), "audio"),
    ],
)
async def test_a_medium_of_which_nothing_can_be_left_out_ends_its_request(
    launch: Launch, policy: str, part: dict[str, Any], modality: str
) -> None:
    gateway, worker = await with_policy(launch, policy, failing(9, modality))
    await assert_fails(gateway, part)
    assert len(worker.requests) == 1
    await assert_nothing_is_left(gateway)


async def test_a_damaged_file_is_its_clients_error_whatever_the_policy(launch: Launch) -> None:
    async def script(worker: ScriptedWorker, request: GenerateRequest) -> None:
        await worker.fail(request, BadMediaError.code, "it is damaged; send it whole", False)

    gateway, worker = await with_policy(launch, "TextOnly", script)
    await assert_fails(gateway, picture(), code=BadMediaError.code)
    assert len(worker.requests) == 1


async def test_all_answers_to_a_prompt_share_its_new_layout(launch: Launch) -> None:
    gateway, worker = await with_policy(launch, "DegradeFrames", failing(1, "video"))
    answer = await ask(gateway, film(), n=3)
    assert len(answer.json()["choices"]) == 3
    first = [one for one in worker.requests if one.attempt == 0]
    again = [one for one in worker.requests if one.attempt == 1]
    assert (len(first), len(again)) == (3, 3)
    assert {one.features[0].feature_id for one in again} == {again[0].features[0].feature_id}
    assert details(answer)["omitted_video_frames"] == 4


async def test_a_request_with_tokens_keeps_the_layout_that_they_follow(launch: Launch) -> None:
    async def script(worker: ScriptedWorker, request: GenerateRequest) -> None:
        await worker.tokens(request, [0])
        lost = request.features[0].feature_id
        await worker.fail(request, UnprocessableMediumError.code, "no", False, lost)

    gateway, worker = await with_policy(launch, "TextOnly", script)
    await assert_fails(gateway, film())
    assert len(worker.requests) == 1


async def test_a_stream_that_may_fall_back_opens_with_its_first_token(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choices, "STREAM_OPENS_AFTER_SECONDS", 0.01)
    monkeypatch.setattr(choices, "KEEPALIVE_SECONDS", 0.01)
    gateway, worker = await with_policy(launch, "DegradeFrames", say_nothing)
    asked = asyncio.create_task(ask(gateway, film(), stream=True))
    await worker.until(lambda: len(worker.requests) == 1)
    other = asyncio.create_task(ask(gateway, {"type": "text", "text": "red"}, stream=True))
    await worker.until(lambda: len(worker.requests) == 2)
    request, text = worker.requests
    await asyncio.sleep(0.2)
    await worker.fail(request, UnprocessableMediumError.code, "no", False, request.features[0].feature_id)
    worker.script = answer_well
    await answer_well(worker, text)
    answer = await asked
    assert answer.headers["x-mmd-degraded-by"] == "failure"
    assert ": waiting" not in answer.text
    assert ": waiting" in (await other).text


async def test_answers_are_no_longer_than_the_first_layout_had_room_for(launch: Launch) -> None:
    gateway, worker = await with_policy(launch, "TextOnly", failing(1, "video"))
    await ask(gateway, film())
    first, second = worker.requests
    assert second.sampling.max_tokens == first.sampling.max_tokens


async def test_a_degraded_requests_repeat_has_the_same_answer_and_report(launch: Launch) -> None:
    gateway, worker = await with_policy(launch, "DegradeFrames", failing(1, "video"))
    request = {"model": MODEL, "messages": [{"role": "user", "content": [film()]}]}
    first, again = [
        await gateway.http.post("/v1/chat/completions", json=request, headers={"idempotency-key": "one"})
        for _ in range(2)
    ]
    assert again.headers["idempotent-replayed"] == "true"
    assert again.json() == first.json()
    assert again.headers["x-mmd-degraded-by"] == first.headers["x-mmd-degraded-by"] == "failure"
    assert len(worker.requests) == 2


async def test_a_tenant_is_charged_for_the_prompt_that_was_answered(launch: Launch, tmp_path: Path) -> None:
    key, file = new_key(), tmp_path / "keys.yaml"
    write(file, tenant("one", key, limits={"tokensPerDay": 80}))
    gateway, worker = await with_policy(
        launch, "TextOnly", failing(1, "video"), keys_file=str(file), auth=AUTH
    )
    gateway.http.headers.update(bearer(key))
    await ask(gateway, film())
    first, second = (len(one.token_ids) for one in worker.requests)
    assert second < first < 80 <= first + 10
    text = {"type": "text", "text": "red"}
    await ask(gateway, text)
    await ask(gateway, text)
    used = second + 4 + sum(len(one.token_ids) + 4 for one in worker.requests[2:])
    assert used < 80, "with the first prompt it would have been more at the first text"
    await assert_nothing_is_left(gateway)
