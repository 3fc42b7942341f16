"""Grammars that are small to send and expensive to compile cost one short-lived process, and nobody else anything."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import threading
from asyncio.subprocess import Process
from collections.abc import Callable
from pathlib import Path

import pytest

from mmd_api.contract.answers import Grammar
from mmd_api.contract.errors import GrammarFailedError, OverloadedError
from mmd_workers.gateway.basics.api_errors import ApiError
from mmd_workers.gateway.content import response_format
from mmd_workers.gateway.content.response_format import GrammarCheck
from mmd_workers.gateway.output import grammar_trial
from mmd_workers.gateway.output.grammar_trial import MEMORY_BYTES, TooCostlyError, try_out
from mmd_workers.model.frontend import HfFrontend
from mmd_workers.model.grammar import Grammars
from support.harness.waiting import DEADLINE_SECONDS, until
from tests.gateway.running import Launch

IDLE_BYTES = 48 << 20  # of address space, before the grammar is touched; 28 here
PLENTY = 1 << 34
OBJECT = Grammar("json_schema", '{"type":"object"}')
OTHER = Grammar("regex", "[a-f]{3}")
SECRET = "a-private-word"
MODEL = "builtin/demo"


def schema(value: object) -> Grammar:
    return Grammar("json_schema", json.dumps(value))


def doubling(levels: int, pattern: str = "^[ab]+$") -> dict:
    """Each level requires the next one twice."""
    levels_of = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(levels)}
    return {
        "$defs": {**levels_of, f"d{levels}": {"type": "string", "pattern": pattern}},
        "$ref": "#/$defs/d0",
    }


def intersection(patterns: int) -> dict:
    return {"allOf": [{"type": "string", "pattern": f"a{i}"} for i in range(patterns)]}


def nested(levels: int) -> dict:
    levels_of = {
        f"d{i}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(levels)
    }
    return {"$defs": {**levels_of, f"d{levels}": {}}, "$ref": "#/$defs/d0"}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Process]:
    """The processes that compile, from the moment they are started."""
    processes: list[Process] = []
    start = asyncio.create_subprocess_exec

    async def recorded(*program: str, **options: object) -> Process:
        process = await start(*program, **options)
        if grammar_trial.PROGRAM[-1] in program:
            processes.append(process)
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", recorded)
    return processes


@pytest.fixture
def grammars(frontend: HfFrontend) -> Grammars:
    return Grammars(lambda: frontend.tokenizer, frontend.vocab_size, frontend.eos_token_ids)


async def stopped_while_it_compiles(started: list[Process]) -> int:
    """PID of the newest process, which goes on only when it is continued or killed."""
    await until(lambda: started)
    os.kill(started[-1].pid, signal.SIGSTOP)
    return started[-1].pid


def exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def peak_bytes(started: list[Process]) -> int:
    """The most address space that the process has had when it was last seen."""
    await until(lambda: started)
    status, peak = Path(f"/proc/{started[-1].pid}/status"), 0
    while True:
        with contextlib.suppress(OSError):
            for line in status.read_text().splitlines():
                if line.startswith("VmPeak:"):
                    peak = max(peak, int(line.split()[1]) << 10)
        await asyncio.sleep(0.001)
        if started[-1].returncode is not None:
            return peak


@pytest.mark.parametrize("value", [doubling(26), intersection(26)], ids=["doubling", "intersection"])
async def test_a_schema_that_takes_gigabytes_ends_at_the_memory_limit(
    started: list[Process], value: dict
) -> None:
    peak = asyncio.create_task(peak_bytes(started))
    with pytest.raises(TooCostlyError, match="64 MiB of memory"):
        await try_out(schema(value), cpu_seconds=60.0)
    assert MEMORY_BYTES // 2 < await peak < IDLE_BYTES + MEMORY_BYTES


async def test_a_schema_that_takes_long_ends_at_the_cpu_limit() -> None:
    with pytest.raises(TooCostlyError, match=r"0\.2 s of CPU"):
        await try_out(schema(doubling(26)), cpu_seconds=0.2, memory_bytes=PLENTY)


async def test_a_schema_that_overflows_the_stack_does_so_in_its_process() -> None:
    """In the gateway it would end the gateway."""
    with pytest.raises(TooCostlyError, match="levels"):
        await try_out(schema(nested(1500)))
    await try_out(schema(nested(100)))


@pytest.mark.parametrize("value", [
    {"type": "object", "properties": {f"property_{i}": {"type": "string", "maxLength": 99 + i} for i in range(450)}},
    {"type": "object", "properties": {f"p{i}": {"type": "integer", "minimum": i, "maximum": 10**9 + i} for i in range(400)}},
    {"enum": [f"value {i}" for i in range(4000)]},
    {"type": "array", "items": {"type": "object", "properties": {f"p{i}": {"format": "date-time", "type": "string"} for i in range(400)}}},
], ids=["strings", "integers", "enum", "dates"])  # fmt: skip
async def test_the_largest_ordinary_schemas_take_less_than_half_of_what_they_may(value: dict) -> None:
    cost = await try_out(schema(value))
    assert cost.cpu_seconds < grammar_trial.CPU_SECONDS / 2
    assert cost.peak_bytes < MEMORY_BYTES / 2


async def test_the_process_reports_the_words_of_the_library() -> None:
    with pytest.raises(GrammarFailedError, match="Unimplemented keys"):
        await try_out(schema({"not": {}}))


async def test_special_tokens_of_any_model_are_tried_out() -> None:
    source = {"lark": "start: <[151657]> @a", "json_schema": {"a": {"type": "integer"}}, "regex": {}}
    await try_out(Grammar("composite", json.dumps(source)))
    source["json_schema"] = {"a": {"type": "colour"}}
    with pytest.raises(GrammarFailedError, match="colour"):
        await try_out(Grammar("composite", json.dumps(source)))


async def test_a_cancelled_check_leaves_no_process(started: list[Process], grammars: Grammars) -> None:
    check = GrammarCheck(grammars)
    task = asyncio.create_task(check.check(OBJECT, "field"))
    pid = await stopped_while_it_compiles(started)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not exists(pid)
    await check.check(OBJECT, "field")  # its place is free


async def test_a_check_without_cpu_is_killed_but_its_grammar_not_refused(
    started: list[Process], grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = GrammarCheck(grammars)
    with monkeypatch.context() as patched:
        patched.setattr(grammar_trial, "WALL_SECONDS", 0.2)
        task = asyncio.create_task(check.check(OBJECT, "field"))
        pid = await stopped_while_it_compiles(started)
        with pytest.raises(OverloadedError, match="CPU, and retry"):
            await task
    assert not exists(pid)
    await check.check(OBJECT, "field")


async def test_known_grammars_wait_for_no_compilation_and_start_no_process(
    started: list[Process], grammars: Grammars
) -> None:
    check = GrammarCheck(grammars)
    await check.check(OBJECT, "field")
    with pytest.raises(ApiError, match="field: takes too much to compile"):
        await check.check(schema(intersection(26)), "field")
    known = len(started)
    waiting = asyncio.create_task(check.check(OTHER, "field"))
    await until(lambda: len(started) > known)
    pid = await stopped_while_it_compiles(started)
    async with asyncio.timeout(DEADLINE_SECONDS):
        await check.check(OBJECT, "field")
        with pytest.raises(ApiError, match="other: takes too much to compile"):
            await check.check(schema(intersection(26)), "other")
    assert not waiting.done()
    assert len(started) == known + 1
    os.kill(pid, signal.SIGCONT)
    await waiting


async def test_one_grammar_is_compiled_at_a_time_and_once(started: list[Process], grammars: Grammars) -> None:
    check = GrammarCheck(grammars)
    first = asyncio.create_task(check.check(OBJECT, "field"))
    pid = await stopped_while_it_compiles(started)
    others = [asyncio.create_task(check.check(grammar, "field")) for grammar in (OBJECT, OTHER, OTHER)]
    await asyncio.sleep(0.1)
    assert len(started) == 1
    os.kill(pid, signal.SIGCONT)
    await asyncio.gather(first, *others)
    assert len(started) == 2


async def test_a_cancelled_check_keeps_its_place_until_its_thread_has_ended(
    started: list[Process], frontend: HfFrontend
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def load() -> object:
        begun.set()
        assert go_on.wait(DEADLINE_SECONDS)
        return frontend.tokenizer

    check = GrammarCheck(Grammars(load, frontend.vocab_size, frontend.eos_token_ids))
    task = asyncio.create_task(check.check(OBJECT, "field"))
    await until(begun.is_set)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    other = asyncio.create_task(check.check(OTHER, "field"))
    await asyncio.sleep(0.1)
    assert len(started) == 1
    go_on.set()
    await other
    await check.check(OBJECT, "field")  # what was cancelled is compiled
    assert len(started) == 2


async def test_refusals_are_kept_up_to_a_number(
    started: list[Process], grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response_format, "MAX_REFUSED", 2)
    check = GrammarCheck(grammars)
    for name in ("a", "b", "c", "c", "b", "a"):
        with pytest.raises(ApiError):
            await check.check(schema({"not": {}, "title": name}), "field")
    assert len(started) == 4  # the last "a" again


def with_property(value: dict) -> dict:
    """The schema of an object with a property of this schema."""
    return {"type": "object", "properties": {"x": value}, "$defs": value.get("$defs", {})}


HELLO = [{"role": "user", "content": "hi"}]
FORMS: dict[str, tuple[str, str, Callable[[dict], dict]]] = {
    "chat": (
        "/v1/chat/completions",
        "response_format.json_schema.schema",
        lambda value: {"messages": HELLO, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}},
    ),
    "tool of a chat": (
        "/v1/chat/completions",
        "tools",
        lambda value: {"messages": HELLO, "tools": [{"type": "function", "function": {"name": "f", "parameters": with_property(value), "strict": True}}]},
    ),
    "tool of a response": (
        "/v1/responses",
        "tools",
        lambda value: {"input": HELLO, "tools": [{"type": "function", "name": "f", "parameters": with_property(value), "strict": True}]},
    ),
    "tool of a message": (
        "/v1/messages",
        "tools",
        lambda value: {"messages": HELLO, "max_tokens": 8, "tools": [{"name": "f", "input_schema": with_property(value), "strict": True}]},
    ),
    "response": (
        "/v1/responses",
        "text.format.schema",
        lambda value: {"input": HELLO, "text": {"format": {"type": "json_schema", "name": "x", "schema": value}}},
    ),
    "message": (
        "/v1/messages",
        "output_config.format.schema",
        lambda value: {"messages": HELLO, "max_tokens": 8, "output_config": {"format": {"type": "json_schema", "schema": value}}},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("path", "field", "form"), FORMS.values(), ids=FORMS)
async def test_a_hostile_schema_is_refused_and_quoted_only_in_the_answer(
    launch: Launch, caplog: pytest.LogCaptureFixture, path: str, field: str, form: Callable[[dict], dict]
) -> None:
    gateway = await launch()

    async def refused(value: dict) -> str:
        response = await gateway.http.post(path, json={"model": MODEL, **form(value)})
        error = response.json()["error"]
        assert response.status_code == 400
        assert error["message"].startswith(f"{field}: ")
        found = await gateway.admin.get(f"/debug/requests/{response.headers['x-request-id']}")
        assert (found.json()["code"], found.json()["error"]) == ("invalid_value", field)
        message: str = error["message"]
        return message

    assert SECRET in await refused({"type": "string", SECRET: 1, "pattern": f"{SECRET}("})
    assert "takes too much to compile" in await refused(doubling(26, f"^{SECRET}+$"))
    listed = await gateway.admin.get("/debug/requests")
    assert SECRET not in listed.text + caplog.text
