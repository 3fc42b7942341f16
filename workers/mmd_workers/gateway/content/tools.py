"""Tools that the model may call: OpenAI's `tools` and `tool_choice`. Independent of the network.

Converts them to the form of chat templates, and to the grammar of calls whose arguments must match the tools' schemas.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from mmd_api.contract.answers import MAX_GRAMMAR_CHARACTERS, Grammar
from mmd_api.contract.errors import InvalidValueError
from mmd_workers.gateway.basics.api_errors import ApiError
from mmd_workers.gateway.basics.strict import Strict
from mmd_workers.gateway.content.element_arguments import ElementGrammar, argument_types, quoted
from mmd_workers.gateway.content.response_format import OBJECT, as_json, exact_integers
from mmd_workers.gateway.output.call_parser import MAX_TOOL_CALLS, CallParser
from mmd_workers.model.call_forms import Spelling
from mmd_workers.model.grammar import LENIENT, SCHEMA_OPTIONS

MAX_TOOLS = 128  # OpenAI's limit
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}

FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,128}$")]


def _parameters(schema: dict[str, Any]) -> str:
    """Check that a schema describes an object, and return it as JSON."""
    if schema.get("type", "object") != "object":
        raise PydanticCustomError(
            "not_an_object", "the schema's type must be 'object'; make what it describes a property"
        )
    return as_json({**schema, "type": "object"} if schema else NO_PARAMETERS)


Parameters = Annotated[dict[str, Any], AfterValidator(_parameters)]


class ServerTool(BaseModel):
    """What runs on another server. This server runs no tools, so it is left out where the model need not call it."""

    model_config = ConfigDict(extra="ignore")

    type: str
    name: str | None = None


class FunctionTool(Strict):
    """A function. `strict`: its calls match the schema of its parameters, all of whose keywords can be enforced."""

    name: FunctionName
    description: str | None = None
    parameters: Parameters | None = None
    strict: bool | None = None


class Tool(Strict):
    """What the model may call."""

    type: Literal["function"]
    function: FunctionTool


class NamedFunction(Strict):
    """The name of one of the tools."""

    name: FunctionName


class NamedTool(Strict):
    """One of the tools."""

    type: Literal["function"]
    function: NamedFunction


NamedTools = Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


class AllowedTools(Strict):
    """Some of the tools, of which one may or must be called."""

    mode: Literal["auto", "required"]
    tools: NamedTools


class AllowedToolChoice(Strict):
    """A choice among some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def choice_kind(value: object) -> str | None:
    """The branch of a choice that a value belongs to."""
    if isinstance(value, str):
        return "word"
    if not isinstance(value, dict):
        return None
    return "allowed" if value.get("type") == "allowed_tools" else "named"


BY_CHOICE_KIND = Discriminator(
    choice_kind,
    custom_error_type="tool_choice_type",
    custom_error_message="tool_choice must be none, auto, required or an object",
)
Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]
ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("word")]
    | Annotated[NamedTool, Tag("named")]
    | Annotated[AllowedToolChoice, Tag("allowed")],
    BY_CHOICE_KIND,
]
CHOICE_TAGS = frozenset({"word", "named", "allowed"})


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request, and those the answer may call. `forced`: it consists of calls. `parallel`: it may have several."""

    tools: tuple[FunctionTool, ...]
    allowed: frozenset[str]
    forced: bool
    parallel: bool

    @property
    def for_template(self) -> list[dict[str, Any]]:
        """All tools, in the form of Hugging Face's chat templates."""
        rendered: list[dict[str, Any]] = []
        for tool in self.tools:
            function: dict[str, Any] = {"name": tool.name}
            if tool.description is not None:
                function["description"] = tool.description
            function["parameters"] = json.loads(_source(tool))
            rendered.append({"type": "function", "function": function})
        return rendered

    @property
    def characters(self) -> int:
        """Lower bound of the characters of all tools in the prompt."""
        return sum(len(tool.description or "") + len(_source(tool)) for tool in self.tools)

    @property
    def marks(self) -> int:
        """Opening brackets, commas and colons in all schemas: at least one for each value and key."""
        return sum(1 + sum(map(_source(tool).count, "[{,:")) for tool in self.tools)

    @property
    def field(self) -> str | None:
        """The field that makes the answer match a grammar; None if the answer is free."""
        if self.forced or len(self.allowed) < len(self.tools):
            return "tool_choice"
        if any(tool.strict for tool in self.tools):
            return "tools"
        return None if self.parallel else "parallel_tool_calls"

    def parsers(self, spelling: Spelling) -> Callable[[], CallParser]:
        """A factory of parsers for the calls of one answer. It does not keep the tools themselves."""
        types = {}
        if spelling.element is not None:
            tools = [tool for tool in self.tools if tool.name in self.allowed]
            types = {tool.name: argument_types(json.loads(_source(tool))) for tool in tools}
        most = MAX_TOOL_CALLS if self.parallel else 1
        return partial(CallParser, spelling, self.allowed, most=most, types=types)

    def grammar(self, spelling: Spelling, answer: Grammar | None) -> Grammar | None:
        """The grammar of the answer: calls or, unless they are forced, `answer` or any text before calls. None if the answer is free.

        Raises:
            ApiError: the schemas are too long, or have a number that the library would change.
        """
        if self.field is None and answer is None:
            return None
        schemas: dict[str, Any] = {}
        called: list[str] = []
        elements = ElementGrammar(spelling) if spelling.element is not None else None
        for number, tool in enumerate(self.tools):
            if tool.name not in self.allowed:
                continue
            source = _source(tool) if self.forced or tool.strict else OBJECT
            param = f"tools[{number}].function.parameters"
            try:
                exact_integers(source)
            except PydanticCustomError as error:
                raise ApiError(InvalidValueError(f"{param}: {error.message()}"), param=param) from error
            schema, begin = _closed(json.loads(source)), quoted(tool.name + spelling.middle, spelling)
            if elements is not None:
                arguments = elements.arguments(f"tool{number}", schema, param, strict=bool(tool.strict))
                called.append(f"{begin} {arguments}")
            else:
                options = {} if tool.strict else {SCHEMA_OPTIONS: LENIENT}
                schemas[f"tool{number}"] = {**schema, **options}
                called.append(f"{begin} @tool{number}")
        schemas |= elements.schemas if elements is not None else {}
        composite: dict[str, Any] = {"lark": "", "json_schema": schemas, "regex": {}}
        if answer is not None and not self.forced:
            composite[answer.type]["answer"] = (
                answer.source if answer.type == "regex" else json.loads(answer.source)
            )
        rules = _rules(self, spelling, called, has_answer=answer is not None)
        composite["lark"] = "\n".join([rules, *(elements.rules if elements is not None else ()), ""])
        source = json.dumps(composite, separators=(",", ":"))
        if len(source) > MAX_GRAMMAR_CHARACTERS:
            too_long = InvalidValueError(
                f"tools: the schemas that the answer must match have more than {MAX_GRAMMAR_CHARACTERS} characters together; "
                "send fewer or shorter tools, or set tool_choice to 'auto' without strict, which has no such limit"
            )
            raise ApiError(too_long, param="tools")
        return Grammar("composite", source)


