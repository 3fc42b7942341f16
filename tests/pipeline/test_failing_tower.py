"""Real towers run out of memory on a medium: `spec.gateway.media.failurePolicy` decides what its request becomes, in separate pools and in one
process. The answer is that of a request that had chosen the same, and is reported as what it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from mmd_cli.samples import Sample, draw
from mmd_workers.gateway.intake.fallback import unread
from support.harness.waiting import wait_until
from support.serving.failing_tower import with_little_memory
from support.serving.held import assert_nothing_held
from support.serving.local_deployment import Deployment, content, write

from .redundant import MODEL, SPEC, TOKENS

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("failing-tower"), pytest.mark.timeout(600)]

VIDEO, IMAGE = draw("video", 4), draw("image", 5)
LITTLE = {"video": 40, "image": 8}  # tokens; of these, a video has 64 and an image at least 12
LAYOUTS = {
    "pools": {
        pool: {**SPEC[pool], "replicas": 1}  # type: ignore[dict-item]
        for pool in ("encoder", "prefill", "decode")
    },
    "one process": {"decode": {**SPEC["decode"], "replicas": 1}},  # type: ignore[dict-item]
}


@pytest.fixture(scope="module", params=LAYOUTS)
def deployment(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("tower")
    spec: dict[str, Any] = {"model": SPEC["model"], "transfer": SPEC["transfer"], **LAYOUTS[request.param]}
    encodes = "encoder" if "encoder" in spec else "decode"
    spec[encodes] |= with_little_memory(folder / "site", **LITTLE)
    if "prefill" not in spec:
        del spec["transfer"]
    with Deployment(write(folder / "tower.yaml", spec, name="tower")) as running:
        yield running


def set_policy(deployment: Deployment, policy: str) -> None:
    """As on a cluster, where the files of a ConfigMap change while gateways run."""
    deployment.lines.clear()
    changed = 0
    for file in {Path(pod.environment["MMD_PIPELINE_CONFIG"]) for pod in deployment.pods("gateway")}:
        config = json.loads(file.read_text())
        media = config["spec"].setdefault("gateway", {}).setdefault("media", {})
        if media.get("failurePolicy", "Fail") == policy:
            continue
        media["failurePolicy"] = policy
        file.write_text(json.dumps(config))
        changed = len(deployment.pods("gateway"))
    wait_until(
        lambda: sum("applied changed settings" in line for _, line in list(deployment.lines)) >= changed,
        "every gateway has the policy",
    )


def ask(deployment: Deployment, parts: list[dict[str, Any]], *, stream: bool = False) -> httpx.Response:
    request: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": parts}],
        "temperature": 0,
        "max_tokens": TOKENS,
        "stream": stream,
    }
    if stream:
        request["stream_options"] = {"include_usage": True}
    with deployment.http(120) as http:
        return http.post("/v1/chat/completions", json=request)


def answered(response: httpx.Response) -> tuple[str, dict[str, Any]]:
    """Text and usage of an answer, or of a stream of it."""
    assert response.status_code == 200, response.text
    if not response.headers["content-type"].startswith("text/event-stream"):
        body = response.json()
        return body["choices"][0]["message"]["content"], body["usage"]
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    pieces = [choice["delta"].get("content") or "" for event in events for choice in event["choices"]]
    return "".join(pieces), events[-1]["usage"]


def chosen(sample: Sample, **choice: int) -> list[dict[str, Any]]:
    medium, text = content(sample)
    return [{**medium, **choice}, text]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("policy", "sample", "alike"),
    [
        ("DegradeFrames", VIDEO, chosen(VIDEO, max_frames=4)),
        ("DegradeResolution", IMAGE, chosen(IMAGE, max_pixels=2048)),
        ("TextOnly", IMAGE, [{"type": "text", "text": unread("image")}, content(IMAGE)[1]]),
        ("TextOnly", VIDEO, [{"type": "text", "text": unread("video")}, content(VIDEO)[1]]),
    ],
    ids=["half the frames", "half the pixels", "no image", "no video"],
)
def test_a_medium_too_large_for_the_tower_is_reduced_or_omitted(
    deployment: Deployment, policy: str, sample: Sample, alike: list[dict[str, Any]], stream: bool
) -> None:
    set_policy(deployment, policy)
    response = ask(deployment, content(sample), stream=stream)
    text, usage = answered(response)
    same, of_same = answered(ask(deployment, alike))
    assert text == same
    for count in ("prompt_tokens", "completion_tokens"):
        assert usage[count] == of_same[count], "usage counts what was really used"
    assert usage["prompt_tokens_details"]["degraded_by"] == ["failure"]
    assert of_same["prompt_tokens_details"]["degraded_by"] == []
    assert response.headers["x-mmd-degraded-by"] == "failure"
    timeline = deployment.timeline(response.headers["x-request-id"])
    assert any("CUDA out of memory" in attempt["lost"] for attempt in timeline["attempts"])
    assert_nothing_held(deployment)


def test_half_of_the_pixels_of_each_frame_are_enough_for_a_video(deployment: Deployment) -> None:
    set_policy(deployment, "DegradeResolution")
    _, usage = answered(ask(deployment, content(VIDEO)))
    assert usage["prompt_tokens_details"]["omitted_video_frames"] == 0
    assert usage["prompt_tokens_details"]["omitted_pixels"] > 0
    assert 0 < usage["prompt_tokens_details"]["video_tokens"] <= LITTLE["video"]


@pytest.mark.parametrize("policy", ["Fail", "DegradeFrames"])
def test_an_image_that_no_policy_helps_ends_its_request(deployment: Deployment, policy: str) -> None:
    set_policy(deployment, policy)
    response = ask(deployment, content(IMAGE))
    assert response.status_code == 422, response.text
    assert response.json()["error"]["code"] == "unprocessable_medium"
    assert "CUDA out of memory" in response.json()["error"]["message"]
    assert_nothing_held(deployment)
