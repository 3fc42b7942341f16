"""Turns tokens into parts of an answer: text, stop strings, reasoning, calls, log probabilities. Independent of HTTP and workers."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence

from mmd_api.contract.errors import MmdError
from mmd_workers.gateway.answers.answer_part import AnswerPart, ApiFinishReason, Candidate, Piece, ScoredToken
from mmd_workers.gateway.output.call_parser import CallParser
from mmd_workers.gateway.output.detokenizer import CONTEXT_TOKENS, IncrementalDetokenizer, StopScanner
from mmd_workers.gateway.output.reasoning_parser import ReasoningParser, ReasoningPart, RunKind
from mmd_workers.gateway.output.token_texts import TokenTexts
from mmd_workers.gateway.placement.dispatcher import ServedSequence
from mmd_workers.gateway.placement.sequence_state import Taken
from mmd_workers.model.interfaces import Frontend
from mmd_workers.wire.messages.message_parts import PromptLogprob, TokenLogprob

TOKENS_AT_ONCE = 16
"""The most tokens in a part: many wait if a client reads slowly, and each may take 15 KB with log probabilities."""


class ChoiceStream:
    """One of the n answers to a request, while it grows."""

    def __init__(
        self,
        index: int,
        sequence: ServedSequence,
        frontend: Frontend,
        stops: Sequence[str],
        *,
        text_before: Sequence[int] = (),
        stop_token_ids: Collection[int] = (),
        min_tokens: int = 0,
        special_tokens: bool = False,
        stops_shown: bool = False,
        num_logprobs: int | None,
        token_ids: bool,
        parser: CallParser | None = None,
        reasoning: ReasoningParser | None = None,
    ) -> None:
        """Creates the stream of one choice.

        `text_before`: tokens of the text that the answer continues. `stop_token_ids`: tokens that are not text if they end the answer. `min_tokens`: within this many tokens no stop string ends the
        answer. `special_tokens`: special tokens are text. `stops_shown`: what ends the answer is text. `num_logprobs`: number of likeliest
        tokens beside each token of the answer; None: no log probabilities. `parser`: reads tool calls. `reasoning`: separates the reasoning from the rest. Stop strings also end an answer within its reasoning, as in vLLM.
        """
        self.index = index
        self.sequence = sequence
        self.finish_reason: ApiFinishReason | None = None
        self.completion_tokens = 0
        self._parser = parser
        self._reasoning = reasoning
        marker_ids = frozenset(
            token_id for reader in (parser, reasoning) if reader for token_id in reader.token_ids
        )
        decode = functools.partial(frontend.decode, special_tokens=special_tokens, kept=marker_ids)
        before = text_before[-CONTEXT_TOKENS:]
        self._detokenizer = IncrementalDetokenizer(decode, before)
        self._scanner = StopScanner(stops, shown=stops_shown)
        hidden: set[int] = set() if special_tokens and stops_shown else set(frontend.eos_token_ids)
        self._hidden_ends = frozenset(
            hidden - set(stop_token_ids) if stops_shown else hidden | set(stop_token_ids)
        )
        self._min_tokens = min_tokens
        self._num_logprobs = num_logprobs
        self._token_texts = TokenTexts(frontend, special_tokens=special_tokens)
        self._text_begins = not before or not decode(before)
        self._token_ids = token_ids
        self._has_begun = False

    def advance(self) -> AnswerPart | None:
        """The next part, made from at most `TOKENS_AT_ONCE` arrived tokens; None if there is nothing to show.

        Raises:
            MmdError: the sequence failed, and everything before the failure has been returned.
        """
        if self.finish_reason is not None:
            return None
        text: list[str] = []
        scored: list[ScoredToken] = []
        token_ids: list[int] = []
        prompt_scores: list[ScoredToken] = []
        for item in self.sequence.state.take(TOKENS_AT_ONCE):
            self.completion_tokens += 1
            token_ids.append(item.token_id)
            stops = self.completion_tokens > self._min_tokens
            if item.finish_reason != "stop" or item.token_id not in self._hidden_ends:
                piece = self._detokenizer.push([item.token_id])
                if self._reasoning is not None:
                    self._reasoning.expect(item.token_id, piece)
                if self._parser is not None:
                    self._parser.expect(item.token_id, piece)
                text.append(self._scanner.push(piece, stops=stops))
            if self.completion_tokens == 1 and self.sequence.state.spec.sampling.prompt_logprobs:
                prompt_scores = self._prompt(item.prompt_logprobs)
            if self._num_logprobs is not None:
                scored.append(self._scored(item))
            if item.finish_reason is not None and self._scanner.matched is None:
                tail = self._detokenizer.flush()
                if self._reasoning is not None:
                    self._reasoning.expect(None, tail)
                text.append(self._scanner.push(tail, stops=stops))
                text.append(self._scanner.flush())
                self.finish_reason = "length" if item.finish_reason == "length" else "stop"
            if self._scanner.matched is not None:
                self.finish_reason = "stop"
            if self.finish_reason is not None:
                break
        pieces = self._parse("".join(text))
        unseen = scored or prompt_scores or (token_ids if self._token_ids else [])
        if not pieces and not unseen and self.finish_reason is None:
            if self.sequence.error is not None and self.sequence.ended:
                raise self.sequence.error
            return None
        part = AnswerPart(
            index=self.index,
            pieces=pieces,
            begins=not self._has_begun,
            token_ids=token_ids,
            logprobs=None if self._num_logprobs is None else scored,
            prompt_logprobs=prompt_scores,
            finish_reason=self.finish_reason,
            stop=self._scanner.matched,
        )
        self._has_begun = True
        return part

    @property
    def reasoning_tokens(self) -> int:
        """The reasoning tokens so far."""
        return 0 if self._reasoning is None else self._reasoning.num_tokens

    def _parse(self, text: str) -> list[Piece]:
        """Parses the next text into pieces; at the end of the answer, complete calls set the finish reason to `tool_calls`."""
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

    def _scored(self, item: Taken) -> ScoredToken:
        if item.logprob is None:
            raise MmdError("the worker sent a token without the requested log probability")
        likeliest = item.top_logprobs[: self._num_logprobs]  # there are more if the prompt has more
        scored = self._token(item.token_id, item.logprob, likeliest, begins=self._text_begins)
        self._text_begins = self._text_begins and scored.token.is_special
        return scored

    def _prompt(self, logprobs: Sequence[PromptLogprob]) -> list[ScoredToken]:
        """The tokens of the prompt; the first has no context, so it has no probability."""
        first, *others = self.sequence.state.spec.token_ids
        if len(logprobs) != len(others):
            raise MmdError("the worker sent no log probabilities of the prompt, or not all")
        tokens = [self._token(first, None, [], begins=True)]
        begins = tokens[0].token.is_special
        for token_id, scored in zip(others, logprobs, strict=True):
            token = self._token(token_id, scored.logprob, scored.top_logprobs, begins=begins)
            begins = begins and token.token.is_special
            tokens.append(token)
        return tokens

    def _token(
        self, token_id: int, logprob: float | None, likeliest: Sequence[TokenLogprob], *, begins: bool
    ) -> ScoredToken:
        texts = self._token_texts
        candidates = [
            Candidate(one.token_id, texts.of(one.token_id, begins=begins), one.logprob) for one in likeliest
        ]
        return ScoredToken(token_id, texts.of(token_id, begins=begins), logprob, candidates)
