"""docs/api.md and the gateway agree: routes, parameters, content parts, limits, headers, statuses and codes."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.routing import Route

from mmd_api.contract.answers import MAX_GRAMMAR_CHARACTERS
from mmd_api.contract.errors import ERRORS, error_of
from mmd_workers.gateway.api import app, endpoint, tokenize
from mmd_workers.gateway.api.files import files_endpoint, upload_form
from mmd_workers.gateway.api.messages import messages_request
from mmd_workers.gateway.api.responses import responses_request
from mmd_workers.gateway.basics import body
from mmd_workers.gateway.basics.api_errors import api_error
from mmd_workers.gateway.basics.strict import Ignored
from mmd_workers.gateway.content import chat_request, completion_request, conversation, response_format, tools
from mmd_workers.gateway.content.parts import PART_TYPES
from mmd_workers.gateway.idempotency import repeats, retained
from mmd_workers.gateway.intake import checks, logit_rules, tenant_files
from mmd_workers.gateway.output import call_parser
from mmd_workers.gateway.picker import ext_proc
from mmd_workers.gateway.process import admin
from mmd_workers.observe import server
from mmd_workers.wire import stored_files

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "api.md").read_text()
SERVER = Path(server.__file__)
SOURCES = sorted((ROOT / "workers" / "mmd_workers" / "gateway").rglob("*.py"))


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def rows(text: str) -> list[list[str]]:
    """Cells of the rows of every table in the text, heads aside."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    tables = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [cells for at, cells in enumerate(tables) if not is_head(tables, at)]


def is_head(table: list[list[str]], at: int) -> bool:
    def rules(cells: list[str]) -> bool:
        return set("".join(cells)) == {"-"}

    return rules(table[at]) or (at + 1 < len(table) and rules(table[at + 1]))


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def documented_routes(text: str) -> set[tuple[str, str]]:
    found: set[tuple[str, str]] = set()
    for cells in rows(text):
        method = quoted(cells[0])[0].split()[0]
        found |= {(method, name.split()[-1]) for name in quoted(cells[0])}
    return found


def documented_codes() -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for statuses, codes, _ in rows(section("Errors")):
        for code in quoted(codes):
            found.setdefault(code, set()).update(int(status) for status in statuses.split(","))
    return found


