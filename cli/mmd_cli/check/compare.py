"""`mmd check`: compares a model, split as workers run it, with the whole model in transformers.

Both get the same generated text, image, video and sound. Compared are the tokens of the prompts, the features
at the positions of media, the logits of each step, and the tokens of greedy decoding.
"""

from __future__ import annotations

import torch

from mmd_api.contract.errors import MmdError, UnsupportedModelError
from mmd_api.spec.model import ModelSpec
from mmd_cli.check import split, whole
from mmd_cli.check.check_report import Case, CheckReport
from mmd_cli.check.model import Checked
from mmd_cli.check.prompts import Medium, prompts
from mmd_workers.model.language import HfLanguageModel
from mmd_workers.model.prompt import LoweredPrompt

LARGEST_ERROR = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""Tolerated error, relative to the largest value.

It exceeds rounding, but is far below the effect of a wrong mask or position.
"""
QUESTION = "What is this? Answer in one sentence."


def check(spec: ModelSpec, device: torch.device) -> CheckReport:
    """Run all cases.

    Raises:
        UnsupportedModelError: workers would refuse the model at their start, or one of the two copies cannot be loaded.
        MmdError: the model cannot be found or does not fit.
    """
    try:
        checked = Checked(spec, device)
    except MmdError:
        raise
    except Exception as error:  # transformers' own classes can raise anything
        raise UnsupportedModelError(
            f"the model cannot be loaded: {_named(error)}; check its files and that this version of transformers loads it"
        ) from error
    takes = checked.frontend.modalities
    all_prompts = prompts(takes, checked.frontend.takes_sound_of_videos)
    cases = [_compare(checked, name, media) for name, media in all_prompts]
    dtype = str(checked.language.dtype).removeprefix("torch.")
    return CheckReport(spec.id, checked.model_type, dtype, takes, cases)


def _compare(checked: Checked, name: str, media: list[Medium]) -> Case:
    case = Case(name, frozenset(medium.info.modality for medium in media))
    content = [*({"type": m.info.modality} for m in media), {"type": "text", "text": QUESTION}]
    messages = [{"role": "user", "content": content}]
    try:
        layout = checked.frontend.layout(messages, [m.info for m in media])
    except MmdError as error:
        case.refused = error.message
        return case
    except Exception as error:  # noqa: BLE001  the model's own processor can raise anything
        case.wrong.append(f"the split prompt failed: {_named(error)}")
        return case
    try:
        inputs = whole.unsplit_inputs(checked, messages, media, layout)
        whole_tokens, whole_logits, embeds = whole.generate(checked, inputs)
    except Exception as error:  # noqa: BLE001  transformers' own processors and models can raise anything
        case.failed = f"transformers itself failed: {_named(error)}"
        return case
    whole_ids = inputs["input_ids"][0].tolist()
    case.tokens = (len(layout.token_ids), len(whole_ids))
    if layout.token_ids != whole_ids:
        case.wrong.append(
            f"the prompt has {case.tokens[0]} tokens split and {case.tokens[1]} unsplit, or the tokens differ"
        )
        return case
    try:
        prompt = split.lowered(checked, layout, media)
        if embeds is not None and embeds.shape[0] == len(whole_ids):
            case.features = _largest(checked.language, prompt, embeds)
        tokens, logits = split.run(checked, prompt, layout, media)
        _judge(case, checked.language.dtype, tokens, logits, whole_tokens, whole_logits)
    except MmdError as error:
        case.wrong.append(f"the split model failed: {error.message}")
    except Exception as error:  # noqa: BLE001  what transformers raises in a worker fails its requests
        case.wrong.append(f"the split model failed: {_named(error)}")
    return case


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:300]}"


def _judge(
    case: Case,
    dtype: torch.dtype,
    tokens: list[int],
    logits: torch.Tensor,
    whole_tokens: list[int],
    whole_logits: torch.Tensor,
) -> None:
    """Compare logits up to the first token that differs; after it, the two answers are different ones."""
    if logits.shape[-1] != whole_logits.shape[-1]:
        case.wrong.append(
            f"the logits have {logits.shape[-1]} values split and {whole_logits.shape[-1]} unsplit"
        )
        return
    allowed = LARGEST_ERROR[dtype]
    equal = 0
    while equal < len(whole_tokens) and tokens[equal] == whole_tokens[equal]:
        equal += 1
    case.outputs = equal, len(whole_tokens)
    steps = min(equal + 1, len(whole_tokens))
    scale = float(whole_logits[:steps].abs().max())
    case.logits = float((logits[:steps] - whole_logits[:steps]).abs().max()) / max(scale, 1e-6)
    if case.features is not None and not case.features <= allowed:  # NaN does not agree
        case.wrong.append(f"the features differ by {case.features:.1e}, more than {allowed:.0e}")
    if not case.logits <= allowed:
        case.wrong.append(f"the logits differ by {case.logits:.1e}, more than {allowed:.0e}")
    elif equal < len(whole_tokens):
        row = whole_logits[equal]
        if float(row[whole_tokens[equal]] - row[tokens[equal]]) > 2 * allowed * scale:
            case.wrong.append(f"token {equal} of the output differs")


def _largest(language: HfLanguageModel, prompt: LoweredPrompt, embeds: torch.Tensor) -> float | None:
    """The largest relative error in the rows of media; None without media."""
    rows = [
        i for runs in prompt.ranges.values() for start, length in runs for i in range(start, start + length)
    ]
    if not rows:
        return None
    truth = embeds[rows].float()
    merged, _, _ = language.rows(prompt, 0, len(prompt.token_ids))
    return float((merged[rows].float() - truth).abs().max() / truth.abs().max().clamp(min=1e-6))
