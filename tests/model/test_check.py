"""`mmd check` finds what is wrong, and workers refuse what they would serve wrongly."""

from __future__ import annotations

import importlib.util
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from typer.testing import CliRunner, Result

from mmd_api.contract.errors import UnsupportedInputError, UnsupportedModelError
from mmd_api.spec.media import MediaPolicy
from mmd_api.spec.model import ModelSpec
from mmd_cli.check import compare, model, whole
from mmd_cli.program import build
from mmd_workers.media.medium import MediumInfo
from mmd_workers.model import adapters, encoder, language, requirements
from mmd_workers.model.adapters.base import Adapter
from mmd_workers.model.encoder import HfEncoderModel, load_encoder
from mmd_workers.model.frontend import HfFrontend, load_frontend
from mmd_workers.model.language import HfLanguageModel, load_language_model

pytestmark = pytest.mark.models

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[2]
app = build().app
VERDICTS = {"agrees", "differs", "refused", "not compared"}
Checkpoint = Callable[[str], Path]


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Folder of a checkpoint of an architecture that no other test knows."""
    spec = importlib.util.spec_from_file_location("check_models", ROOT / "bench" / "check_models.py")
    assert spec is not None
    assert spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    sys.modules["check_models"] = module
    spec.loader.exec_module(module)
    return lambda name: module.build(name, tmp_path_factory.mktemp("outside") / name)


def _check(folder: Path) -> Result:
    return CliRunner().invoke(app, ["check", str(folder)])


def _verdicts(run: Result) -> dict[str, str]:
    """Prompt -> verdict, of the lines of the table."""
    rows = [(line[:26].strip(), line[26:40].strip()) for line in run.output.splitlines()]
    return {prompt: verdict for prompt, verdict in rows if verdict in VERDICTS}


@pytest.mark.parametrize(
    ("name", "prompts"),
    [
        ("vipllava", {"text", "image", "two images"}),
        ("cohere2_vision", {"text", "image", "two images"}),  # its outer model leaves the logit scale out
        ("qwen3_vl_moe", {"text", "image", "video", "two images", "image and video"}),
        ("glmasr", {"text", "audio"}),
    ],
)
def test_an_architecture_without_a_line_of_code_agrees(
    name: str, prompts: set[str], outside: Checkpoint
) -> None:
    run = _check(outside(name))
    assert run.exit_code == 0, run.output
    assert _verdicts(run) == dict.fromkeys(prompts, "agrees")


def test_frames_that_are_marked_as_images_are_served_as_a_video(outside: Checkpoint) -> None:
    run = _check(outside("glm4v"))
    assert run.exit_code == 3, run.output
    assert _verdicts(run)["video"] == "agrees"
    assert _verdicts(run)["image and video"] == "not compared"
    assert "transformers itself failed" in run.output


def test_a_video_with_unknown_placeholders_is_rejected_with_that_reason(
    outside: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(adapters.ADAPTERS, "glm4v")
    frontend = load_frontend(ModelSpec(id=str(outside("glm4v"))), MediaPolicy())
    facts = {"width": 64, "height": 64, "num_frames": 12, "fps": 6.0, "duration_seconds": 2.0}
    info = MediumInfo("video", "v", 1, "mp4", **facts)
    with pytest.raises(UnsupportedInputError, match="marks video with tokens other than"):
        frontend.layout([{"role": "user", "content": [{"type": "video"}]}], [info])


@pytest.mark.parametrize("load", [load_encoder, load_language_model])
def test_a_decoder_that_needs_more_than_the_split_gives_is_refused(
    load: Callable[..., object], outside: Checkpoint
) -> None:
    with pytest.raises(
        UnsupportedModelError, match=r"ernie4_5_vl_moe needs moe_mm_token_type_ids.*add an adapter"
    ):
        load(ModelSpec(id=str(outside("ernie4_5_vl_moe"))), CPU)


def _fails(*_: object, **__: object) -> None:
    raise ZeroDivisionError("in transformers")


@pytest.mark.parametrize(
    ("owner", "name", "status", "prompts", "says"),
    [
        (HfEncoderModel, "process", 1, {"text": "agrees", "image": "differs"}, "the split model failed"),
        (HfFrontend, "layout", 1, {"text": "differs", "image": "differs"}, "the split prompt failed"),
        (whole, "unsplit_inputs", 3, {"text": "not compared"}, "transformers itself failed"),
        (model, "load_encoder", 2, {}, "the model cannot be loaded"),
        (HfLanguageModel, "lower", 1, {"text": "differs"}, "the split model failed"),
    ],
)
def test_whatever_transformers_raises_is_a_line_of_the_report(
    owner: object,
    name: str,
    status: int,
    prompts: dict[str, str],
    says: str,
    checkpoint: Checkpoint,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(owner, name, _fails)
    run = _check(checkpoint("llava"))
    assert f"{says}: ZeroDivisionError: in transformers" in run.output
    assert run.exit_code == status
    assert prompts.items() <= _verdicts(run).items()


def test_a_medium_compared_in_no_prompt_does_not_count_as_agreement(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(frontend: HfFrontend, messages: Any, media: Any) -> Any:
        if media:
            raise UnsupportedInputError("no image today")
        return layout(frontend, messages, media)

    layout = HfFrontend.layout
    monkeypatch.setattr(HfFrontend, "layout", refuses)
    run = _check(checkpoint("llava"))
    assert _verdicts(run) == {"text": "agrees", "image": "refused", "two images": "refused"}
    assert run.exit_code == 3


def test_features_that_are_not_numbers_do_not_agree(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "_largest", lambda *_: math.nan)
    run = _check(checkpoint("llava"))
    assert run.exit_code == 1
    assert _verdicts(run)["image"] == "differs"
    assert "the features differ by nan" in run.output


def test_logits_of_another_width_differ(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = HfLanguageModel.logits
    monkeypatch.setattr(HfLanguageModel, "logits", lambda *given: logits(*given)[:, :-1])
    run = _check(checkpoint("llava"))
    assert run.exit_code == 1, run.output
    assert set(_verdicts(run).values()) == {"differs"}
    assert re.search(r"the logits have (\d+) values split and \d+ unsplit", run.output)


def test_a_comparison_that_fails_is_a_line_of_the_report(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "_judge", _fails)
    run = _check(checkpoint("llama"))
    assert run.exit_code == 1, run.output
    assert "ZeroDivisionError: in transformers" in run.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["builtin/demo", "--device", "foo"], r"--device foo: not supported; use cpu, cuda"),
        (["builtin/demo", "--device", "meta"], r"--device meta: not supported"),
        (["/a path"], r'model id: "/a path" has an invalid format'),
        (["builtin/demo", "--revision", "main"], "only models from the hub have revisions"),
    ],
)
def test_an_invalid_argument_is_reported_by_name(arguments: list[str], says: str) -> None:
    run = CliRunner().invoke(app, ["check", *arguments], env={"COLUMNS": "300"})
    assert run.exit_code == 2
    assert isinstance(run.exception, SystemExit)
    assert re.search(says, run.output)


def test_check_reports_why_a_worker_would_not_start(outside: Checkpoint) -> None:
    run = _check(outside("mllama"))
    assert run.exit_code == 2
    assert "needs cross_attention_mask, cross_attention_states" in run.output


@pytest.mark.parametrize("arch", ["gemma3", "paligemma"])
def test_bidirectional_attention_over_media_is_not_treated_as_causal(
    arch: str, checkpoint: Checkpoint
) -> None:
    made = load_language_model(ModelSpec(id=str(checkpoint(arch))), CPU)
    config = made.model.config
    assert requirements.missing_inputs(made.model, adapters.adapter_for(config)) == []
    missing = requirements.missing_inputs(made.model, Adapter(config))
    assert "a mask in which the tokens of a medium see each other (bidirectional attention)" in missing


def test_a_model_that_embeds_more_tokens_than_the_placeholders_is_refused() -> None:
    """Ovis 2 takes the embeddings of the tokens around an image from its tower's table, which the language role does not load."""
    text = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "vocab_size": 64}
    vision = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "vocab_size": 16}
    config = transformers.Ovis2Config(
        text_config=transformers.Qwen2Config(**text), vision_config=vision, visual_indicator_token_ids=[9] * 5
    )
    made = transformers.Ovis2ForConditionalGeneration(config)
    with pytest.raises(
        UnsupportedModelError, match="separate embeddings for tokens other than the placeholders"
    ):
        requirements.check(made, adapters.adapter_for(config))


