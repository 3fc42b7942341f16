"""Answers and errors of /v1/responses, in the shape of OpenAI's Responses API. Independent of HTTP and workers."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from typing import Any

from mmd_workers.gateway.answers.answer_part import Piece
from mmd_workers.gateway.answers.block_shape import OneAnswer, WholeAnswer, named_event
from mmd_workers.gateway.answers.usage import Usage
from mmd_workers.gateway.api.responses.custom_tools import CustomTool, InputReader, input_of
from mmd_workers.gateway.api.responses.responses_items import divided_name
from mmd_workers.gateway.api.responses.responses_request import (
    AllowedFunctions,
    ClientFunction,
    FunctionGroup,
    NamedFunctionChoice,
    Repeated,
    TextFormat,
)
from mmd_workers.gateway.basics.api_errors import ApiError, ErrorShape
from mmd_workers.gateway.output.reasoning_parser import ReasoningPart

_ID_KINDS = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}
_CALLS = ("function_call", "custom_tool_call")


class ResponsesShape(OneAnswer):
    """Writes the response to one request and tracks the progress of its stream. `response_id`: the id in its head."""

    keeps_text = True
    waiting = ": waiting\n\n"

    def __init__(self, response_id: str, given: Repeated) -> None:
        super().__init__()
        self._given = given
        self._custom_tools = given.custom_tools
        self._input = InputReader()  # reads the last call, if a custom tool is called
        self._id_suffix = response_id.rpartition("_")[2]
        self._head: dict[str, Any] = {}
        self._next_number = 0

    def opening(self, head: dict[str, Any], _usage: Usage) -> Iterable[str]:
        """The events with the response, still without output."""
        self._head = head
        yield self._event("response.created", response=self._response("in_progress", []))
        yield self._event("response.in_progress", response=self._response("in_progress", []))

    def _piece(self, piece: Piece) -> Iterator[str]:
        is_open = bool(self._streamed.blocks)
        if self._streamed.take(piece):
            number = len(self._streamed.blocks) - 1
            if is_open:
                yield from self._end_of_item(number - 1, "completed")
            yield from self._begin_of_item(number)
        number = len(self._streamed.blocks) - 1
        if isinstance(piece, str):
            delta = {"delta": piece, "logprobs": []}
            yield self._event("response.output_text.delta", **self._part_place(number), **delta)
        elif isinstance(piece, ReasoningPart):
            yield self._event("response.reasoning_text.delta", **self._part_place(number), delta=piece.text)
        elif self._kind(number) == "custom_tool_call":
            yield from self._input_delta(number, self._input.push(piece.arguments))
        elif piece.arguments:
            place = self._place(number)
            yield self._event("response.function_call_arguments.delta", **place, delta=piece.arguments)

    def _input_delta(self, number: int, text: str) -> Iterator[str]:
        """The event for more of the input of a custom tool; none if there is no text."""
        if text:
            place = self._place(number)
            yield self._event("response.custom_tool_call_input.delta", **place, delta=text)

    def _begin_of_item(self, number: int) -> Iterator[str]:
        item = self._item(number, "in_progress", empty=True)
        yield self._event("response.output_item.added", output_index=number, item=item)
        if item["type"] == "custom_tool_call":
            self._input = InputReader()
        if item["type"] not in _CALLS:
            part = _part("", item["type"])
            yield self._event("response.content_part.added", **self._part_place(number), part=part)

    def _end_of_item(self, number: int, status: str) -> Iterator[str]:
        text = self._streamed.shown[number].text
        item = self._item(number, status)
        if item["type"] not in _CALLS:
            place = self._part_place(number)
            if item["type"] == "message":
                yield self._event("response.output_text.done", **place, text=text, logprobs=[])
            else:
                yield self._event("response.reasoning_text.done", **place, text=text)
            yield self._event("response.content_part.done", **place, part=_part(text, item["type"]))
        elif item["type"] == "custom_tool_call":
            yield from self._input_delta(number, self._input.flush())
            fields = {**self._place(number), "input": item["input"]}
            yield self._event("response.custom_tool_call_input.done", **fields)
        else:
            fields = {**self._place(number), "name": item["name"], "arguments": text}
            yield self._event("response.function_call_arguments.done", **fields)
        yield self._event("response.output_item.done", output_index=number, item=item)

    def ending(self, _head: dict[str, Any], usage: Usage, timings: dict[str, float] | None) -> Iterable[str]:
        """The events that end the last item and the response, each with its text."""
        last, status = len(self._streamed.shown) - 1, _status(self._streamed)
        if not self._streamed.blocks:
            yield from self._begin_of_item(last)
        yield from self._end_of_item(last, status)
        output = self._output(self._streamed, status)
        response = self._response(status, output, usage=usage, timings=timings)
        yield self._event(f"response.{status}", response=response)

    def failure(self, error: ApiError) -> str:
        """The last event of a stream that fails: the failed response, with its output so far."""
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        fault = {**_fault(error, code), "type": error.code}
        output = self._output(self._streamed, "incomplete")
        return self._event("response.failed", response=self._response("failed", output, error=fault))

    def _whole(
        self, head: dict[str, Any], whole: WholeAnswer, usage: Usage, timings: dict[str, float] | None
    ) -> dict[str, Any]:
        self._head = head
        status = _status(whole)
        return self._response(status, self._output(whole, status), usage=usage, timings=timings)

    def _event(self, kind: str, **fields: Any) -> str:
        number, self._next_number = self._next_number, self._next_number + 1
        return named_event({"type": kind, "sequence_number": number, **fields})

    def _place(self, number: int) -> dict[str, Any]:
        return {"item_id": self._item_id(number), "output_index": number}

    def _part_place(self, number: int) -> dict[str, Any]:
        return {**self._place(number), "content_index": 0}

    def _kind(self, number: int) -> str:
        """The type of an item."""
        block = self._streamed.shown[number]
        if block.call_id is not None:
            return "custom_tool_call" if block.name in self._custom_tools else "function_call"
        return "reasoning" if block.kind == "reasoning" else "message"

    def _item_id(self, number: int) -> str:
        kind = _ID_KINDS[self._kind(number)]
        return f"{kind}_{self._id_suffix}{f'_{number}' if number else ''}"

    def _output(self, whole: WholeAnswer, status: str) -> list[dict[str, Any]]:
        """All items; only the last one may be incomplete."""
        self._streamed = whole
        last = len(whole.shown) - 1
        return [self._item(n, status if n == last else "completed") for n in range(last + 1)]

    def _item(self, number: int, status: str, *, empty: bool = False) -> dict[str, Any]:
        block, kind = self._streamed.shown[number], self._kind(number)
        text = "" if empty else block.text
        if block.call_id is not None:
            group, name = divided_name(block.name or "")
            is_custom = kind == "custom_tool_call"
            call = {
                "type": kind,
                "id": self._item_id(number),
                "call_id": block.call_id,
                "name": name,
                **({"input": input_of(text)} if is_custom else {"arguments": text}),
                "status": status,
            }
            return call if group is None else {**call, "namespace": group}
        content = [] if empty else [_part(text, kind)]
        item = {"type": kind, "id": self._item_id(number), "status": status, "content": content}
        return {**item, "summary": []} if kind == "reasoning" else {**item, "role": "assistant"}

    def _response(
        self,
        status: str,
        output: list[dict[str, Any]],
        *,
        usage: Usage | None = None,
        timings: dict[str, float] | None = None,
        error: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        given, head = self._given, self._head
        response = {
            "id": head["id"],
            "object": "response",
            "created_at": head["created"],
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": head["model"],
            "output": output,
            "usage": None if usage is None else _usage(usage),
            "instructions": given.instructions,
            "max_output_tokens": given.max_output_tokens,
            "temperature": given.temperature,
            "top_p": given.top_p,
            "text": {"format": _form(given.form)},
            "metadata": given.metadata,
            "background": False,
            "parallel_tool_calls": given.parallel_tool_calls,
            "previous_response_id": None,
            "service_tier": "default",
            "store": False,
            "tool_choice": _given_choice(given.tool_choice),
            "tools": list(map(_given_tool, given.tools)),
            "top_logprobs": 0,
            "truncation": "disabled",
        }
        return response if timings is None else {**response, "timings": timings}


class ResponsesErrors(ErrorShape):
    """Errors of a request without a response of its own, because it repeats another request or resumes its stream."""

    def events(self, error: ApiError, _request_id: str, number: int) -> Iterable[str]:
        """The event for an error."""
        return (named_event({"type": "error", "sequence_number": number, **_fault(error, error.code)}),)


class ResponseFailure(ErrorShape):
    """Errors of a request whose stream may have begun."""

    def __init__(self, shape: ResponsesShape) -> None:
        self._shape = shape

    def events(self, error: ApiError, _request_id: str, _number: int) -> Iterable[str]:
        """The failed response."""
        return (self._shape.failure(error),)


def _fault(error: ApiError, code: str) -> dict[str, Any]:
    fault: dict[str, Any] = {"code": code, "message": error.message, "param": error.param}
    if error.retry_after is not None:
        fault["retry_after_seconds"] = error.retry_after
    return fault


def _status(whole: WholeAnswer) -> str:
    return "incomplete" if whole.finish_reason == "length" else "completed"


def _given_tool(tool: ClientFunction | CustomTool | FunctionGroup) -> dict[str, Any]:
    if isinstance(tool, CustomTool):
        form = {"type": "text"} if tool.format is None else tool.format.model_dump()
        return {"type": tool.type, "name": tool.name, "description": tool.description, "format": form}
    if isinstance(tool, FunctionGroup):
        return {
            "type": tool.type,
            "name": tool.name,
            "description": tool.description,
            "tools": list(map(_given_tool, tool.tools)),
        }
    parameters: Any = tool.parameters  # JSON since it was validated
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": None if parameters is None else json.loads(parameters),
        "strict": tool.strict,
    }


def _given_choice(choice: str | NamedFunctionChoice | AllowedFunctions) -> str | dict[str, Any]:
    return choice if isinstance(choice, str) else choice.model_dump(exclude_none=True)


def _part(text: str, item_type: str) -> dict[str, Any]:
    if item_type == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(usage: Usage) -> dict[str, Any]:
    cached = usage.prompt_tokens_details.cached_tokens
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            **usage.prompt_tokens_details.model_dump(),
            "cached_tokens": cached,
            "cache_write_tokens": 0,
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": usage.completion_tokens_details.model_dump(),
        "total_tokens": usage.total_tokens,
    }


def _form(form: TextFormat | None) -> dict[str, Any]:
    if form is None or form.source is None:
        return {"type": form.type if form is not None else "text"}
    source: Any = form.source
    return {
        "type": form.type,
        "name": form.name,
        "description": form.description,
        "schema": json.loads(source),
        "strict": form.strict,
    }
