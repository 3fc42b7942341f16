"""`mmd plan-memory`: the numbers are those of the loaded model, though no weights are read."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import yaml
from typer.testing import CliRunner

from mmd_api.contract.errors import UnsupportedInputError
from mmd_api.spec.model import ModelSpec
from mmd_cli import plan_memory
from mmd_cli.local import up
from mmd_cli.program import build
from mmd_workers.basics.memory import MEBIBYTE
from mmd_workers.model import source
from mmd_workers.model.encoder import load_encoder
from mmd_workers.model.language import load_language_model

app = build().app
EXAMPLES = Path(__file__).parents[2] / "examples"


def test_weights_and_kv_are_those_of_the_loaded_model():
    spec = up.load(EXAMPLES / "demo.yaml").spec
    planned = plan_memory.plan(spec, {})
    language = load_language_model(ModelSpec(id="builtin/demo"), torch.device("cpu"))
    encoder = load_encoder(ModelSpec(id="builtin/demo"), torch.device("cpu"))
    weights = {pool.pool: pool.weights_bytes for pool in planned.pools}
    assert weights == {
        "encoder": encoder.loaded_bytes,
        "prefill": language.loaded_bytes,
        "decode": language.loaded_bytes,
    }
    assert planned.kv_bytes_per_token == language.kv_layout.bytes_per_token()
    assert planned.max_model_len == language.max_model_len
    assert [example.name.split()[0] for example in planned.examples] == [
        "longest",
        "text",
        "image",
        "video",
        "audio",
    ]


def test_kv_in_8_bits_is_planned_with_its_scales():
    spec = up.load(EXAMPLES / "demo.yaml").spec
    engine = spec.engine.model_copy(update={"kv_dtype": "Int8"})
    planned, exact = (plan_memory.plan(s, {}) for s in (spec.model_copy(update={"engine": engine}), spec))
    language = load_language_model(ModelSpec(id="builtin/demo"), torch.device("cpu"))
    layout = language.kv_layout
    heads = zip(layout.num_kv_heads, layout.head_dim, strict=True)
    assert planned.kv_bytes_per_token == sum(2 * heads * (dim + 2) for heads, dim in heads)
    longest, before = planned.examples[0], exact.examples[0]
    assert longest.kv_bytes / before.kv_bytes == planned.kv_bytes_per_token / exact.kv_bytes_per_token
    pool, same = planned.pools[-1], exact.pools[-1]
    assert pool.kv_bytes == same.kv_bytes
    assert planned.requests(pool, longest) > 3 * exact.requests(same, before)


def test_no_weights_are_needed(tmp_path):
    folder = source.resolve(ModelSpec(id="builtin/demo"), weights=False)
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, tmp_path / file.name)
    spec = up.load(EXAMPLES / "demo.yaml").spec
    without = spec.model_copy(update={"model": spec.model.model_copy(update={"id": str(tmp_path)})})
    assert plan_memory.plan(without, {}).pools == plan_memory.plan(spec, {}).pools


def test_the_share_of_a_given_memory_is_divided_among_requests(tmp_path):
    file = tmp_path / "d.yaml"
    file.write_text(
        (EXAMPLES / "demo.yaml").read_text().replace("kvCacheMebibytes: 64", "kvCachePercent: 10")
    )
    planned = plan_memory.plan(up.load(file).spec, {"prefill": 4 << 30, "decode": 4 << 30})
    for pool in planned.pools[1:]:
        left = (4 << 30) - pool.weights_bytes - pool.activation_bytes - plan_memory.PROCESS_BYTES
        assert pool.kv_bytes == left // 10
        longest = planned.examples[0]
        assert planned.requests(pool, longest) == pool.kv_bytes // longest.kv_bytes > 10


def test_the_command_prints_budgets_and_fails_for_pods_that_cannot_start(tmp_path):
    run = CliRunner().invoke(app, ["plan-memory", "-f", str(EXAMPLES / "demo.yaml"), "--memory", "4Gi"])
    assert run.exit_code == 0, run.output
    for part in (
        "KV 3.8 KiB per token",
        "image of 1024 x 768 pixels",
        "decode pod (decode), memory 4,096.0 MiB",
        "KV pool",
    ):
        assert part in run.output
    file = tmp_path / "d.yaml"
    file.write_text(
        (EXAMPLES / "demo.yaml").read_text().replace("kvCacheMebibytes: 64", "kvCachePercent: 90")
    )
    run = CliRunner().invoke(app, ["plan-memory", "-f", str(file), "--memory", "1Gi"])
    assert run.exit_code == 1
    assert "does not start: spec.decode: of 1024 MiB of memory" in run.output


GROUPS = {
    "apiVersion": "serving.multimodal.dev/v1alpha1",
    "kind": "MultimodalDeployment",
    "metadata": {"name": "large"},
    "spec": {
        "model": {"id": "builtin/demo"},
        "engine": {"type": "VLLM", "decode": {"tensorParallelSize": 2, "pipelineParallelSize": 2}},
        "encoder": {"gpus": 0},
        "decode": {"gpus": 2},
    },
}
"""A replica of two pods with two GPUs each."""


@pytest.fixture
def groups(tmp_path: Path) -> Path:
    file = tmp_path / "groups.yaml"
    file.write_text(yaml.safe_dump(GROUPS))
    return file


def test_a_replica_that_spans_pods_is_planned_by_its_gpus(groups: Path):
    run = CliRunner().invoke(app, ["plan-memory", "-f", str(groups), "--memory", "4Gi"])
    assert run.exit_code == 0, run.output
    assert "each of the 4 GPUs of a decode replica (prefill+decode), memory 4,096.0 MiB" in run.output
    spec = up.load(groups).spec
    split = plan_memory.plan(spec, {"decode": 4 << 30})
    engine = spec.engine.model_copy(update={"decode": None})
    one = spec.decode.model_copy(update={"gpus": 1})
    whole = plan_memory.plan(spec.model_copy(update={"engine": engine, "decode": one}), {"decode": 4 << 30})
    (_, part), (_, all_of_it) = split.pools, whole.pools
    assert part.weights_bytes == -(-all_of_it.weights_bytes // 4)
    longest = split.examples[0]
    assert part.kv_bytes == (all_of_it.kv_bytes or 0) // 4, "as much as requests can take, a quarter on each"
    assert split.requests(part, longest) == whole.requests(all_of_it, longest)


def test_mmd_up_refuses_a_replica_that_spans_pods(groups: Path):
    run = CliRunner().invoke(app, ["up", "-f", str(groups)])
    assert run.exit_code == 1
    words = " ".join(run.output.split())
    assert "spec.decode.gpus: a replica spans 2 pods, which mmd up does not start; set it to 4" in words


def test_a_model_that_cannot_be_built_is_an_error_in_a_line(monkeypatch):
    def fails(*_):
        raise ZeroDivisionError("in transformers")

    monkeypatch.setattr(plan_memory, "on_meta", fails)
    run = CliRunner().invoke(app, ["plan-memory", "-f", str(EXAMPLES / "demo.yaml")])
    assert run.exit_code == 1
    assert isinstance(run.exception, SystemExit)
    assert "the model cannot be built: ZeroDivisionError: in transformers" in run.output


@pytest.mark.parametrize(
    ("text", "expected"), [("80Gi", 80 << 30), ("512M", 512_000_000), ("64Mi", 64 * MEBIBYTE)]
)
def test_quantities_are_those_of_kubernetes(text, expected):
    assert plan_memory.quantity_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "much", "-1Gi", "1.2.3Gi", "0"])
def test_an_invalid_quantity_is_rejected(text):
    with pytest.raises(UnsupportedInputError, match="--memory"):
        plan_memory.quantity_bytes(text)


def test_local_pods_share_the_machine_also_when_all_pools_have_grown():
    spec = up.load(EXAMPLES / "demo.yaml").spec
    assert up.most_workers(spec) >= 3
    grown = up.load(EXAMPLES / "gpu.yaml").spec
    assert up.most_workers(grown) == 4 + 4 + 8