def test_a_decoder_whose_layers_see_later_tokens_is_refused(checkpoint: Checkpoint) -> None:
    made = load_language_model(ModelSpec(id=str(checkpoint("llama"))), CPU)
    layer: Any = made.decoder.layers[1]
    layer.self_attn.is_causal = False
    with pytest.raises(UnsupportedModelError, match="tokens see later ones"):
        requirements.check(made.model, Adapter(made.model.config))


class Decoder(torch.nn.Module):
    def forward(self, inputs_embeds: Any = None, position_ids: Any = None, **kwargs: Any) -> Any: ...


class Scaled(Decoder):
    def forward(self, inputs_embeds: Any = None, scale: Any = None) -> Any: ...


class Wrapped(torch.nn.Module):
    """A text model with its decoder inside."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Decoder()

    def forward(self, inputs_embeds: Any, **kwargs: Any) -> Any:
        return self.model(inputs_embeds=inputs_embeds, levels=inputs_embeds, **kwargs)


class Outer(torch.nn.Module):
    """A model that is its own base; `text` has the decoder."""

    def __init__(self, text: torch.nn.Module) -> None:
        super().__init__()
        self.text = text

    base_model = property(lambda self: self)

    def get_decoder(self) -> Any:
        return next(module for module in self.modules() if isinstance(module, Decoder))


class ByName(Outer):
    def forward(self, embeds: Any, **kwargs: Any) -> Any:
        return self.text(inputs_embeds=embeds, **kwargs)


class ByPosition(Outer):
    def forward(self, embeds: Any, scale: Any) -> Any:
        return self.text(embeds, scale)


class ByOwnArguments(Outer):
    def forward(self, embeds: Any) -> Any:
        extra = {"scale": embeds}
        return self.text(inputs_embeds=embeds, **extra)


class ByAddition(Outer):
    def forward(self, embeds: Any, **kwargs: Any) -> Any:
        kwargs["scale"] = embeds
        return self.text(inputs_embeds=embeds, **kwargs)


class ByAnotherName(Outer):
    def forward(self, embeds: Any) -> Any:
        decoder = self.get_decoder()
        return decoder(inputs_embeds=embeds)


OWN = "an unknown input (the source of its outer model gives it by *args or **kwargs of its own making)"
NO_CALL = "an unknown input (the source of its outer model shows no call of it)"


@pytest.mark.parametrize(
    ("outer", "text", "missing"),
    [
        (ByName, Decoder, []),
        (ByName, Wrapped, ["levels"]),
        (ByPosition, Decoder, []),
        (ByPosition, Scaled, ["scale"]),
        (ByOwnArguments, Decoder, [OWN]),
        (ByAddition, Decoder, ["scale"]),
        (ByAnotherName, Decoder, [NO_CALL]),
    ],
)
def test_what_a_decoder_is_given_is_found_or_reported_as_unknown(
    outer: type[Outer], text: type[torch.nn.Module], missing: list[str]
) -> None:
    adapter = Adapter(transformers.LlamaConfig())
    assert requirements.missing_inputs(outer(text()), adapter) == missing


def test_a_model_without_source_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_source(_: object) -> str:
        raise OSError("could not get source code")

    monkeypatch.setattr(requirements.inspect, "getsource", no_source)
    with pytest.raises(UnsupportedModelError, match=r"an unknown input .* shows no call of it"):
        requirements.check(ByName(Decoder()), Adapter(transformers.LlamaConfig()))


def test_a_split_that_answers_otherwise_is_found(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(adapters.ADAPTERS, "gemma3")  # its images are then read causally
    for module in (encoder, language):
        monkeypatch.setattr(module.requirements, "check", lambda *_: None)
    run = _check(checkpoint("gemma3"))
    assert run.exit_code == 1, run.output
    assert _verdicts(run) == {"text": "agrees", "image": "differs", "two images": "differs"}
    assert "the logits differ by" in run.output


def test_an_omni_model_is_checked_with_a_video_and_its_sound(checkpoint: Checkpoint) -> None:
    run = _check(checkpoint("qwen2_5_omni"))
    assert run.exit_code == 0, run.output
    assert _verdicts(run)["video with its sound"] == "agrees"
