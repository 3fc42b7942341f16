"""Fewer tiles than the checkpoint has, where a deployment says so: at gateway and encoder alike, and exact."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mmd_api.contract.errors import UnsupportedModelError
from support.oracles import model_zoo as zoo

Checkpoint = Callable[[str], Path]
TILED = {"internvl": 2, "llava_next": 2, "llava_onevision": 2, "idefics3": 1, "smolvlm": 1}
"""By architecture: tiles that are fewer than its checkpoint's."""
SIZES = [(150, 110), (300, 60), (60, 300), (112, 112)]


@pytest.mark.models
@pytest.mark.parametrize("arch", TILED)
def test_answers_about_images_of_fewer_tiles_equal_generate(arch: str, checkpoint: Checkpoint) -> None:
    whole, few = zoo.serve(checkpoint(arch)), zoo.serve(checkpoint(arch), max_image_tiles=TILED[arch])
    fewer = 0
    for number, size in enumerate(SIZES):
        picture = zoo.image(*size, number)
        layout, before = (
            one.frontend.layout(zoo.conversation(picture, "go"), [picture.info]) for one in (few, whole)
        )
        inputs = zoo.hf_inputs(few, zoo.conversation(picture, "go"), [picture], layout)
        assert layout.token_ids == inputs["input_ids"][0].tolist()
        assert zoo.greedy(few, zoo.lowered(few, layout, [picture])) == zoo.generate(few, inputs)
        assert len(layout.token_ids) <= len(before.token_ids)
        fewer += len(before.token_ids) - len(layout.token_ids)
    assert fewer > 0


@pytest.mark.parametrize("arch", TILED)
def test_as_many_tiles_as_the_checkpoint_has_change_nothing(arch: str, checkpoint: Checkpoint) -> None:
    picture = zoo.image(150, 110, 1)
    layouts = [
        zoo.serve(checkpoint(arch), max_image_tiles=tiles).frontend.layout(
            zoo.conversation(picture, "go"), [picture.info]
        )
        for tiles in (None, 1024)
    ]
    assert layouts[0] == layouts[1]


@pytest.mark.parametrize("arch", ["qwen2_vl", "gemma3", "qwen2_audio"])
def test_a_model_without_tiles_names_the_field_and_the_remedy(arch: str, checkpoint: Checkpoint) -> None:
    with pytest.raises(UnsupportedModelError, match=r"spec\.model\.maxImageTiles: .*remove it"):
        zoo.serve(checkpoint(arch), max_image_tiles=4)


def test_fewer_tiles_than_any_image_has_are_refused(checkpoint: Checkpoint) -> None:
    with pytest.raises(UnsupportedModelError, match=r"1 tiles are fewer than the 2 .* raise it"):
        zoo.serve(checkpoint("llava_next"), max_image_tiles=1)
