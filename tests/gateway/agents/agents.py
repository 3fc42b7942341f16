"""Agents as people install and start them: their settings for a gateway, and the calls that let them read files."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.harness.namespace import PORT

MODEL = "local-model"
URL = f"http://127.0.0.1:{PORT}"
KEY = "sk-agents"
NOTES = "notes.txt"
PICTURE = "dot.png"
TASK = f"Read {NOTES} and {PICTURE}, then name the word and the color."
CONTEXT_TOKENS = 200_000
SETTINGS = "settings.yaml"
Call = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Agent:
    """One client with one of the gateway's APIs.

    `program`: the script below `node_modules` that Node runs; with a `*`, a binary there; with `.py`, a script in
    `packages`. `calls(folder)`: calls of
    its tools that read `NOTES` and `PICTURE` in that folder. `files(context)`: its settings, by the path in its home,
    the parent of that folder.
    """

    name: str
    program: str
    arguments: tuple[str, ...]
    calls: Callable[[Path], list[Call]]
    environment: dict[str, str] = field(default_factory=dict)
    files: Callable[[int], dict[str, str]] = lambda _: {}
    sees_pictures: bool = True
    waits: bool = True  # after a refusal with `retry-after`
    too_long: str = "maximum context length is"  # what it shows of a prompt that is too long

    def command(self, installed: Path, folder: Path) -> list[str]:
        """What starts it on `TASK`."""
        if self.program.endswith(".py"):
            script = Path(__file__).with_name("packages") / self.program
            return [str(installed / "python"), str(script), *self.arguments]
        packages = installed.parent / "node_modules"
        words = {"TASK": TASK, "SETTINGS": str(folder.parent / SETTINGS)}
        arguments = [words.get(argument, argument) for argument in self.arguments]
        if "*" in self.program:
            return [str(min(packages.glob(self.program))), *arguments]
        return [str(installed / "node"), str(packages / self.program), *arguments]


def _read(tool: str, name: str) -> Callable[[Path], list[Call]]:
    """Calls of one tool with an absolute path as its argument `name`."""
    return lambda folder: [(tool, {name: str(folder / file)}) for file in (NOTES, PICTURE)]


def _reads(folder: Path) -> list[Call]:
    return [
        ("read_text", {"path": str(folder / NOTES)}),
        ("read_png", {"path": str(folder / PICTURE)}),
    ]


def _codex(context: int) -> dict[str, str]:
    return {
        ".codex/config.toml": f"""
