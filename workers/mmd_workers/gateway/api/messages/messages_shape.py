"""Answers and errors of /v1/messages, in the shape of Anthropic's API. Independent of HTTP and workers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from pydantic_core import from_json

from mmd_workers.gateway.answers.answer_part import Piece
from mmd_workers.gateway.answers.block_shape import AnswerBlock, OneAnswer, WholeAnswer, named_event
from mmd_workers.gateway.answers.usage import Usage
from mmd_workers.gateway.output.reasoning_parser import ReasoningPart
from mmd_workers.model.call_forms import INVALID_JSON


class MessagesShape(OneAnswer):
    """Writes Anthropic's messages. `fills_context`: a cut answer has filled the model's context before reaching its `max_tokens`."""

    keeps_text = False
    waiting = 'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(self, *, fills_context: bool) -> None:
        super().__init__()
        self._cut = "model_context_window_exceeded" if fills_context else "max_tokens"
        self._num_begun = 0  # blocks begun on the stream
        self._last_kind: type[Piece] | None = None

    def opening(self, head: dict[str, Any], usage: Usage) -> Iterable[str]:
        """The event with the message, still without content."""
        yield named_event(
            {"type": "message_start", "message": self._message(head, [], self._streamed, usage, None)}
        )

    def _piece(self, piece: Piece) -> Iterator[str]:
        kind_before, self._last_kind = self._last_kind, type(piece)
        if isinstance(piece, str):
            if kind_before is not str:
                yield from self._begin(_text_block(""))
            text, delta = piece, {"type": "text_delta", "text": piece}
        elif isinstance(piece, ReasoningPart):
            if kind_before is not ReasoningPart:
                yield from self._begin(_thinking_block(""))
            text, delta = piece.text, {"type": "thinking_delta", "thinking": piece.text}
        else:
            if piece.id is not None:
                yield from self._begin(_tool_use(piece.id, piece.name, {}))
            text, delta = piece.arguments, {"type": "input_json_delta", "partial_json": piece.arguments}
        if text:
            yield named_event({"type": "content_block_delta", "index": self._num_begun - 1, "delta": delta})

    def _begin(self, block: dict[str, Any]) -> Iterator[str]:
        """The events that end the block before this one and begin this one."""
        if self._num_begun:
            yield self._block_stop()
        yield named_event({"type": "content_block_start", "index": self._num_begun, "content_block": block})
        self._num_begun += 1

    def _block_stop(self) -> str:
        return named_event({"type": "content_block_stop", "index": self._num_begun - 1})

    def ending(self, _head: dict[str, Any], usage: Usage, timings: dict[str, float] | None) -> Iterable[str]:
        """The events for the end of the last block, the stop reason, and the end of the message."""
        if not self._num_begun:
            yield from self._begin(_text_block(""))
        yield self._block_stop()
        reason, stop = self._stop_reason(self._streamed)
        changed = {
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": stop},
            "usage": _usage(usage),
        }
        yield named_event(changed if timings is None else {**changed, "timings": timings})
        yield named_event({"type": "message_stop"})

    def _whole(
        self, head: dict[str, Any], whole: WholeAnswer, usage: Usage, timings: dict[str, float] | None
    ) -> dict[str, Any]:
        return self._message(head, list(map(_content, whole.shown)), whole, usage, timings)

    def _message(
        self,
        head: dict[str, Any],
        content: list[dict[str, Any]],
        whole: WholeAnswer,
        usage: Usage,
        timings: dict[str, float] | None,
    ) -> dict[str, Any]:
        reason, stop = self._stop_reason(whole)
        message = {
            "id": head["id"],
            "type": "message",
            "role": "assistant",
            "model": head["model"],
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": _usage(usage),
        }
        return message if timings is None else {**message, "timings": timings}

    def _stop_reason(self, whole: WholeAnswer) -> tuple[str | None, str | None]:
        """The `stop_reason` and the `stop_sequence`."""
        if whole.finish_reason == "length":
            return self._cut, None
        if whole.finish_reason == "tool_calls":
            return "tool_use", None
        if whole.stop is not None:
            return "stop_sequence", whole.stop
        return ("end_turn" if whole.finish_reason else None), None


def _text_block(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _thinking_block(text: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": text, "signature": ""}


def _tool_use(call_id: str, name: str | None, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}


def _content(block: AnswerBlock) -> dict[str, Any]:
    if block.kind == "reasoning":
        return _thinking_block(block.text)
    if block.call_id is None:
        return _text_block(block.text)
    return _tool_use(block.call_id, block.name, _input(block.text))


def _input(arguments: str) -> dict[str, Any]:
    """Parse the arguments of a call.

    If they are cut off, the result has the complete part, as a client has that accumulates a stream. Text that is not JSON becomes the value
    of a key, under which it may also be sent back to Anthropic's models.
    """
    try:
        parsed = from_json(arguments or "{}", allow_inf_nan=False, allow_partial=True)
    except ValueError:
        parsed = None
    return parsed if isinstance(parsed, dict) else {INVALID_JSON: arguments}


def _usage(usage: Usage) -> dict[str, Any]:
    """Anthropic's usage, whose `input_tokens` exclude cached tokens."""
    cached = usage.prompt_tokens_details.cached_tokens
    return {
        "input_tokens": usage.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {
            "thinking_tokens": usage.completion_tokens_details.reasoning_tokens,
        },
    }