def spelled_codes(source: str) -> list[str]:
    """Codes of errors that stand in the source as text: `code="..."`, `{"code": "..."}`, `x.code = "..."`."""
    found: list[ast.expr | None] = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(keywords=keywords):
                found += [word.value for word in keywords if word.arg == "code"]
            case ast.Dict(keys=keys, values=values):
                pairs = zip(keys, values, strict=True)
                found += [
                    value for key, value in pairs if isinstance(key, ast.Constant) and key.value == "code"
                ]
            case ast.Assign(targets=[ast.Attribute(attr="code") | ast.Name(id="code")], value=value):
                found.append(value)
    return [node.value for node in found if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def served(application: Starlette) -> set[tuple[str, str]]:
    return {
        (method, re.sub(r":\w+}", "}", route.path))
        for route in application.routes
        if isinstance(route, Route) and route.path != "/" and not route.path.startswith("/page/")
        for method in (route.methods or {"POST"}) - {"HEAD"}
    }


def test_the_page_lists_the_routes_that_are_served_and_where() -> None:
    for_clients = documented_routes(PAGE.split("\n## ")[0])
    gateway = cast(Any, SimpleNamespace(access=None))
    assert served(app.build_app(gateway)) == for_clients
    besides = documented_routes(section("The admin port"))
    assert served(admin.build_admin_app(gateway, cast(Any, None))) == for_clients | besides


REQUESTS: dict[str, tuple[type[BaseModel], Mapping[str, object]]] = {
    "POST /v1/chat/completions": (chat_request.ChatRequest, chat_request.NOT_SERVED),
    "POST /v1/completions": (completion_request.CompletionRequest, completion_request.NOT_SERVED),
    "POST /v1/messages": (messages_request.MessagesRequest, messages_request.NOT_SERVED),
    "POST /v1/messages/count_tokens": (messages_request.CountTokensRequest, messages_request.NOT_SERVED),
    "POST /v1/responses": (responses_request.ResponsesRequest, responses_request.NOT_SERVED),
    "POST /tokenize": (tokenize.TokenizeRequest, tokenize.TOKENIZE_NOT_SERVED),
    "POST /detokenize": (tokenize.DetokenizeRequest, tokenize.DETOKENIZE_NOT_SERVED),
}


@pytest.mark.parametrize("path", REQUESTS)
def test_the_page_lists_every_request_field_and_its_handling(path: str) -> None:
    model, not_served = REQUESTS[path]
    table = section("Fields").split(f"### `{path}`\n")[1].split("\n### ")[0]
    listed = {quoted(cells[0])[0]: cells[1] for cells in rows(table)}
    handled = {name: field for name, field in listed.items() if "." not in name}
    ignored = {n for n, f in model.model_fields.items() if any(isinstance(m, Ignored) for m in f.metadata)}
    assert {name for name, handling in handled.items() if handling == "ignored"} == ignored
    assert {name for name, handling in handled.items() if handling == "refused"} == not_served.keys()
    served = {name for name, handling in handled.items() if handling == "served"}
    assert served == model.model_fields.keys() - ignored
    assert not model.model_fields.keys() & not_served.keys()


def test_fields_of_a_field_without_effect_have_none() -> None:
    for table in section("Fields").split("\n### ")[1:]:
        handled = [(quoted(cells[0])[0], cells[1]) for cells in rows(table)]
        ignored = {name for name, handling in handled if handling == "ignored"}
        ignored -= {name for name, handling in handled if handling != "ignored"}
        for name, handling in handled:
            parent = name.rpartition(".")[0].removesuffix("[]")
            assert handling == "ignored" or parent not in ignored


def test_every_path_that_takes_a_body_has_its_table_of_fields() -> None:
    paths = {name for method, name in documented_routes(PAGE.split("\n## ")[0]) if method == "POST"}
    assert {path.split()[1] for path in REQUESTS} == paths - {"/v1/files"}
    fields = {name for cells in rows(section("Files")) for name in quoted(cells[0])}
    assert fields == {"file", *upload_form.FIELDS}


def test_the_page_has_the_limits_of_uploads() -> None:
    text = " ".join(section("Files").split())
    assert f"at most {files_endpoint.UPLOAD_BYTES >> 20} MiB of the gateway's memory" in text
    assert f"A deleted file counts for {stored_files.DELETED_SECONDS:.0f} s" in text
    assert f"`limit` ({files_endpoint.MAX_LISTED:,} by default)" in text
    assert tenant_files.UPLOAD_SLACK_SECONDS == 30
    assert quoted(next(cells[1] for cells in rows(section("Files")) if "purpose" in cells[0])) == list(
        upload_form.PURPOSES
    )


def test_the_page_explains_parameters_that_are_taken() -> None:
    table = [cells[0] for cells in rows(section("Parameters").split("| limit |")[0])]
    assert {word for names in table for word in quoted(names)} <= set(chat_request.ChatRequest.model_fields)


def test_the_page_shows_every_type_of_content_part() -> None:
    example = section("Content parts").split("```")[1]
    assert sorted(re.findall(r'"type": "(\w+)"', example)) == sorted(PART_TYPES)


def test_the_page_has_the_limits_of_the_code() -> None:
    limits = {
        "messages": [conversation.MAX_MESSAGES],
        "parts of a message": [conversation.MAX_PARTS],
        "tool calls of a message": [call_parser.MAX_TOOL_CALLS],
        "tools in a prompt, and tools of Anthropic's messages with those that are not in it": [
            tools.MAX_TOOLS,
            messages_request.MAX_LISTED_TOOLS,
        ],
        "`stop` strings, and their characters in all": [
            chat_request.MAX_STOPS,
            chat_request.MAX_STOP_CHARACTERS,
        ],
        "brackets that open, commas and colons in the arguments of all tool calls": [
            conversation.MAX_ARGUMENT_MARKS
        ],
        "prompts of a text completion": [completion_request.MAX_PROMPTS],
        "answers to all prompts of a text completion": [completion_request.MAX_ANSWERS],
        "tokens of all prompts of a text completion, or of one call of `/tokenize`, if the model takes fewer": [
            checks.MAX_TEXT_TOKENS
        ],
        "characters of a text, for each token that fits": [checks.MAX_CHARACTERS_PER_TOKEN],
        "tokens of all `bad_words`": [logit_rules.MAX_BAD_WORD_TOKENS],
        "depth of the JSON body": [body.MAX_DEPTH],
        "strings, brackets, commas and colons in the body": [body.MAX_MARKS],
        "a schema as JSON": [response_format.MAX_SCHEMA_CHARACTERS],
        "a regular expression, all schemas of tools that an answer must match (none with `auto` without `strict`)": [
            MAX_GRAMMAR_CHARACTERS
        ],
        "choices": [
            response_format.MAX_CHOICES,
            response_format.MAX_CHOICE_CHARACTERS,
            response_format.MAX_CHOICES_CHARACTERS,
        ],
    }
    table = rows(section("Parameters").split("| limit |")[1])
    found = {cells[0]: [int(n) for n in re.findall(r"\d+", cells[1])] for cells in table}
    assert {name: numbers for name, numbers in found.items() if numbers} == limits


def test_the_page_has_what_a_gateway_retains() -> None:
    text = section("Requests that are sent again")
    limits = {
        "an answer, after its end": [retained.WINDOW_SECONDS],
        "of one answer, its newest part": [retained.MAX_ANSWER_BYTES >> 20],
        "keys, of one tenant": [retained.MAX_KEYS, retained.MAX_KEYS_OF_TENANT],
        "answers, of one tenant": [1, retained.BUDGET_DIVISOR],
    }
    assert {cells[0]: [int(n) for n in re.findall(r"\d+", cells[1])] for cells in rows(text)} == limits
    assert f"for {retained.ABANDONED_SECONDS:.0f} s" in text
    assert retained.TENANT_DIVISOR == 4


def test_the_page_has_how_fast_a_client_must_read() -> None:
    text = " ".join(section("Errors").split())
    assert (
        f"must read {server.LEAST_READ_BYTES_PER_SECOND >> 10} KiB a second on average over a minute" in text
    )
    assert server.WRITE_SECONDS == 60
    assert f"its size at {server.MIN_READ_BYTES_PER_SECOND >> 10} KiB a second" in text


def test_the_page_lists_the_headers_that_are_read_and_sent() -> None:
    table = {quoted(cells[0])[0]: cells[1] for cells in rows(section("Headers"))}
    sources = "\n".join(path.read_text() for path in SOURCES)
    own = set(re.findall(r'"(x-[a-z-]+)"', sources)) - {"x-accel-buffering", "x-content-type-options"}
    own -= {ext_proc.ENDPOINT_KEY, ext_proc.SUBSET_KEY}  # between the endpoint picker and its proxy
    assert table.keys() == own | {
        "retry-after",
        "traceparent",
        repeats.KEY_HEADER,
        repeats.EVENT_HEADER,
        repeats.REPEATED_HEADER,
    }
    assert str(endpoint.MAX_CLIENT_REQUEST_ID) in table["x-client-request-id"]


def test_the_page_lists_every_status_with_its_codes() -> None:
    answered = [error for error in ERRORS.values() if error.status is not None]
    statuses = {(kind.status, kind.code) for error in answered for kind in (error, *error.__subclasses__())}
    listed = {(status, code) for code, them in documented_codes().items() for status in them}
    assert {pair for pair in statuses if pair[0] is not None} <= listed
    assert documented_codes().keys() == {error.code for error in answered}


@pytest.mark.parametrize("path", [*SOURCES, SERVER], ids=lambda path: path.stem)
def test_no_answer_has_a_code_missing_from_the_table(path: Path) -> None:
    """An ApiError takes its code from a type of the table; this finds answers that are made without one."""
    assert spelled_codes(path.read_text()) == []


def test_a_spelled_code_is_found() -> None:
    for source in ('f(code="x")', '{"error": {"code": "x"}}', 'timeline.code = "x"', 'code = "x"'):
        assert spelled_codes(source) == ["x"]


@pytest.mark.parametrize("code", sorted(documented_codes()))
def test_an_error_that_a_worker_reports_reaches_the_client_as_documented(code: str) -> None:
    answer = api_error(error_of(code, "why"))
    assert answer.code == code
    assert answer.status in documented_codes()[code]
    assert (answer.retry_after is not None) == (answer.status in (429, 503))
    assert answer.body()["error"].get("retry_after_seconds") == answer.retry_after