model = "{MODEL}"
model_provider = "gateway"
model_context_window = {context}
[model_providers.gateway]
name = "gateway"
base_url = "{URL}/v1"
wire_api = "responses"
env_key = "GATEWAY_KEY"
"""
    }


def _opencode(package: str, base: str = f"{URL}/v1") -> Callable[[int], dict[str, str]]:
    def files(context: int) -> dict[str, str]:
        model = {
            "name": MODEL,
            "attachment": True,
            "tool_call": True,
            "modalities": {"input": ["text", "image"], "output": ["text"]},
            "limit": {"context": context, "output": 4096},
        }
        options = {"baseURL": base, "apiKey": KEY}
        provider = {"npm": package, "name": "gateway", "options": options, "models": {MODEL: model}}
        settings = {"provider": {"gateway": provider}, "share": "disabled", "autoupdate": False}
        return {".config/opencode/opencode.json": json.dumps(settings)}

    return files


def _qwen(context: int) -> dict[str, str]:
    generation = {"contextWindowSize": context, "modalities": {"image": True}}
    provider = {
        "id": MODEL,
        "envKey": "OPENAI_API_KEY",
        "baseUrl": f"{URL}/v1",
        "generationConfig": generation,
    }
    settings = {
        "modelProviders": {"openai": [provider]},
        "security": {"auth": {"selectedType": "openai"}},
        "model": {"name": MODEL},
        "general": {"disableAutoUpdate": True},
        "privacy": {"usageStatisticsEnabled": False},
    }
    return {".qwen/settings.json": json.dumps(settings)}


def _continue(provider: str, base: str) -> Callable[[int], dict[str, str]]:
    def files(context: int) -> dict[str, str]:
        model = {
            "name": MODEL,
            "provider": provider,
            "model": MODEL,
            "apiBase": base,
            "apiKey": KEY,
            "roles": ["chat"],
            "capabilities": ["tool_use", "image_input"],
            "defaultCompletionOptions": {"contextLength": context},
        }
        settings = {"name": "gateway", "version": "1.0.0", "schema": "v1", "models": [model]}
        return {SETTINGS: json.dumps(settings)}

    return files


def _cline(_: int) -> dict[str, str]:
    name = "openai-compatible"
    settings = {"provider": name, "apiKey": KEY, "model": MODEL, "baseUrl": f"{URL}/v1"}
    provider = {
        "settings": settings,
        "updatedAt": "2026-01-01T00:00:00.000Z",
        "tokenSource": "manual",
    }
    providers = {"version": 1, "lastUsedProvider": name, "modes": {}, "providers": {name: provider}}
    return {".cline/data/settings/providers.json": json.dumps(providers)}


OPENCODE = {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"}
OPENCODE_RUN = ("run", "--model", f"gateway/{MODEL}", "TASK")
CONTINUE = ("-p", "TASK", "--config", "SETTINGS", "--auto")

AGENTS = (
    Agent(
        "claude-code",
        "@anthropic-ai/claude-code-linux-*/claude",
        ("-p", "TASK"),
        _read("Read", "file_path"),
        {
            "ANTHROPIC_BASE_URL": URL,
            "ANTHROPIC_AUTH_TOKEN": KEY,
            "ANTHROPIC_MODEL": MODEL,
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL,
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(CONTEXT_TOKENS),
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
        too_long="Prompt is too long",
    ),
    Agent(
        "codex",
        "@openai/codex/bin/codex.js",
        ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "TASK"),
        lambda folder: [
            ("exec_command", {"cmd": f"cat {folder / NOTES}"}),
            ("view_image", {"path": str(folder / PICTURE)}),
        ],
        {"GATEWAY_KEY": KEY},
        _codex,
        too_long="ran out of room",
    ),
    *(
        Agent(
            f"opencode-{api}",
            "opencode-linux-*/bin/opencode",
            OPENCODE_RUN,
            _read("read", "filePath"),
            OPENCODE,
            _opencode(package),
        )
        for api, package in (
            ("chat", "@ai-sdk/openai-compatible"),
            ("messages", "@ai-sdk/anthropic"),
            ("responses", "@ai-sdk/openai"),
        )
    ),
    Agent(
        "qwen-code",
        "@qwen-code/qwen-code/cli-entry.js",
        ("--approval-mode", "yolo", "TASK"),
        _read("read_file", "file_path"),
        {"OPENAI_API_KEY": KEY, "OPENAI_BASE_URL": f"{URL}/v1", "OPENAI_MODEL": MODEL},
        _qwen,
    ),
    Agent(
        "cline",
        "cline/bin/cline",
        ("TASK",),
        lambda folder: [
            ("read_files", {"files": [{"path": str(folder / file)}]}) for file in (NOTES, PICTURE)
        ],
        files=_cline,
    ),
    *(
        Agent(
            f"continue-{provider}",
            "@continuedev/cli/dist/cn.js",
            CONTINUE,
            _read("Read", "filepath"),
            {"CONTINUE_TELEMETRY_ENABLED": "0"},
            _continue(provider, base),
            sees_pictures=False,
            waits=provider == "openai",
        )
        for provider, base in (("openai", f"{URL}/v1/"), ("anthropic", f"{URL}/v1/"))
    ),
    *(
        Agent(
            f"openai-agents-{name}",
            "with_openai_agents.py",
            (api, TASK, URL, KEY, MODEL),
            _reads,
            sees_pictures=api == "responses",
        )
        for name, api in (("chat", "chat_completions"), ("responses", "responses"))
    ),
    Agent("langgraph", "with_langgraph.py", (TASK, URL, KEY, MODEL), _reads),
)
