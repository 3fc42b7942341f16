"""lm-eval as people install it, without a network: tasks of log-likelihoods and of generation on local data, at a real gateway."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

import httpx
import pytest
import yaml

from support.harness import namespace
from support.harness.namespace import run_without_outside
from support.serving.other_clients import AGENTS as INSTALLED
from tests.gateway.agents.agents import MODEL, URL
from tests.gateway.running import Launch, Running

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(namespace.missing()), reason=namespace.missing()),
]

DEMO = Path(str(resources.files("mmd_workers.model") / "demo"))
RUN_SECONDS = 180.0
ANSWER = "red"
SHORTER_FIRST = [
    {"question": "What is it?", "choices": ["red", "a red circle of paper"], "label": 0},
    {"question": "What is it, then?", "choices": ["a blue square of cloth", "blue"], "label": 0},
]
CHOICE = {
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{label}}",
    "doc_to_choice": "{{choices}}",
    "metric_list": [{"metric": "acc"}],
}
GENERATION = {
    "output_type": "generate_until",
    "doc_to_text": "{{question}}",
    "doc_to_target": ANSWER,
    "generation_kwargs": {"until": ["\n\n", "Q:", "A:", "Question:"], "max_gen_toks": 16},
    "metric_list": [{"metric": "exact_match"}],
}


async def scores(gateway: Running, kind: str, path: str, task: dict, folder: Path) -> dict[str, float]:
    """What lm-eval finds for a task, with its client of this kind for the API at this path."""
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in SHORTER_FIRST))
    source = {
        "task": "local",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
    }
    (folder / "task.yaml").write_text(yaml.safe_dump({**source, **task}))
    installed, url = INSTALLED.install(), httpx.URL(gateway.url)
    assert url.port is not None
    model = f"model={MODEL},base_url={URL}{path},tokenizer={DEMO},num_concurrent=1"
    options = ("--tasks", "local", "--include_path", folder, "--output_path", folder / "results")
    chat = ("--apply_chat_template",) if kind == "local-chat-completions" else ()
    ended = await run_without_outside(
        [installed / "lm-eval", "run", "--model", kind, "--model_args", model, *options, *chat],
        server=(url.host, url.port),
        environment={
            "HOME": str(folder),
            "PATH": f"{installed}:/usr/bin:/bin",
            "LANG": "C.UTF-8",
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "OPENAI_API_KEY": "none",
        },
        folder=folder,
        seconds=RUN_SECONDS,
    )
    assert ended.status == 0, ended.text[-4000:]
    (file,) = (folder / "results").rglob("results_*.json")
    found: dict[str, float] = json.loads(file.read_text())["results"]["local"]
    return found


async def test_lm_eval_compares_log_likelihoods(launch: Launch, tmp_path: Path) -> None:
    """Each token of a scripted prompt is less likely than the one before, so the shorter choice wins: in the first question it is right."""
    gateway = await launch({"servedName": [MODEL]})
    worker = await gateway.worker(ANSWER)
    found = await scores(gateway, "local-completions", "/v1/completions", CHOICE, tmp_path)
    assert found["acc,none"] == 0.5
    assert len(worker.requests) == 4
    assert all(request.sampling.prompt_logprobs for request in worker.requests)


@pytest.mark.parametrize(
    ("kind", "path"),
    [("local-completions", "/v1/completions"), ("local-chat-completions", "/v1/chat/completions")],
)
async def test_lm_eval_generates_until_a_stop_string(
    kind: str, path: str, launch: Launch, tmp_path: Path
) -> None:
    gateway = await launch({"servedName": [MODEL]})
    await gateway.worker(f"{ANSWER}\n\nQ: another?")
    found = await scores(gateway, kind, path, GENERATION, tmp_path)
    assert next(value for name, value in found.items() if name.startswith("exact_match,")) == 1.0
