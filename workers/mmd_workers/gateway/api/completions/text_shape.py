"""Answers to text completions, in the shape of OpenAI's API: whole or in chunks. Independent of HTTP and workers."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from pydantic_core import to_json

from mmd_workers.gateway.answers.answer_part import AnswerPart, ApiFinishReason, ScoredToken
from mmd_workers.gateway.answers.chunked_shape import ChunkedShape, chunk_event, left_out
from mmd_workers.gateway.answers.prompt_scores import BEGIN, END, entries
from mmd_workers.gateway.answers.usage import Usage
from mmd_workers.gateway.api.completions.text_response import TextChoice, TextCompletion, TextLogprobs
from mmd_workers.gateway.output.token_texts import DecodedToken

_NO_CHOICES = b'"choices":[]'


class TextShape(ChunkedShape):
    """Writes text completions. `echo`: the prompt at the beginning of each answer's text.

    `prompt_logprobs`: number of likeliest tokens beside each token of the prompt in a list of its own; None: there is no such list.
    """

    def __init__(
        self,
        *,
        logprobs: int | None,
        token_ids: bool,
        usage: bool,
        continuous: bool,
        echo: Sequence[str] = (),
        prompt_logprobs: int | None = None,
    ) -> None:
        super().__init__(usage=usage, continuous=continuous)
        self.prompt_logprobs = prompt_logprobs
        self._has_echo = bool(echo)
        self._logprobs = logprobs
        self._token_ids = token_ids
        self._unsent_echo = dict(enumerate(echo))
        self._offsets: dict[int, int] = {}

    def part(self, part: AnswerPart) -> TextChoice:
        """This part of an answer as a choice of the API."""
        choice = TextChoice(
            index=part.index,
            text=self._unsent_echo.pop(part.index, "") + part.content,
            logprobs=None if part.logprobs is None else self._entries(part),
            finish_reason=part.finish_reason,
        )
        if self._token_ids:
            choice.token_ids = list(part.token_ids)
        return choice

    def _entries(self, part: AnswerPart) -> TextLogprobs:
        """The log probabilities of a part. Of several tokens with the same text only the likeliest appears; the chosen token comes first."""
        assert part.logprobs is not None
        columns = TextLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        if not self._logprobs:
            columns.top_logprobs = None
        echoed = part.prompt_logprobs if self._has_echo else ()
        for scored in (*echoed, *part.logprobs):
            offset = self._offsets.get(part.index, 0)
            self._offsets[part.index] = offset + scored.token.characters
            columns.tokens.append(_spelled(scored.token))
            columns.token_logprobs.append(scored.logprob)
            columns.text_offset.append(offset)
            if columns.top_logprobs is not None:
                columns.top_logprobs.append(_likeliest(scored, self._logprobs or 0))
        return columns

    def _choice(self, part: AnswerPart) -> TextChoice:
        return self.part(part)

    def _event(self, head: dict[str, Any], choices: list[TextChoice], **more: Any) -> str:
        return chunk_event(TextCompletion(object="text_completion", **head, choices=choices, **more))

    def collector(self, index: int) -> _TextCollector:
        """A collector for the answer with this index."""
        return _TextCollector(self, index)

    def body(
        self,
        head: dict[str, Any],
        wholes: Sequence[_TextCollector],
        usage: Usage,
        timings: dict[str, float] | None,
    ) -> list[bytes]:
        """The JSON of all answers, in pieces."""
        completion = TextCompletion(**head, choices=[], usage=usage, timings=timings)
        body = completion.model_dump_json(exclude=left_out(timings, token_ids=True)).encode()
        before, after = body.split(_NO_CHOICES)
        pieces = [before, b'"choices":[']
        for number, whole in enumerate(wholes):
            pieces += [b"," if number else b"", *whole.pieces(token_ids=self._token_ids)]
        return [*pieces, b"]", after]


class _TextCollector:
    """Collects one answer. Log probabilities are kept as JSON; `CompleteChoice` says why."""

    def __init__(self, shape: TextShape, index: int) -> None:
        self._shape = shape
        self._index = index
        self._text: list[str] = []
        self._token_ids = array("l")
        self._finish_reason: ApiFinishReason | None = None
        self._lists: dict[str, list[bytes] | None] = {}
        self._prompt_entries = b""

    def add(self, part: AnswerPart) -> None:
        """Take the next part of the answer."""
        choice = self._shape.part(part)
        if part.prompt_logprobs and self._shape.prompt_logprobs is not None:
            self._prompt_entries = entries(part.prompt_logprobs, self._shape.prompt_logprobs)
        self._text.append(choice.text)
        self._token_ids.extend(choice.token_ids or ())
        self._finish_reason = choice.finish_reason or self._finish_reason
        if choice.logprobs is not None:
            for name in TextLogprobs.model_fields:
                items = getattr(choice.logprobs, name)
                if items is None:
                    self._lists[name] = None
                elif items:
                    column = self._lists.setdefault(name, [])
                    assert column is not None
                    column += [b"," if column else b"", to_json(items, inf_nan_mode="null")[1:-1]]
                else:
                    self._lists.setdefault(name, [])

    def pieces(self, *, token_ids: bool) -> list[bytes]:
        """The JSON of the answer, in pieces."""
        choice = TextChoice(index=self._index, text="".join(self._text), finish_reason=self._finish_reason)
        if token_ids:
            choice.token_ids = self._token_ids.tolist()
        exclude = {"logprobs"} if token_ids else {"logprobs", "token_ids"}
        begin = choice.model_dump_json(exclude=exclude)[:-1].encode()
        last = b"}"
        if self._shape.prompt_logprobs is not None:
            last = b"".join([b",", BEGIN, self._prompt_entries, END, b"}"])
        if not self._lists:
            return [begin, b',"logprobs":null', last]
        pieces = [begin, b',"logprobs":{']
        for number, (name, items) in enumerate(self._lists.items()):
            pieces.append(f'{"," if number else ""}"{name}":'.encode())
            pieces += [b"null"] if items is None else [b"[", *items, b"]"]
        return [*pieces, b"}", last]


def _likeliest(scored: ScoredToken, count: int) -> dict[str, float] | None:
    """Log probabilities by text, the chosen token's first; None for the first token of a prompt."""
    if scored.logprob is None:
        return None
    by_text = {_spelled(scored.token): scored.logprob}
    for candidate in scored.likeliest[:count]:
        text = _spelled(candidate.token)
        by_text[text] = max(candidate.logprob, by_text.get(text, candidate.logprob))
    return by_text


def _spelled(token: DecodedToken) -> str:
    """The text of a token, or of a part of a character its bytes, as OpenAI's API spells them here."""
    if not token.is_broken:
        return token.text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.data)
