"""A model of text alone is served without an encoder pool, as a model with media is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from support.oracles import random_model
from support.serving.local_deployment import Deployment, write

from .random_media import KV, content, png

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("demo"), pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "llama"
    random_model.build("llama", folder, seed=3)
    return folder


def asked(deployment: Deployment, *parts: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content(list(parts))}]
    return {"model": deployment.local.model, "messages": messages, "max_tokens": 4, "temperature": 0}


@pytest.mark.parametrize(
    "pools",
    [
        {"decode": {"replicas": 1, **KV}},
        {"prefill": {"replicas": 1, **KV}, "decode": {"replicas": 1, **KV}, "transfer": {"kv": {"backend": "Gloo"}}},
    ],
    ids=["decode", "prefill and decode"],
)  # fmt: skip
def test_a_model_of_text_alone_answers_without_an_encoder_pool(
    text_model: Path, pools: dict[str, Any], tmp_path: Path
) -> None:
    spec = {"model": {"id": str(text_model), "dtype": "Float32"}, **pools}
    with Deployment(write(tmp_path / "text.yaml", spec, name="text")) as deployment:
        client = deployment.client()
        answer = client.chat.completions.create(**asked(deployment, "Where to?"))
        assert answer.usage.completion_tokens == 4
        with pytest.raises(openai.BadRequestError, match="this model does not accept image"):
            client.chat.completions.create(**asked(deployment, ("image", png(1, 56, 84)), "Where to?"))
