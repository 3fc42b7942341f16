"""From tokens to what the client sees: text, stop strings, log probabilities, usage, chunks. Independent of HTTP and workers."""

from __future__ import annotations

import functools
import io
import math
from array import array
from collections.abc import Collection, Sequence

from mmd_api.contract.errors import MmdError
from mmd_workers.gateway.call_parser import CallParser, CallPart
from mmd_workers.gateway.chat_response import (
    AnsweredCall,
    AnsweredFunction,
    ApiFinishReason,
    AssistantMessage,
    Choice,
    ChoiceLogprobs,
    ChunkChoice,
    CompletionTokensDetails,
    Delta,
    FunctionDelta,
    Piece,
    PromptTokensDetails,
    TokenLogprobs,
    ToolCallDelta,
    TopLogprob,
    Usage,
)
from mmd_workers.gateway.detokenizer import REPLACEMENT, IncrementalDetokenizer, StopScanner
from mmd_workers.gateway.lifecycle import ServedSequence
from mmd_workers.gateway.omissions import omissions_of
from mmd_workers.gateway.reasoning_parser import ReasoningParser, ReasoningPart, RunKind
from mmd_workers.gateway.requests import Taken
from mmd_workers.model.interfaces import Frontend
from mmd_workers.model.prompt import PromptLayout
from mmd_workers.wire.messages import PromptLogprob, TokenLogprob

TOKENS_AT_ONCE = (
    16  # of a chunk: where a client reads slowly many wait, and with log probabilities each takes 15 KB
)

NO_LOGPROB = math.nan
"""Of the first token of a prompt."""


