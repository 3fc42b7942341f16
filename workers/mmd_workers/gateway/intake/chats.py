"""From a conversation to its prompt: fetches media, lays out placeholders, and reduces media under load or if the prompt is too long. Independent of workers."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from mmd_api.contract.errors import MmdError
from mmd_workers.gateway.basics.api_errors import refused
from mmd_workers.gateway.basics.body import MARK_BYTES
from mmd_workers.gateway.basics.media_hold import RequestReservation
from mmd_workers.gateway.content.chat_request import ChatRequest
from mmd_workers.gateway.content.conversation import Message, argument_marks, conversation
from mmd_workers.gateway.content.parts import MediaSource
from mmd_workers.gateway.content.tools import ToolUse
from mmd_workers.gateway.intake.checks import (
    SHORTEN,
    RequestChecks,
    arguments_of,
    characters_of,
    check_thoughts,
    indented_characters,
)
from mmd_workers.gateway.intake.file_media import FileMedia
from mmd_workers.gateway.intake.fitting import Fit, fitted, reduced, reported
from mmd_workers.gateway.intake.frame_search import default_choice
from mmd_workers.gateway.intake.media_fetcher import MediaFetcher
from mmd_workers.gateway.intake.prompt_content import PromptContent
from mmd_workers.gateway.intake.tenant_files import Files
from mmd_workers.gateway.intake.text_threads import LONG_TEXT_CHARACTERS, RENDERING_BYTES, TextThreads
from mmd_workers.gateway.intake.truncation import truncated
from mmd_workers.gateway.placement.timeline import Timeline
from mmd_workers.media.choice import SamplingChoice
from mmd_workers.media.reduction import MediaShare
from mmd_workers.model.interfaces import Frontend
from mmd_workers.model.prompt import PromptLayout
from mmd_workers.model.reasoning import Begin
from mmd_workers.wire.messages.message_parts import Phase

_MEDIUM = re.compile(r"medium (\d+) ")
_PART = re.compile(r"messages\[\d+\](\.\w+(\[\d+\])?)+")


@dataclass(frozen=True, slots=True)
class LaidOut:
    """A prompt, its content and sources, and a function to lay out another.

    `begins`: the state of the reasoning at the prompt's end. `text_param`: the field with most of the text.
    """

    layout: PromptLayout
    content: PromptContent
    sources: list[MediaSource]
    begins: Begin | None
    again: Callable[[PromptContent], Awaitable[PromptLayout]]
    text_param: str


class ChatLayout:
    """Lays out the conversations of requests of one model."""

    def __init__(
        self,
        frontend: Frontend,
        checks: RequestChecks,
        fetcher: MediaFetcher,
        threads: TextThreads,
        files: Files | None,
    ) -> None:
        self._frontend, self._checks = frontend, checks
        self._fetcher, self._threads, self._files = fetcher, threads, files

    async def lay_out(
        self,
        messages: Sequence[Message],
        tools: ToolUse | None,
        reservation: RequestReservation,
        timeline: Timeline,
        most_tokens: int,
        remedy: str,
        reasons: bool | None,
        choice: SamplingChoice,
        fit: Fit | None = None,
        share: MediaShare | None = None,
        kept_tokens: int | None = None,
        *,
        continues: bool = False,
    ) -> LaidOut:
        """Fetch, probe and hold the media, and lay out the prompt.

        A text that surely exceeds `most_tokens` is refused first, with this `remedy`. `fit`: if given, frames of videos are omitted to make room.
        `share`: the share of each medium that load permits; None: all. `kept_tokens`: see `truncation.kept_tokens`. `continues`: see
        `Frontend.render`.
        """
        marks, descriptions = (0, []) if tools is None else (tools.marks, tools.for_template)
        await reservation.grow((argument_marks(messages) + marks) * MARK_BYTES)
        turns, sources = conversation(messages)
        characters_of_tools = 0 if tools is None else tools.characters
        characters = sum(map(characters_of, turns)) + characters_of_tools
        text_param = "tools" if 2 * characters_of_tools > characters else "messages"
        self._checks.check_characters(characters, most_tokens, text_param, remedy)
        thoughts = sum(len(turn.get("reasoning_content", "")) for turn in turns)
        check_thoughts(thoughts, most_tokens, remedy)
        self._checks.check_number(sources)
        files = FileMedia(self._files, timeline.tenant)
        sources = await files.settled(sources)
        self._checks.check_media(sources)
        self._checks.check_choice(choice, "mm_processor_kwargs")
        self._checks.check_sound(choice, "mm_processor_kwargs.use_audio_in_video")
        for source in sources:
            self._checks.check_choice(source.choice, source.part)
        default = default_choice(self._checks.policy.video)
        sources = [
            replace(source, choice=source.choice.or_else(choice).or_else(default)) for source in sources
        ]
        values = [*descriptions, *arguments_of(turns)]
        indented = await asyncio.to_thread(lambda: sum(map(indented_characters, values))) if values else 0
        param = "tools" if descriptions else "messages"
        self._checks.check_indented(indented, most_tokens, param, remedy)
        started_at, timeline.at_gateway = time.time(), "fetch"
        turns, sources, infos = await self._fetcher.fetch(turns, sources, files, reservation)
        choices = [source.choice for source in sources]
        fetched_at, timeline.at_gateway = time.time(), "layout"

        async def lay_out(content: PromptContent) -> tuple[PromptLayout, Begin | None]:
            messages, infos, choices = content.messages, content.infos, content.choices
            render = partial(
                self._frontend.render, messages, infos, descriptions, reasons, choices, continues=continues
            )
            num_characters = characters + indented + thoughts
            rendered = await self._threads.encoded(render, num_characters, reservation, RENDERING_BYTES)
            if rendered.num_characters > LONG_TEXT_CHARACTERS:  # shorter texts are checked by their tokens
                self._checks.check_characters(rendered.num_characters, most_tokens, param, remedy)
            layout = await self._threads.encoded(rendered.encode, rendered.num_characters, reservation)
            return layout, rendered.reasoning_begins

        async def lay_out_with(choices: Sequence[SamplingChoice]) -> tuple[PromptLayout, Begin | None]:
            return await lay_out(replace(content, choices=choices))

        async def lay_out_again(content: PromptContent) -> PromptLayout:
            return truncated((await lay_out(content))[0], kept_tokens)

        content = PromptContent(turns, infos, choices, choices)
        try:
            if infos and share is not None:
                content = await asyncio.to_thread(reduced, self._frontend, content, share)
            has_less = content.choices != content.asked
            layout, begins = await lay_out_with(content.choices)
            if fit is not None and len(layout.token_ids) > fit.most:
                layout, content = await fitted(self._frontend, layout, content, fit, lay_out_with)
            if has_less:
                layout = await asyncio.to_thread(reported, self._frontend, content, layout, "load")
            layout = truncated(layout, kept_tokens)
        except MmdError as error:
            raise refused(error, _field_of(error.message, sources)) from error
        timeline.add(
            "gateway", [Phase("fetch", started_at, fetched_at), Phase("layout", fetched_at, time.time())]
        )
        timeline.at_gateway = "placement"
        return LaidOut(layout, content.sampled_as(layout), sources, begins, lay_out_again, text_param)

    async def negative_turn(
        self, request: ChatRequest, limit: int, reservation: RequestReservation
    ) -> list[int] | None:
        """Tokens of a conversation with the negative prompt as its only message; None if there is none, or it is not needed."""
        if not request.is_guided or (text := request.negative_prompt) is None:
            return None
        self._checks.check_characters(len(text), limit - 1, "negative_prompt", SHORTEN)
        messages = [{"role": "user", "content": [{"type": "text", "text": text}]}]
        render = partial(self._frontend.render, messages, [], [], request.reasons)
        try:
            rendered = await self._threads.encoded(render, len(text), reservation, RENDERING_BYTES)
            layout = await self._threads.encoded(rendered.encode, rendered.num_characters, reservation)
        except MmdError as error:
            raise refused(error, "negative_prompt") from error
        return layout.token_ids


def _field_of(message: str, sources: Sequence[MediaSource]) -> str:
    """The path of the field that an error of the frontend is about."""
    if medium := _MEDIUM.match(message):
        return sources[int(medium[1])].param
    part = _PART.match(message)
    return part.group() if part else "messages"