def tool_use(
    tools: Sequence[Tool] | None, choice: Any | None, parallel_tool_calls: bool | None
) -> ToolUse | None:
    """Combine a request's fields about tools; None if nothing can be called.

    Raises:
        ApiError: the fields contradict each other; names the field.
    """
    names = [tool.function.name for tool in tools or ()]
    for number, name in enumerate(names):
        if name in names[:number]:
            param = f"tools[{number}].function.name"
            raise ApiError(InvalidValueError(f"{param}: another tool has the name {name!r}"), param=param)
    chosen: list[tuple[str, str]] = []
    if isinstance(choice, NamedTool):
        chosen = [("tool_choice.function.name", choice.function.name)]
    elif isinstance(choice, AllowedToolChoice):
        chosen = [
            (f"tool_choice.allowed_tools.tools[{number}].function.name", tool.function.name)
            for number, tool in enumerate(choice.allowed_tools.tools)
        ]
    for param, name in chosen:
        if name not in names:
            unknown = InvalidValueError(f"{param}: no tool has the name {name!r}; add it to tools")
            raise ApiError(unknown, param=param)
    mode = choice.allowed_tools.mode if isinstance(choice, AllowedToolChoice) else choice
    if mode == "required" and not names:
        raise ApiError(InvalidValueError("tool_choice: required needs tools; send some"), param="tool_choice")
    if not names or mode == "none":
        return None
    return ToolUse(
        tools=tuple(tool.function for tool in tools or ()),
        allowed=frozenset(name for _, name in chosen) or frozenset(names),
        forced=mode == "required" or isinstance(choice, NamedTool),
        parallel=parallel_tool_calls is not False and not isinstance(choice, NamedTool),
    )


def _source(tool: FunctionTool) -> str:
    parameters: Any = tool.parameters  # JSON text after validation
    return json.dumps(NO_PARAMETERS) if parameters is None else str(parameters)


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema without arguments that it does not name, unless it has rules for these."""
    open_ended = {"additionalProperties", "patternProperties", "$ref", "allOf", "anyOf", "oneOf"}
    if "properties" not in schema or not open_ended.isdisjoint(schema):
        return schema
    return {**schema, "additionalProperties": False}


def _rules(use: ToolUse, spelling: Spelling, called: Sequence[str], *, has_answer: bool) -> str:
    """The grammar's rules in the library's language. `called`: the tool calls as the model writes them.

    Text continues until a call begins. A marker that is a token does not belong to the text. Any other marker ends the text once complete.
    """
    form = spelling.form
    begin, opened = quoted(spelling.begin, spelling), quoted(spelling.open, spelling)
    close, end = quoted(spelling.close, spelling), quoted(spelling.end, spelling)
    repeats = ""
    if use.parallel and form.separator is not None:
        separator = quoted(form.separator, spelling)
        repeats = f"({separator} {opened} called {close}){{0,{MAX_TOOL_CALLS - 1}}}"
    rest = f"called {close} {repeats} {end}"
    rules = [f"called: {' | '.join(called)}", f"calls: {begin} {opened} {rest}"]
    if use.forced:
        starts = ["calls"]
    elif has_answer:
        starts = ["@answer", "calls"]
    elif not form.marker:
        starts = ["TEXT?", "calls"]
        rules.append(r"TEXT: /[^{\s](?s:.*)/")
    elif form.marker in spelling.tokens:
        starts = ["TEXT", " ".join(["TEXT", "calls"])]
        marker = re.escape(form.marker)
        rules.append(f"TEXT: /(?s:.*)/ & ~/(?s:.*){marker}(?s:.*)/")
    else:
        first = quoted((spelling.begin + spelling.open).removeprefix(form.marker), spelling)
        starts = ["TEXT", f"marked {first} {rest}"]
        rules += [f"marked[suffix={json.dumps(form.marker)}]: TEXT", "TEXT: /(?s:.*)/"]
    return "\n".join([f"start: {' | '.join(starts)}", *rules])
