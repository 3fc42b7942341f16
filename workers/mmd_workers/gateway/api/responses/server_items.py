"""Items of the input of /v1/responses about tools that this server does not run: what they did on another server, or in another client.

Their fields differ between servers and versions, so those that are not read here are dropped.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from mmd_workers.gateway.content.conversation import MAX_PARTS, CallName, JsonArguments, content_kind

_ENTRIES = Field(max_length=MAX_PARTS, fail_fast=True)


class _Item(BaseModel):
    """An item, of whose fields only those are kept that are read."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)


class OmittedItem(_Item):
    """An item that shows no result, or one that is no text. It is left out."""

    type: Literal[
        "image_generation_call",
        "mcp_approval_request",
        "mcp_approval_response",
        "mcp_list_tools",
        "web_search_call",
    ]


OMITTED_TYPES: tuple[str, ...] = get_args(OmittedItem.model_fields["type"].annotation)


class ServerToolCall(_Item):
    """A call of a server's tool, with its result.

    In the prompt, `call_name` is the name of the tool, and `call_arguments` are JSON. `result`: None if the item does not show it.
    """

    id: CallName

    @property
    def call_name(self) -> str:
        """The name of the tool."""
        raise NotImplementedError

    @property
    def call_arguments(self) -> str:
        """The arguments, as JSON."""
        raise NotImplementedError

    @property
    def result(self) -> str | None:
        """What the model has read."""
        raise NotImplementedError


class FoundText(_Item):
    """A passage of a file."""

    filename: str | None = None
    text: str | None = None


class FileSearchCall(ServerToolCall):
    """A search in files of another server."""

    type: Literal["file_search_call"]
    queries: Annotated[list[str], _ENTRIES]
    results: Annotated[list[FoundText], _ENTRIES] | None = None

    @property
    def call_name(self) -> str:
        """The name of the tool."""
        return "file_search"

    @property
    def call_arguments(self) -> str:
        """The arguments, as JSON."""
        return json.dumps({"queries": self.queries})

    @property
    def result(self) -> str | None:
        """The passages; None if the item has only the queries."""
        if self.results is None:
            return None
        return "\n\n".join("\n".join(filter(None, (one.filename, one.text))) for one in self.results)


class InterpreterOutput(_Item):
    """What code has printed; an image is left out."""

    logs: str | None = None


class CodeInterpreterCall(ServerToolCall):
    """Code that another server has run."""

    type: Literal["code_interpreter_call"]
    code: str | None = None
    outputs: Annotated[list[InterpreterOutput], _ENTRIES] | None = None

    @property
    def call_name(self) -> str:
        """The name of the tool."""
        return "code_interpreter"

    @property
    def call_arguments(self) -> str:
        """The arguments, as JSON."""
        return json.dumps({"code": self.code or ""})

    @property
    def result(self) -> str | None:
        """What the code has printed."""
        return "\n".join(output.logs for output in self.outputs or () if output.logs)


class McpCall(ServerToolCall):
    """A call of a tool of an MCP server."""

    type: Literal["mcp_call"]
    name: CallName
    server_label: CallName
    arguments: str
    output: str | None = None
    error: Any = None

    @property
    def call_name(self) -> str:
        """The name of the tool, after that of its server."""
        return f"{self.server_label}.{self.name}"

    @property
    def call_arguments(self) -> str:
        """The arguments, as JSON."""
        return self.arguments

    @property
    def result(self) -> str | None:
        """The output, or else the error."""
        if self.output is not None or self.error is None:
            return self.output or ""
        return self.error if isinstance(self.error, str) else json.dumps(self.error)


class ClientCall(_Item):
    """A call that a client has run, and whose result is another item. `id`: of the item, by which some results name it."""

    type: Literal["local_shell_call", "shell_call", "apply_patch_call"]
    id: CallName | None = None
    call_id: CallName
    action: JsonArguments | None = None
    operation: JsonArguments | None = None

    @model_validator(mode="after")
    def _has_arguments(self) -> ClientCall:
        field = "operation" if self.type == "apply_patch_call" else "action"
        if getattr(self, field) is None:
            raise PydanticCustomError("no_arguments", f"{self.type} requires {field}")
        return self

    @property
    def call_name(self) -> str:
        """The name of the tool."""
        return self.type.removesuffix("_call")

    @property
    def call_arguments(self) -> str:
        """The arguments, as JSON."""
        return str(self.operation if self.type == "apply_patch_call" else self.action)


class ShellOutcome(_Item):
    """How a command has ended."""

    type: str | None = None
    exit_code: int | None = None


class ShellStreams(_Item):
    """What a command has printed."""

    stdout: str | None = None
    stderr: str | None = None
    outcome: ShellOutcome | None = None

    @property
    def texts(self) -> tuple[str | None, ...]:
        """What the model reads: a command that fails or runs out of time may print nothing."""
        end = self.outcome or ShellOutcome()
        failed = (
            f"exit code {end.exit_code}" if end.exit_code else "timeout" if end.type == "timeout" else None
        )
        return self.stdout, self.stderr, failed


class ClientCallOutput(_Item):
    """The result of a client's call. `id`: of the call or its item if there is no `call_id`."""

    type: Literal["local_shell_call_output", "shell_call_output", "apply_patch_call_output"]
    id: CallName | None = None
    call_id: CallName | None = None
    status: str | None = None
    output: (
        Annotated[
            Annotated[str, Tag("text")] | Annotated[list[ShellStreams], _ENTRIES, Tag("parts")],
            Discriminator(
                content_kind,
                custom_error_type="output_type",
                custom_error_message="output must be a string or a list",
            ),
        ]
        | None
    ) = None

    @property
    def text(self) -> str:
        """What the model reads."""
        if self.output is None or isinstance(self.output, str):
            return self.output or ("failed" if self.status == "failed" else "")
        texts = (text for streams in self.output for text in streams.texts)
        return "\n".join(filter(None, texts))

    @model_validator(mode="after")
    def _names_a_call(self) -> ClientCallOutput:
        if self.call_id is None and self.id is None:
            raise PydanticCustomError("no_call", "call_id is missing")
        return self
