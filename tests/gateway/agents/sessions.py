"""Sessions of an agent at a gateway whose pods write a call of a tool in each turn, and then a text."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import httpx

from mmd_cli.samples import draw
from mmd_workers.wire.messages.prefill import GenerateRequest
from support.harness.namespace import Ended, run_without_outside
from support.serving.other_clients import AGENTS as INSTALLED
from tests.gateway.agents.agents import CONTEXT_TOKENS, NOTES, PICTURE, Agent, Call
from tests.gateway.running import Running

WORD = "marzipan"
ANSWER = "The word is marzipan and the color is red."
TITLE = "Reading two files"
RUN_SECONDS = 120.0
CALLED = "\n<tool_call>{"
"""How a call in the history begins in a prompt of the demo model."""


@dataclass
class Session:
    """One agent in a folder with two files."""

    agent: Agent
    gateway: Running
    home: Path
    context_tokens: int = CONTEXT_TOKENS

    @property
    def folder(self) -> Path:
        """The folder that it works in."""
        return self.home / "work"

    def answers(self, request: GenerateRequest) -> list[int]:
        """The output of a turn: the first call that is not in its history yet, or `ANSWER`; for a prompt without tools, `TITLE`."""
        prompt = self.gateway.tokenizer.decode(request.token_ids)
        return self.gateway.ids(self.next_text(prompt) if has_tools(prompt) else TITLE)

    def next_text(self, prompt: str) -> str:
        """What a turn writes."""
        calls = self.agent.calls(self.folder)
        number = prompt.count(CALLED)
        return rendered(calls[number]) if number < len(calls) else ANSWER

    async def run(self, seconds: float = RUN_SECONDS) -> Ended:
        """Write its files and settings, and run it to its end."""
        self.folder.mkdir(parents=True)
        (self.folder / NOTES).write_text(f"The word is {WORD}.\n")
        (self.folder / PICTURE).write_bytes(draw("image", 31).bytes)
        for path, text in self.agent.files(self.context_tokens).items():
            file = self.home / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        installed = INSTALLED.install()
        url = httpx.URL(self.gateway.url)
        assert url.port is not None
        return await run_without_outside(
            self.agent.command(installed, self.folder),
            server=(url.host, url.port),
            environment={
                "HOME": str(self.home),
                "PATH": f"{installed}:/usr/local/bin:/usr/bin:/bin",
                "LANG": "C.UTF-8",
                "TERM": "dumb",
                **self.agent.environment,
            },
            folder=self.folder,
            seconds=seconds,
        )


def rendered(call: Call) -> str:
    """A call as the demo model writes it."""
    name, arguments = call
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def has_tools(prompt: str) -> bool:
    """Whether a prompt offers tools; requests for titles and summaries do not."""
    return prompt.startswith("<|im_start|>system\nTools:")
