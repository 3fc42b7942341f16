"""What vLLM refuses: before anything starts where it is installed, else in one line that reaches whoever watches the pod."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mmd_api.faults import InvalidDeploymentError
from mmd_api.spec.engine import EngineSpec
from mmd_cli.local import supervisor, up
from mmd_cli.local.engines import VLLM_ENVIRONMENT, engine_faults
from mmd_operator.observed.observed import MAX_TEXT_CHARACTERS, pod_of
from support.oracles import random_model
from support.serving.engines import needs_vllm
from support.serving.local_deployment import write

from .random_media import KV

pytestmark = [needs_vllm, pytest.mark.processes, pytest.mark.xdist_group("demo"), pytest.mark.timeout(300)]
ARGUMENTS = [
    "--max-logprobs=5",
    "--nonsense=1",
    "--scheduling-policy=x",
    "--compilation-config.mode=0",
    "--max-lo=5",
]


def engine(**decode: Any) -> dict[str, Any]:
    return {"type": "VLLM", "decode": decode}


def test_every_argument_that_vllm_refuses_is_named_with_its_place() -> None:
    spec = EngineSpec.model_validate(engine(extraArgs=ARGUMENTS, quantization="nonsense"))
    faults = {fault.field: fault.message for fault in engine_faults(spec)}
    assert faults.keys() == {
        "spec.engine.decode.quantization",
        *(f"spec.engine.decode.extraArgs[{n}]" for n in (1, 2, 4)),
    }
    assert "has no method nonsense; choose one of" in faults["spec.engine.decode.quantization"]
    assert "unrecognized arguments: --nonsense)" in faults["spec.engine.decode.extraArgs[1]"]
    assert "invalid choice: 'x'" in faults["spec.engine.decode.extraArgs[2]"]
    assert "--max-lo)" in faults["spec.engine.decode.extraArgs[4]"], (
        "no abbreviations: the rules know whole names"
    )


def test_arguments_that_vllm_takes_are_no_faults() -> None:
    spec = EngineSpec.model_validate(engine(extraArgs=ARGUMENTS[:1], quantization="fp8"))
    assert engine_faults(spec) == []


def test_where_vllm_is_missing_its_arguments_are_left_to_the_pods(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(VLLM_ENVIRONMENT, str(tmp_path))
    assert engine_faults(EngineSpec.model_validate(engine(extraArgs=["--nonsense=1"]))) == []


def test_up_starts_nothing_with_an_argument_that_vllm_refuses(tmp_path: Path) -> None:
    spec = {"engine": engine(extraArgs=["--nonsense=1"]), "model": {"id": "builtin/demo"}, "decode": KV}
    lines: list[str] = []
    with pytest.raises(
        InvalidDeploymentError, match=r"spec\.engine\.decode\.extraArgs\[0\]: vLLM .* refuses it"
    ):
        asyncio.run(started(write(tmp_path / "refused.yaml", spec, name="refused"), lines))
    assert not lines


def with_architecture(folder: Path) -> None:
    """A checkpoint whose architecture vLLM does not have."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"architectures": ["NewForEverything"]}))


@dataclass(frozen=True)
class Refusal:
    """A model and settings that do not work together here, and vLLM's own words for that."""

    words: str
    settings: dict[str, Any] = field(default_factory=dict)
    hidden: int = 128
    change: Callable[[Path], None] = lambda _: None


REFUSALS = {
    "an architecture that vLLM lacks": Refusal(
        "Model architectures ['NewForEverything'] are not supported for now", change=with_architecture
    ),
    "quantization that the hardware lacks": Refusal(
        "Failed to find a kernel that can implement the MXFP8 linear layer", {"quantization": "mxfp8"}
    ),
    "heads that the attention lacks": Refusal(
        "Unsupported CPU attention configuration: head_dim=16", hidden=64
    ),
    "heads that ranks cannot divide": Refusal(
        "must be divisible by tensor parallel size", {"tensorParallelSize": 3}
    ),
    "what a rank finds when it loads": Refusal(
        "Failed to find a kernel that can implement the MXFP8 linear layer",
        {"quantization": "mxfp8", "tensorParallelSize": 2},
    ),
    "what a rank finds in its first step": Refusal(
        "vLLM cannot start: Unsupported CPU attention configuration: head_dim=16",
        {"tensorParallelSize": 2},
        hidden=64,
    ),
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.alone if "rank finds" in name else [], id=name)
        for name, case in REFUSALS.items()
    ],
)
def test_conditions_and_mmd_up_report_why_vllm_refuses_to_start(
    case: Refusal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "MAX_FUTILE_STARTS", 1)
    model = tmp_path / "model"
    random_model.build("qwen2_5_vl", model, seed=3, size=random_model.Size(hidden=case.hidden))
    case.change(model)
    spec = {
        "engine": engine(**case.settings),
        "model": {"id": str(model), "dtype": "BFloat16"},
        "decode": {"replicas": 1, **KV},
    }
    lines: list[str] = []
    with pytest.raises(supervisor.GaveUpError, match="before it became Ready") as gave_up:
        asyncio.run(started(write(tmp_path / "refused.yaml", spec, name="refused"), lines))
    seen = last_words("\n".join(lines))
    assert seen in gave_up.value.message
    assert seen.startswith("cannot serve (engine_settings): vLLM cannot start: ")
    assert case.words in seen
    assert seen.endswith("or set spec.engine.type: Native")


async def started(file: Path, decode_lines: list[str]) -> None:
    """Run a deployment until it is ready."""

    def log(pod: str, line: str) -> None:
        if "decode" in pod and not line.startswith(supervisor.EXITED):
            decode_lines.append(line)

    async with up.running(up.load(file), threads=1, log_line=log):
        pass


def last_words(log: str) -> str:
    """What the operator shows of a container's log."""
    assert MAX_TEXT_CHARACTERS == 400
    ended = {"terminated": {"exitCode": 1, "reason": "Error", "message": log[-2048:]}}
    return pod_of(
        {"metadata": {"name": "p", "uid": "u"}, "status": {"containerStatuses": [{"lastState": ended}]}}
    ).last_words
