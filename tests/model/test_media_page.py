"""The settings that docs/media.md advises are valid, and their media have as many tokens as the page says.

The processors have the settings of the published checkpoints; only the weights, of which none is read, are those of small random models.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from mmd_api.contract.pools import Modality
from mmd_api.spec.deployment import MultimodalDeploymentSpec
from mmd_api.spec.media import MediaPolicy
from mmd_api.spec.model import ModelSpec
from mmd_workers.media.choice import SamplingChoice
from mmd_workers.media.medium import MediumInfo
from mmd_workers.model.frontend import load_frontend

pytestmark = pytest.mark.models

Checkpoint = Callable[[str], Path]
PAGE = Path(__file__).parents[2] / "docs" / "media.md"
QWEN2_5_VL = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2_5_VLProcessor",
    "min_pixels": 3136,
    "max_pixels": 12845056,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
"""preprocessor_config.json of Qwen/Qwen2.5-VL-7B-Instruct."""
MODEL_OF: dict[Modality, str] = {"image": "qwen2_5_vl", "video": "qwen2_5_vl", "audio": "voxtral"}


@dataclass(frozen=True)
class Advice:
    """A section of the page: its YAML, and the rows of its table."""

    name: str
    spec: dict[str, Any]
    rows: list[tuple[str, str, int]]


def advices() -> Iterator[Advice]:
    section = PAGE.read_text().split("\n## Which settings\n")[1].split("\n## ")[0]
    for text in section.split("\n### ")[1:]:
        (block,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
        rows = re.findall(r"^\| ((?:image|video|sound) .*?) \| (.*?) ?\| ([\d,]+) \|$", text, re.MULTILINE)
        yield Advice(
            text.splitlines()[0],
            yaml.safe_load(block)["spec"],
            [(file, request.strip("`"), int(tokens.replace(",", ""))) for file, request, tokens in rows],
        )


def info_of(file: str) -> MediumInfo:
    kind, numbers = file.split(" ", 1)
    given = [float(number) for number in re.findall(r"[\d.]+", numbers)]
    if kind == "image":
        return MediumInfo("image", "0" * 64, 1, "png", width=int(given[0]), height=int(given[1]))
    if kind == "sound":
        rate, seconds = int(1000 * given[0]), given[1]
        samples = round(rate * seconds)
        return MediumInfo(
            "audio", "0" * 64, 1, "wav", duration_seconds=seconds, num_samples=samples, sample_rate_hz=rate
        )
    width, height, fps, seconds = given
    return MediumInfo(
        "video", "0" * 64, 1, "mp4", int(width), int(height), round(fps * seconds), fps, seconds
    )


def choice_of(request: str) -> SamplingChoice:
    fields = yaml.safe_load(f"{{{request}}}") if request else {}
    low = fields.pop("detail", "auto") == "low"
    return SamplingChoice(**fields, low_detail=low)


@pytest.fixture(scope="module")
def published(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Modality], Path]:
    """Folders of settings alone."""
    folders: dict[str, Path] = {}

    def folder(modality: Modality) -> Path:
        name = MODEL_OF[modality]
        if name not in folders:
            folders[name] = made = tmp_path_factory.mktemp(name)
            for file in checkpoint(name).iterdir():
                if (file.suffix != ".safetensors" and "processor" not in file.name) or (
                    name == "voxtral" and file.suffix == ".json"
                ):
                    (made / file.name).write_bytes(file.read_bytes())
            if name == "qwen2_5_vl":
                (made / "preprocessor_config.json").write_text(json.dumps(QWEN2_5_VL))
        return folders[name]

    return folder


@pytest.mark.parametrize("advice", advices(), ids=lambda advice: advice.name)
def test_a_medium_has_as_many_tokens_as_the_page_says(
    advice: Advice, published: Callable[[Modality], Path]
) -> None:
    MultimodalDeploymentSpec.model_validate(
        {"model": {"id": "builtin/demo"}, "decode": {}, "prefill": {}} | advice.spec
    )
    policy = MediaPolicy.model_validate(advice.spec["gateway"]["media"])
    found = []
    for file, request, _ in advice.rows:
        info = info_of(file)
        frontend = load_frontend(ModelSpec(id=str(published(info.modality))), policy)
        content = [{"type": info.modality}]
        layout = frontend.layout([{"role": "user", "content": content}], [info], choices=[choice_of(request)])
        found.append((file, request, layout.media[0].num_tokens))
        if info.modality == "image":
            assert info.width * info.height <= policy.image.max_pixels
        else:
            assert info.duration_seconds <= getattr(policy, info.modality).max_duration_seconds
    assert found == advice.rows


def test_the_page_has_advice_for_each_use() -> None:
    names = [advice.name for advice in advices()]
    assert names == ["Photos", "Screenshots and documents", "Meetings", "Surveillance", "Calls"]
    assert all(len(advice.rows) >= 3 for advice in advices())
