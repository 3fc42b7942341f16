"""A medium whose encode job exceeds a message on the queue is refused by the gateway, by its field, before any pod has the request.

A job carries no media, but where the tokens of its medium are in the prompt. Mistral 3 ends each row of patches with a token of its
own, so that an image of one column has as many ranges as rows.
"""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

import pytest
from PIL import Image

from support.oracles import random_model
from tests.gateway.running import Launch

PATCH_PIXELS = 28
ROWS = 190_000  # of one patch each; 150,000 fill a message


def longer(folder: Path) -> Path:
    """Raise the limits of a checkpoint on the length of a prompt and on the side of an image."""
    for file, section, changed in (
        ("config.json", "text_config", {"max_position_embeddings": 1 << 20}),
        ("processor_config.json", "image_processor", {"size": {"longest_edge": 1 << 24}}),
    ):
        settings = json.loads((folder / file).read_text())
        settings[section] |= changed
        (folder / file).write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return longer(random_model.build("mistral3", tmp_path_factory.mktemp("model") / "mistral3"))


def question(rows: int) -> dict:
    out = io.BytesIO()
    Image.new("1", (1, PATCH_PIXELS * rows)).save(out, "PNG")
    url = "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()
    parts = [{"type": "text", "text": "what is it?"}, {"type": "image_url", "image_url": {"url": url}}]
    return {"model": "mistral3", "messages": [{"role": "user", "content": parts}], "max_tokens": 3}


async def test_a_medium_is_refused_when_its_encode_job_exceeds_a_message(
    launch: Launch, checkpoint: Path
) -> None:
    gateway = await launch({"id": str(checkpoint)}, encoder={"replicas": 1})
    worker = await gateway.worker([5, 6, 7])
    answer = await gateway.http.post("/v1/chat/completions", json=question(ROWS))
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("too_large", "messages[0].content[1].image_url.url")
    assert f"the {ROWS} tokens of this image are in {ROWS} separate ranges" in error["message"]
    assert error["message"].endswith("send a smaller image")
    assert worker.requests == []
    smaller = await gateway.http.post("/v1/chat/completions", json=question(100))
    assert smaller.status_code == 200, smaller.text


async def test_without_an_encoder_pool_no_encode_job_is_too_large(launch: Launch, checkpoint: Path) -> None:
    gateway = await launch({"id": str(checkpoint)})
    worker = await gateway.worker([5, 6, 7])
    answer = await gateway.http.post("/v1/chat/completions", json=question(ROWS))
    assert answer.status_code == 200, answer.text
    assert len(worker.requests[0].features[0].ranges) == ROWS
