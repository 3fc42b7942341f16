"""Coding agents as people install them, without a network, at a real gateway: what they read reaches the prompt, and faults end as they should."""

from __future__ import annotations

import asyncio
from importlib import resources
from pathlib import Path

import pytest

from mmd_api.contract.errors import StepFailedError
from mmd_workers.wire.messages.prefill import GenerateRequest
from support.harness import namespace
from support.oracles.tokens import with_context
from tests.gateway.agents.agents import AGENTS, CONTEXT_TOKENS, KEY, MODEL, Agent
from tests.gateway.agents.sessions import ANSWER, WORD, Session, has_tools
from tests.gateway.running import HASTY_MILLISECONDS, Launch
from tests.gateway.scripted import ScriptedWorker, answer_well
from tests.gateway.tenancy import AUTH, tenant, write

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(namespace.missing()), reason=namespace.missing()),
]

DEMO = Path(str(resources.files("mmd_workers.model") / "demo"))
VOCABULARY_TOKENS = 6_016
SHORT_TOKENS = 128
"""A context in which the first prompt of no agent fits."""
FAULT = "a step failed on purpose"
by_agent = pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.name)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with room for what agents send."""
    return with_context(DEMO, tmp_path_factory.mktemp("model") / "demo", CONTEXT_TOKENS, VOCABULARY_TOKENS)


@by_agent
async def test_an_agent_reads_a_file_and_a_picture_and_answers(
    agent: Agent, launch: Launch, model: Path, tmp_path: Path
) -> None:
    gateway = await launch({"id": str(model), "servedName": [MODEL]})
    session = Session(agent, gateway, tmp_path / "home")
    worker = await gateway.worker("", answers=session.answers)
    ended = await session.run()
    assert ANSWER in ended.stdout, ended.text[-4000:]
    assert ended.status == 0
    prompts = [gateway.tokenizer.decode(request.token_ids) for request in worker.requests]
    turns = [
        (request, text) for request, text in zip(worker.requests, prompts, strict=True) if has_tools(text)
    ]
    last, prompt = turns[-1]
    assert WORD in prompt
    assert len(last.features) == agent.sees_pictures


@by_agent
async def test_an_agent_reports_that_its_prompt_is_too_long(
    agent: Agent, launch: Launch, model: Path, tmp_path: Path
) -> None:
    gateway = await launch({"id": str(model), "servedName": [MODEL], "maxModelLen": SHORT_TOKENS})
    session = Session(agent, gateway, tmp_path / "home")
    await gateway.worker("", answers=session.answers)
    ended = await session.run()
    assert ANSWER not in ended.text
    assert agent.too_long in ended.text, ended.text[-4000:]


@by_agent
async def test_an_agent_waits_after_a_refusal_and_goes_on(
    agent: Agent, launch: Launch, model: Path, tmp_path: Path
) -> None:
    keys = tmp_path / "keys.yaml"
    write(keys, tenant("agents", KEY, limits={"concurrentRequests": 1}))
    gateway = await launch({"id": str(model), "servedName": [MODEL]}, keys_file=str(keys), auth=AUTH)
    session = Session(agent, gateway, tmp_path / "home")
    go = asyncio.Event()

    async def answer_after_go(worker: ScriptedWorker, request: GenerateRequest) -> None:
        if "hold" in gateway.tokenizer.decode(request.token_ids[-20:]):
            await go.wait()
        await answer_well(worker, request)

    worker = await gateway.worker("", answer_after_go, answers=session.answers)
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hold"}]}
    holding = asyncio.create_task(
        gateway.http.post("/v1/chat/completions", json=body, headers={"authorization": f"Bearer {KEY}"})
    )
    await worker.until(lambda: bool(worker.requests))
    running = asyncio.create_task(session.run())
    await gateway.until_metric("mmd_requests_total", lambda refused: refused >= 1)
    go.set()
    assert (await holding).status_code == 200
    ended = await running
    wanted = ANSWER if agent.waits else "concurrentRequests is 1; retry in 1 s"
    assert wanted in ended.text, ended.text[-4000:]
    assert (ended.status == 0) == agent.waits


@by_agent
async def test_an_agent_does_not_notice_that_a_pod_dies_in_a_stream(
    agent: Agent, launch: Launch, model: Path, tmp_path: Path
) -> None:
    gateway = await launch(
        {"id": str(model), "servedName": [MODEL]}, heartbeat_timeout_milliseconds=HASTY_MILLISECONDS
    )
    session = Session(agent, gateway, tmp_path / "home")
    died: list[ScriptedWorker] = []

    async def die_in_the_answer(worker: ScriptedWorker, request: GenerateRequest) -> None:
        answer = worker.answer_to(request)
        if died or answer != gateway.ids(ANSWER):
            await answer_well(worker, request)
            return
        died.append(worker)
        await worker.tokens(request, list(range(len(answer) // 2)))
        await worker.die()

    workers = [await gateway.worker("", die_in_the_answer, answers=session.answers) for _ in range(2)]
    ended = await session.run()
    assert ANSWER in ended.stdout, ended.text[-4000:]
    assert ended.status == 0
    assert len(died) == 1
    (other,) = (worker for worker in workers if worker is not died[0])
    assert [r.attempt for r in other.requests if r.output_token_ids] == [1]


@by_agent
async def test_an_agent_does_not_take_a_failed_stream_for_an_answer(
    agent: Agent, launch: Launch, model: Path, tmp_path: Path
) -> None:
    gateway = await launch({"id": str(model), "servedName": [MODEL]})
    session = Session(agent, gateway, tmp_path / "home")
    failed: list[GenerateRequest] = []

    async def fail_once_in_the_answer(worker: ScriptedWorker, request: GenerateRequest) -> None:
        answer = worker.answer_to(request)
        if failed or answer != gateway.ids(ANSWER):
            await answer_well(worker, request)
            return
        failed.append(request)
        await worker.tokens(request, list(range(len(answer) // 2)))
        await worker.fail(request, StepFailedError.code, FAULT, retryable=False)

    await gateway.worker("", fail_once_in_the_answer, answers=session.answers)
    ended = await session.run()
    assert failed
    assert ANSWER in ended.stdout or FAULT in ended.text, ended.text[-4000:]