class ChoiceStream:
    """One of the n answers of a request, as it grows."""

    def __init__(
        self,
        index: int,
        sequence: ServedSequence,
        frontend: Frontend,
        stops: Sequence[str],
        *,
        stop_token_ids: Collection[int] = (),
        min_tokens: int = 0,
        logprobs: bool,
        token_ids: bool,
        parser: CallParser | None = None,
        reasoning: ReasoningParser | None = None,
    ) -> None:
        """`stop_token_ids`: tokens that are no text where they end the answer. `min_tokens`: of those no stop string ends it. `parser`: reads
        the calls of tools in it. `reasoning`: tells its reasoning from the rest. Stop strings end it in its reasoning, too, as in vLLM.
        """
        self.index = index
        self.sequence = sequence
        self.finish_reason: ApiFinishReason | None = None
        self.completion_tokens = 0
        self._frontend = frontend
        self._parser = parser
        self._reasoning = reasoning
        kept = frozenset(
            token_id for reader in (parser, reasoning) if reader for token_id in reader.token_ids
        )
        self._detokenizer = IncrementalDetokenizer(functools.partial(frontend.decode, kept=kept))
        self._scanner = StopScanner(stops)
        self._stop_token_ids = frozenset(stop_token_ids)
        self._min_tokens = min_tokens
        self._logprobs = logprobs
        self._token_ids = token_ids
        self._begun = False

    def advance(self) -> ChunkChoice | None:
        """A chunk of the tokens that have arrived, at most `TOKENS_AT_ONCE`; None: nothing to show.

        Raises:
            MmdError: the sequence failed, after everything before the failure has been returned.
        """
        if self.finish_reason is not None:
            return None
        text: list[str] = []
        entries: list[TokenLogprobs] = []
        token_ids: list[int] = []
        prompt: list[TokenLogprobs] = []
        for item in self.sequence.state.take(TOKENS_AT_ONCE):
            self.completion_tokens += 1
            token_ids.append(item.token_id)
            stops = self.completion_tokens > self._min_tokens
            if item.finish_reason != "stop" or item.token_id not in self._stop_token_ids:
                piece = self._detokenizer.push([item.token_id])
                if self._reasoning is not None:
                    self._reasoning.expect(item.token_id, piece)
                if self._parser is not None:
                    self._parser.expect(item.token_id, piece)
                text.append(self._scanner.push(piece, stops=stops))
            if self.completion_tokens == 1 and self.sequence.state.spec.sampling.prompt_logprobs:
                prompt = self._prompt(item.prompt_logprobs)
            if self._logprobs:
                entries.append(self._entry(item))
            if item.finish_reason is not None and self._scanner.matched is None:
                rest = self._detokenizer.flush()
                if self._reasoning is not None:
                    self._reasoning.expect(None, rest)
                text.append(self._scanner.push(rest, stops=stops))
                text.append(self._scanner.flush())
                self.finish_reason = "length" if item.finish_reason == "length" else "stop"
            if self._scanner.matched is not None:
                self.finish_reason = "stop"
            if self.finish_reason is not None:
                break
        pieces = self._parse("".join(text))
        unseen = entries or (token_ids if self._token_ids else [])
        if not pieces and not unseen and self.finish_reason is None:
            if self.sequence.error is not None and self.sequence.ended:
                raise self.sequence.error
            return None
        calls = [piece for piece in pieces if isinstance(piece, CallPart)]
        thoughts = [piece.text for piece in pieces if isinstance(piece, ReasoningPart)]
        content = "".join(piece for piece in pieces if isinstance(piece, str))
        delta = Delta(content=content) if content or not (calls or thoughts) else Delta()
        if not self._begun:
            delta.role = "assistant"
        if thoughts:
            delta.reasoning_content = "".join(thoughts)
        if calls:
            delta.tool_calls = list(map(_call_delta, calls))
        self._begun = True
        chunk = ChunkChoice(
            index=self.index,
            delta=delta,
            logprobs=ChoiceLogprobs(content=entries) if self._logprobs else None,
            finish_reason=self.finish_reason,
            stop=self._scanner.matched,
            pieces=pieces,
            prompt=prompt,
        )
        if self._token_ids:
            chunk.token_ids = token_ids
        return chunk

    @property
    def reasoning_tokens(self) -> int:
        """Of its tokens so far."""
        return 0 if self._reasoning is None else self._reasoning.num_tokens

    def _parse(self, text: str) -> list[Piece]:
        """What the next text is, and at the end of the answer what its calls make of its finish reason."""
        ended = self.finish_reason is not None
        pieces: list[Piece] = []
        if self._reasoning is None:
            runs: list[tuple[RunKind, str]] = [("content", text)] if text else []
        else:
            runs = self._reasoning.push(text)
            runs += self._reasoning.flush() if ended else []
        for kind, run in runs:
            if kind == "content":
                pieces += [run] if self._parser is None else self._parser.push(run).pieces
                continue
            if kind == "reasoning":
                pieces.append(ReasoningPart(run))
            if self._parser is not None:
                self._parser.skip(len(run))
        if self._parser is not None and ended:
            pieces += self._parser.flush().pieces
            if self.finish_reason == "stop" and self._parser.complete:
                self.finish_reason = "tool_calls"
        return pieces

    def _entry(self, item: Taken) -> TokenLogprobs:
        if item.logprob is None:
            raise MmdError("the worker sent a token without the requested log probability")
        return self._token(item.token_id, item.logprob, item.top_logprobs)

    def _prompt(self, found: Sequence[PromptLogprob]) -> list[TokenLogprobs]:
        """The tokens of the prompt; the first one follows nothing, so it has no probability."""
        first, *others = self.sequence.state.spec.token_ids
        if len(found) != len(others):
            raise MmdError("the worker sent no log probabilities of the prompt, or not all")
        return [
            self._token(first, NO_LOGPROB, []),
            *(
                self._token(token, one.logprob, one.top_logprobs)
                for token, one in zip(others, found, strict=True)
            ),
        ]

    def _token(self, token_id: int, logprob: float, likeliest: Sequence[TokenLogprob]) -> TokenLogprobs:
        return TokenLogprobs(
            token=(own := self._text(token_id)),
            logprob=logprob,
            bytes=_utf8(own),
            top_logprobs=[
                TopLogprob(token=(other := self._text(top.token_id)), logprob=top.logprob, bytes=_utf8(other))
                for top in likeliest
            ],
        )

    def _text(self, token_id: int) -> str:
        return self._frontend.decode([token_id])


