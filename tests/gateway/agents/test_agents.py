"""Coding agents as people install them, without a network, at a real gateway: what they read reaches the prompt, and faults end as they should."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import pytest

from support.harness import namespace
from support.oracles.tokens import with_context
from tests.gateway.agents.agents import AGENTS, CONTEXT_TOKENS, MODEL, Agent
from tests.gateway.agents.sessions import ANSWER, WORD, Session, has_tools
from tests.gateway.running import Launch

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(namespace.missing()), reason=namespace.missing()),
]

DEMO = Path(str(resources.files("mmd_workers.model") / "demo"))
VOCABULARY_TOKENS = 6_016
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
