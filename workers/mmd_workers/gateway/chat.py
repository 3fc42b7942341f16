"""From tokens to what the client sees: text, stop strings, log probabilities, usage, chunks. Knows no HTTP and no worker."""

from __future__ import annotations

from collections.abc import Sequence as Items

from mmd_workers.errors import MmdError
from mmd_workers.gateway.api import (
    ChoiceLogprobs,
    ChunkChoice,
    Delta,
    FinishReason,
    PromptTokensDetails,
    TokenLogprobs,
    TopLogprob,
    Usage,
)
from mmd_workers.gateway.detokenizer import REPLACEMENT, IncrementalDetokenizer, StopScanner
from mmd_workers.gateway.lifecycle import Sequence
from mmd_workers.model.types import Frontend, PromptLayout
from mmd_workers.wire.messages import TokenItem


class ChoiceStream:
    """One of the n answers of a request, as it grows."""

    def __init__(
        self, index: int, sequence: Sequence, frontend: Frontend, stops: Items[str], logprobs: bool
    ) -> None:
        self.index = index
        self.sequence = sequence
        self.finish_reason: FinishReason | None = None
        self.completion_tokens = 0
        self._frontend = frontend
        self._detokenizer = IncrementalDetokenizer(frontend.decode)
        self._scanner = StopScanner(stops)
        self._logprobs = logprobs
        self._begun = False

    def advance(self) -> ChunkChoice | None:
        """What has come since the last call; None: nothing to show.

        Raises:
            MmdError: the sequence failed, after everything before the failure has been returned.
        """
        if self.finish_reason is not None:
            return None
        text: list[str] = []
        entries: list[TokenLogprobs] = []
        for item in self.sequence.take():
            self.completion_tokens += 1
            text.append(self._scanner.push(self._detokenizer.push([item.token_id])))
            if self._logprobs:
                entries.append(self._entry(item))
            if item.finish_reason is not None and self._scanner.matched is None:
                text.append(self._scanner.push(self._detokenizer.flush()))
                text.append(self._scanner.flush())
                self.finish_reason = "length" if item.finish_reason == "length" else "stop"
            if self._scanner.matched is not None:
                self.finish_reason = "stop"
            if self.finish_reason is not None:
                break
        piece = "".join(text)
        if not piece and not entries and self.finish_reason is None:
            if self.sequence.error is not None and self.sequence.ended:
                raise self.sequence.error
            return None
        delta = Delta(content=piece) if self._begun else Delta(role="assistant", content=piece)
        self._begun = True
        return ChunkChoice(
            index=self.index,
            delta=delta,
            logprobs=ChoiceLogprobs(content=entries) if self._logprobs else None,
            finish_reason=self.finish_reason,
        )

    def _entry(self, item: TokenItem) -> TokenLogprobs:
        if item.logprob is None:
            raise MmdError("the worker sent a token without the log probability that was asked for")
        return TokenLogprobs(
            token=(own := self._text(item.token_id)),
            logprob=item.logprob,
            bytes=_utf8(own),
            top_logprobs=[
                TopLogprob(token=(other := self._text(top.token_id)), logprob=top.logprob, bytes=_utf8(other))
                for top in item.top_logprobs
            ],
        )

    def _text(self, token_id: int) -> str:
        return self._frontend.decode([token_id])


def _utf8(token: str) -> list[int] | None:
    """A token's bytes; None where it is part of a character and its text cannot show them."""
    return None if REPLACEMENT in token else list(token.encode())


def usage_of(layout: PromptLayout, completion_tokens: int, cached_tokens: int) -> Usage:
    """Counts by modality; the prompt is counted once, whatever n."""
    by_modality = {"image": 0, "video": 0, "audio": 0}
    for medium in layout.media:
        by_modality[medium.modality] += medium.num_tokens
    prompt = len(layout.token_ids)
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
        ),
    )
