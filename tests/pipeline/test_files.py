"""Uploaded files and PDFs in a whole deployment with two gateways: any of them serves every file, and the model sees what it sees of the same bytes
sent inline.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from PIL import Image

from mmd_cli.local.pods import LocalPod
from mmd_cli.samples import draw
from mmd_workers.media.document import render
from support.harness.waiting import wait_until
from support.oracles import oracle
from support.serving.held import assert_nothing_held, scrape
from support.serving.local_deployment import Deployment, write

from .redundant import DEMO, MODEL, SPEC, TOKENS

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("files"), pytest.mark.timeout(600)]
PDF = Path(__file__).parents[1] / "media" / "documents" / "reportlab.pdf"
PAGES = {1: (576, 432), 2: (576, 432), 3: (576, 432)}
MEDIA = ("image", "video", "audio")


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    file = tmp_path_factory.mktemp("files") / "files.yaml"
    gateway = {
        **SPEC.get("gateway", {}),
        "files": {"maxMebibytes": 64, "maxTenantMebibytes": 64, "encodeOnUpload": True},
    }
    single = {name: {**SPEC[name], "replicas": 1} for name in ("encoder", "prefill", "decode")}
    with Deployment(write(file, {**SPEC, **single, "gateway": gateway}, name="files")) as running:
        yield running


def answer(client: openai.OpenAI, *parts: dict[str, Any]) -> str:
    messages: Any = [{"role": "user", "content": [*parts, {"type": "text", "text": "what is it?"}]}]
    made = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=TOKENS)
    return made.choices[0].message.content or ""


def likelihoods(client: openai.OpenAI, *parts: dict[str, Any]) -> list[float]:
    """Of the likeliest first tokens of an answer, which tell apart what the demo model answers alike."""
    messages: Any = [{"role": "user", "content": [*parts, {"type": "text", "text": "what is it?"}]}]
    made = client.chat.completions.create(
        model=MODEL, messages=messages, temperature=0, max_tokens=1, logprobs=True, top_logprobs=5
    )
    logprobs = made.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    return [round(token.logprob, 4) for token in logprobs.content[0].top_logprobs]


def by_id(file_id: str, **more: str) -> dict[str, Any]:
    return {"type": "file", "file": {"file_id": file_id}, **more}


def as_png(number: int) -> dict[str, Any]:
    """A page as an image in the request itself."""
    width, height = PAGES[number]
    pixels = np.zeros((height, width, 3), np.uint8)
    render(PDF.read_bytes(), number, pixels)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def tower_seconds(encoder: LocalPod) -> float:
    """How long its tower has run."""
    return scrape(encoder.http_url)["mmd_encode_busy_seconds_total"]["tower"]


def listed(client: openai.OpenAI) -> list[str]:
    try:
        return [one.id for one in client.files.list(purpose="vision")]
    except openai.APIError:
        return []


@pytest.mark.parametrize("kind", MEDIA)
def test_an_uploaded_medium_is_answered_by_every_gateway_as_generate_does(
    deployment: Deployment, kind: Any
) -> None:
    client, sample = deployment.client(), draw(kind, 8101)
    made = client.files.create(file=(f"sample.{kind}", sample.bytes), purpose="user_data")
    expected = oracle.answer(DEMO, [(sample.kind, sample.bytes), "what is it?"], TOKENS)
    for _ in range(4):  # in turn
        assert client.files.retrieve(made.id).bytes == len(sample.bytes)
        assert client.files.content(made.id).content == sample.bytes
        assert answer(client, by_id(made.id)) == expected
    assert client.files.delete(made.id).deleted
    for _ in range(2):
        with pytest.raises(openai.NotFoundError):
            answer(client, by_id(made.id))


def test_the_pages_of_a_pdf_are_what_their_images_are(deployment: Deployment) -> None:
    client = deployment.client()
    expected = likelihoods(client, as_png(1), as_png(2), as_png(3))
    assert likelihoods(client, as_png(3), as_png(2), as_png(1)) != expected, "their order matters"
    made = client.files.create(file=("pages.pdf", PDF.read_bytes()), purpose="user_data")
    assert likelihoods(client, by_id(made.id)) == expected
    url = f"data:application/pdf;base64,{base64.b64encode(PDF.read_bytes()).decode()}"
    inline = {"type": "file", "file": {"file_data": url, "filename": "pages.pdf"}}
    assert likelihoods(client, inline) == expected
    assert likelihoods(client, by_id(made.id, pages="2-")) == likelihoods(client, as_png(2), as_png(3))
    with pytest.raises(openai.BadRequestError, match="no page 4") as caught:
        likelihoods(client, by_id(made.id, pages="4"))
    assert caught.value.param == "messages[0].content[0].file.file_id"
    assert_nothing_held(deployment)


def test_a_file_is_encoded_on_upload_for_its_first_question(deployment: Deployment) -> None:
    client, sample = deployment.client(), draw("image", 8103)
    (encoder,) = deployment.pods("encoder")
    before = tower_seconds(encoder)
    made = client.files.create(file=("sample.png", sample.bytes), purpose="vision")
    wait_until(lambda: tower_seconds(encoder) > before, "the file is encoded")
    encoded = tower_seconds(encoder)
    expected = oracle.answer(DEMO, [(sample.kind, sample.bytes), "what is it?"], TOKENS)
    assert answer(client, by_id(made.id)) == expected
    assert tower_seconds(encoder) == encoded
    client.files.delete(made.id)
    assert_nothing_held(deployment)


def test_gateways_that_crash_and_a_bus_that_restarts_lose_no_file(deployment: Deployment) -> None:
    client, data = deployment.client(), draw("image", 8102).bytes
    made = client.files.create(file=("sample.png", data), purpose="vision")
    for gateway in deployment.pods("gateway"):
        deployment.crash_gateway(gateway)
        deployment.wait_ready(gateway)
    deployment.restart_nats()
    wait_until(lambda: listed(client) == [made.id], "the file is there")
    for _ in range(2):
        assert client.files.content(made.id).content == data