class CompleteChoice:
    """One of the n answers as it is collected to be sent in one piece.

    Its log probabilities are kept as the JSON that they become: as objects they take eight times as much, and to dump all of them at
    the end would hold up every other request.
    """

    def __init__(self, stream: ChoiceStream, *, logprobs: bool) -> None:
        self._stream = stream
        self._logprobs = logprobs
        self._text = io.StringIO()
        self._thoughts = io.StringIO()
        self._calls: list[tuple[str, str, io.StringIO]] = []  # id, name, arguments
        self._token_ids = array("l")
        self.entries: list[bytes] = []

    def add(self, part: ChunkChoice) -> None:
        """Take the next part of the answer."""
        self._text.write(part.delta.content or "")
        self._thoughts.write(part.delta.reasoning_content or "")
        for call in part.delta.tool_calls or ():
            if call.id is not None:
                self._calls.append((call.id, call.function.name or "", io.StringIO()))
            self._calls[call.index][2].write(call.function.arguments)
        self._token_ids.extend(part.token_ids or ())
        if part.logprobs is not None and part.logprobs.content:
            self.entries.append(b"," if self.entries else b"")
            self.entries.append(
                b",".join(entry.model_dump_json().encode() for entry in part.logprobs.content)
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
            index=self._stream.index,
            message=message,
            logprobs=ChoiceLogprobs(content=[]) if self._logprobs else None,
            finish_reason=self._stream.finish_reason or "stop",
            token_ids=self._token_ids.tolist() if token_ids else None,
        )


_LOGPROBS_BEGIN = b'"logprobs":{"content":['
"""No text of an answer looks like this in JSON: the quotes in a string are escaped."""


def with_logprobs(body: bytes, choices: Sequence[CompleteChoice]) -> list[bytes]:
    """The pieces of a dumped completion, with the choices' entries where it has empty lists."""
    first, *rest = body.split(_LOGPROBS_BEGIN)
    pieces = [first]
    for choice, after in zip(choices, rest, strict=True):
        pieces += [_LOGPROBS_BEGIN, *choice.entries, after]
    return pieces


def _call_delta(part: CallPart) -> ToolCallDelta:
    if part.id is None:
        return ToolCallDelta(index=part.index, function=FunctionDelta(arguments=part.arguments))
    function = FunctionDelta(name=part.name, arguments=part.arguments)
    return ToolCallDelta(index=part.index, id=part.id, type="function", function=function)


def _utf8(token: str) -> list[int] | None:
    """A token's bytes; None where it is part of a character and its text cannot show them."""
    return None if REPLACEMENT in token else list(token.encode())


def usage_of(
    layouts: Sequence[PromptLayout], completion_tokens: int, cached_tokens: int, reasoning_tokens: int = 0
) -> Usage:
    """Counts by modality; each prompt is counted once, whatever n."""
    by_modality = {"image": 0, "video": 0, "audio": 0}
    for medium in (medium for layout in layouts for medium in layout.media):
        by_modality[medium.modality] += medium.num_tokens
    prompt = sum(len(layout.token_ids) for layout in layouts)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion_tokens,
        total_tokens=prompt + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(
            cached_tokens=cached_tokens,
            text_tokens=prompt - sum(by_modality.values()),
            image_tokens=by_modality["image"],
            video_tokens=by_modality["video"],
            audio_tokens=by_modality["audio"],
            **omissions_of(layouts),
        ),
        completion_tokens_details=CompletionTokensDetails(reasoning_tokens=reasoning_tokens),
    )
