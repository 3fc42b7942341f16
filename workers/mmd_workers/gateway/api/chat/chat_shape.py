"""Answers to chat completions, in the shape of OpenAI's API: whole or in chunks. Independent of HTTP and workers."""

from __future__ import annotations

import io
from array import array
from collections.abc import Sequence
from typing import Any

from mmd_workers.gateway.answers.answer_part import AnswerPart, ApiFinishReason, ScoredToken
from mmd_workers.gateway.answers.chunked_shape import ChunkedShape, chunk_event, left_out
from mmd_workers.gateway.answers.prompt_scores import BEGIN, EMPTY, END, entries
from mmd_workers.gateway.answers.usage import Usage
from mmd_workers.gateway.api.chat.chat_response import (
    AnsweredCall,
    AnsweredFunction,
    AssistantMessage,
    ChatCompletion,
    ChatCompletionChunk,
    Choice,
    ChoiceLogprobs,
    ChunkChoice,
    Delta,
    FunctionDelta,
    TokenLogprobs,
    ToolCallDelta,
    TopLogprob,
)
from mmd_workers.gateway.output.call_parser import CallPart


class ChatShape(ChunkedShape):
    """Writes chat completions."""

    def __init__(
        self,
        *,
        logprobs: bool,
        token_ids: bool,
        usage: bool,
        continuous: bool,
        prompt_logprobs: int | None = None,
    ) -> None:
        super().__init__(usage=usage, continuous=continuous)
        self._prompt_logprobs = prompt_logprobs
        self._logprobs = logprobs
        self._token_ids = token_ids

    def _choice(self, part: AnswerPart) -> ChunkChoice:
        return chunk_choice(part, token_ids=self._token_ids)

    def _event(self, head: dict[str, Any], choices: list[ChunkChoice], **more: Any) -> str:
        return chunk_event(
            ChatCompletionChunk(object="chat.completion.chunk", **head, choices=choices, **more)
        )

    def collector(self, index: int) -> CompleteChoice:
        """A collector for the answer with this index."""
        return CompleteChoice(
            index, logprobs=self._logprobs, prompt_logprobs=None if index else self._prompt_logprobs
        )

    def body(
        self,
        head: dict[str, Any],
        wholes: Sequence[CompleteChoice],
        usage: Usage,
        timings: dict[str, float] | None,
    ) -> list[bytes]:
        """The JSON of all answers, in pieces."""
        completion = ChatCompletion(
            **head,
            choices=[whole.choice(token_ids=self._token_ids) for whole in wholes],
            usage=usage,
            timings=timings,
            prompt_logprobs=None if self._prompt_logprobs is None else [],
        )
        body = completion.model_dump_json(exclude=left_out(timings, self._token_ids)).encode()
        pieces = with_logprobs(body, wholes) if self._logprobs else [body]
        if self._prompt_logprobs is None:
            return pieces
        before, after = pieces[-1].split(EMPTY)
        return [*pieces[:-1], before, BEGIN, wholes[0].prompt_entries, END, after]


class CompleteChoice:
    """Collects one of the n answers, to be sent in one piece.

    Log probabilities are kept as JSON: as objects they take eight times as much memory, and dumping all of them at the end would block every
    other request.
    """

    def __init__(self, index: int, *, logprobs: bool, prompt_logprobs: int | None = None) -> None:
        """`prompt_logprobs`: number of likeliest tokens beside each token of the prompt; None: the answer has none of these."""
        self._index = index
        self._finish_reason: ApiFinishReason = "stop"
        self._logprobs = logprobs
        self._text = io.StringIO()
        self._thoughts = io.StringIO()
        self._calls: list[tuple[str, str, io.StringIO]] = []  # id, name, arguments
        self._token_ids = array("l")
        self._prompt_logprobs = prompt_logprobs
        self.entries: list[bytes] = []
        self.prompt_entries = b""

    def add(self, part: AnswerPart) -> None:
        """Take the next part of the answer."""
        self._text.write(part.content)
        self._thoughts.write(part.reasoning)
        for call in part.calls:
            if call.id is not None:
                self._calls.append((call.id, call.name or "", io.StringIO()))
            self._calls[call.index][2].write(call.arguments)
        self._token_ids.extend(part.token_ids)
        self._finish_reason = part.finish_reason or self._finish_reason
        if part.prompt_logprobs and self._prompt_logprobs is not None:
            self.prompt_entries = entries(part.prompt_logprobs, self._prompt_logprobs)
        if part.logprobs:
            self.entries.append(b"," if self.entries else b"")
            self.entries.append(
                b",".join(entry.model_dump_json().encode() for entry in map(_token_logprobs, part.logprobs))
            )

    def choice(self, *, token_ids: bool) -> Choice:
        """The complete answer, without its `entries`."""
        calls = [
            AnsweredCall(id=call_id, function=AnsweredFunction(name=name, arguments=arguments.getvalue()))
            for call_id, name, arguments in self._calls
        ]
        content, thoughts = self._text.getvalue(), self._thoughts.getvalue()
        message = AssistantMessage(
            content=content or (None if calls or thoughts else ""),
            reasoning_content=thoughts or None,
            tool_calls=calls or None,
        )
        return Choice(
            index=self._index,
            message=message,
            logprobs=ChoiceLogprobs(content=[]) if self._logprobs else None,
            finish_reason=self._finish_reason,
            token_ids=self._token_ids.tolist() if token_ids else None,
        )


_LOGPROBS_BEGIN = b'"logprobs":{"content":['
"""The text of an answer never contains this in JSON, because quotes within a string are escaped."""


def with_logprobs(body: bytes, choices: Sequence[CompleteChoice]) -> list[bytes]:
    """The pieces of a dumped completion, with its empty lists replaced by the choices' entries."""
    first, *rest = body.split(_LOGPROBS_BEGIN)
    pieces = [first]
    for choice, after in zip(choices, rest, strict=True):
        pieces += [_LOGPROBS_BEGIN, *choice.entries, after]
    return pieces


def chunk_choice(part: AnswerPart, *, token_ids: bool) -> ChunkChoice:
    """A part of an answer as the choice of a chunk. Fields that are not set are not sent."""
    content, reasoning, calls = part.content, part.reasoning, part.calls
    delta = Delta(content=content) if content or not (calls or reasoning) else Delta()
    if part.begins:
        delta.role = "assistant"
    if reasoning:
        delta.reasoning_content = reasoning
    if calls:
        delta.tool_calls = list(map(_call_delta, calls))
    logprobs = (
        None if part.logprobs is None else ChoiceLogprobs(content=list(map(_token_logprobs, part.logprobs)))
    )
    choice = ChunkChoice(index=part.index, delta=delta, logprobs=logprobs, finish_reason=part.finish_reason)
    if token_ids:
        choice.token_ids = list(part.token_ids)
    return choice


def _call_delta(part: CallPart) -> ToolCallDelta:
    if part.id is None:
        return ToolCallDelta(index=part.index, function=FunctionDelta(arguments=part.arguments))
    function = FunctionDelta(name=part.name, arguments=part.arguments)
    return ToolCallDelta(index=part.index, id=part.id, type="function", function=function)


def _token_logprobs(scored: ScoredToken) -> TokenLogprobs:
    assert scored.logprob is not None  # only the first token of a prompt has none
    return TokenLogprobs(
        token=scored.token.text,
        logprob=scored.logprob,
        bytes=list(scored.token.data),
        top_logprobs=[
            TopLogprob(token=one.token.text, logprob=one.logprob, bytes=list(one.token.data))
            for one in scored.likeliest
        ],
    )
