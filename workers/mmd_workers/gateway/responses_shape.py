"""Answers of /v1/responses, in the shape of OpenAI's Responses API. Independent of HTTP and workers."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic_core import to_json

from mmd_workers.gateway.api_errors import ApiError, ErrorShape
from mmd_workers.gateway.chat import ChoiceStream
from mmd_workers.gateway.chat_response import ChunkChoice, Usage
from mmd_workers.gateway.responses_request import Repeated, TextFormat
from mmd_workers.gateway.shapes import WholeText, named_event


class ResponsesShape:
    """The response to one request, which knows how far its stream has come. `response_id`: as its head has it."""

    keeps_text = True
    waiting = ": waiting\n\n"

    def __init__(self, response_id: str, given: Repeated) -> None:
        self._given = given
        self._item_id = f"msg_{response_id.rpartition('_')[2]}"
        self._streamed = WholeText()
        self._head: dict[str, Any] = {}
        self._next_number = 0

    def opening(self, head: dict[str, Any], _usage: Usage) -> Iterable[str]:
        """The response without output, its one message, and the message's one part."""
        self._head = head
        yield self._event("response.created", response=self._response("in_progress", []))
        yield self._event("response.in_progress", response=self._response("in_progress", []))
        yield self._event("response.output_item.added", output_index=0, item=self._item("in_progress", []))
        yield self._event("response.content_part.added", **self._place(), part=_part(""))

    def chunk(self, _head: dict[str, Any], part: ChunkChoice) -> str:
        """The event with this part of the answer; empty where it has no text."""
        self._streamed.add(part)
        if not part.delta.content:
            return ""
        place = self._place()
        return self._event("response.output_text.delta", **place, delta=part.delta.content, logprobs=[])

    def ending(self, _head: dict[str, Any], usage: Usage, timings: dict[str, float] | None) -> Iterable[str]:
        """The ends of the part, the message and the response, each with the text."""
        text, status = self._streamed.text, _status(self._streamed)
        yield self._event("response.output_text.done", **self._place(), text=text, logprobs=[])
        yield self._event("response.content_part.done", **self._place(), part=_part(text))
        item = self._item(status, [_part(text)])
        yield self._event("response.output_item.done", output_index=0, item=item)
        response = self._response(status, [item], usage=usage, timings=timings)
        yield self._event(f"response.{status}", response=response)

    def failure(self, error: ApiError) -> str:
        """The event that ends a stream that has begun: the failed response, with the text so far."""
        fault: dict[str, Any] = {
            "code": "server_error" if error.status >= 500 else "invalid_prompt",
            "message": error.message,
            "param": error.param,
            "type": error.code,
        }
        if error.retry_after is not None:
            fault["retry_after_seconds"] = error.retry_after
        item = self._item("incomplete", [_part(self._streamed.text)])
        return self._event("response.failed", response=self._response("failed", [item], error=fault))

    def collector(self, _stream: ChoiceStream) -> WholeText:
        """Collects the answer."""
        return WholeText()

    def body(
        self,
        head: dict[str, Any],
        wholes: Sequence[WholeText],
        usage: Usage,
        timings: dict[str, float] | None,
    ) -> list[bytes]:
        """JSON of the response."""
        (whole,) = wholes
        self._head = head
        status = _status(whole)
        item = self._item(status, [_part(whole.text)])
        return [to_json(self._response(status, [item], usage=usage, timings=timings))]

    def _event(self, kind: str, **fields: Any) -> str:
        number, self._next_number = self._next_number, self._next_number + 1
        return named_event({"type": kind, "sequence_number": number, **fields})

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "type": "message",
            "id": self._item_id,
            "role": "assistant",
            "status": status,
            "content": content,
        }

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
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "service_tier": "default",
            "store": False,
            "tool_choice": "none",
            "tools": [],
            "top_logprobs": 0,
            "truncation": "disabled",
        }
        return response if timings is None else {**response, "timings": timings}


class ResponsesErrors(ErrorShape):
    """Errors of a request whose stream may have begun."""

    def __init__(self, shape: ResponsesShape) -> None:
        self._shape = shape

    def events(self, error: ApiError, _request_id: str) -> Iterable[str]:
        """The failed response."""
        return (self._shape.failure(error),)


def _status(whole: WholeText) -> str:
    return "incomplete" if whole.finish_reason == "length" else "completed"


def _part(text: str) -> dict[str, Any]:
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
        "output_tokens_details": {"reasoning_tokens": 0},
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
