"""Turns chat messages and facts of media into token ids, without weights and decoding. Independent of the network and towers.

Counts come from the model's own processors, run on tensors that have a shape but no data (see `inputs`).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from jinja2 import TemplateError
from transformers import AutoProcessor, AutoTokenizer
from transformers.processing_utils import ProcessorMixin
from transformers.video_utils import VideoMetadata

from mmd_api.contract.errors import CountMismatchError, UnsupportedInputError, UnsupportedModelError
from mmd_api.contract.pools import MODALITIES, Modality
from mmd_api.spec.media import MediaPolicy
from mmd_api.spec.model import ModelSpec
from mmd_workers.media.choice import NO_CHOICE, FoundFrame, SamplingChoice, thinned
from mmd_workers.media.medium import MediumInfo
from mmd_workers.media.reduction import MediaAmount
from mmd_workers.model import call_forms, source
from mmd_workers.model import inputs as media_inputs
from mmd_workers.model import reasoning as reasoning_forms
from mmd_workers.model.adapters import adapter_for
from mmd_workers.model.adapters.base import Adapter
from mmd_workers.model.call_forms import Spelling
from mmd_workers.model.control_tokens import ControlTokens
from mmd_workers.model.dry_runs import Probe, ProbeCache
from mmd_workers.model.frame_pooling import check_pooling, grouped
from mmd_workers.model.grammar import Grammars
from mmd_workers.model.inputs import MediaInputs
from mmd_workers.model.prompt import MediumLayout, PromptLayout, RenderedPrompt, SamplingPlan
from mmd_workers.model.reasoning import Reasoning
from mmd_workers.model.tiles import bound_tiles

PROBES_BYTES = 64 << 20  # budget for the probes of media sizes seen before
_WRITTEN = frozenset({"content", "reasoning_content", "tool_calls", "tool_call_id", "name"})
"""Fields of a message with text by the user."""
LOW_DETAIL_SIDE = 512  # pixels of an image's side, as OpenAI documents it
_ROUNDED_UP = 1 + 1e-9
"""Processors truncate the product of a rate and a duration to a number of frames."""
PROCESSOR_ERRORS = (
    ValueError,
    ZeroDivisionError,
    RuntimeError,
    IndexError,
    TypeError,
    AttributeError,
    KeyError,
)


class HfFrontend:
    """The tokenizer, chat template and placeholder arithmetic of one model. Thread safe.

    `tokenizer` is the Hugging Face tokenizer, for incremental detokenisation. A text becomes at least as many tokens as its
    characters divided by `longest_token_characters`.
    """

    def __init__(
        self,
        tokenizer: Any,
        processor: Any | None,
        adapter: Adapter,
        policy: MediaPolicy,
        eos_token_ids: frozenset[int],
        max_model_len: int,
        pooled_frames: int = 1,
    ) -> None:
        """`pooled_frames`: number of successive frames of a video that become one."""
        self.tokenizer = tokenizer
        self.eos_token_ids = eos_token_ids
        self.max_model_len = max_model_len
        self.vocab_size = int(adapter.config.get_text_config().vocab_size)
        self.longest_token_characters = max(map(len, tokenizer.get_vocab()))
        self.modalities: frozenset[Modality] = adapter.modalities(processor) if processor else frozenset()
        self.takes_sound_of_videos = adapter.interleaves_sound and {"video", "audio"} <= self.modalities
        self.grammars = Grammars(lambda: tokenizer, self.vocab_size, eos_token_ids)
        self._adapter = adapter
        self._processor = processor
        self._policy = policy
        self._pooled_frames = pooled_frames
        self._inputs = MediaInputs(processor, shapes_only=True) if processor else None
        self._placeholder: dict[Modality, str] = {}
        for modality in self.modalities:
            token_id = adapter.placeholder_id(modality)
            self._placeholder[modality] = str(tokenizer.convert_ids_to_tokens(token_id))
        self.placeholder_ids = frozenset(adapter.placeholder_ids(self.vocab_size))
        self._placeholder_ids = {adapter.placeholder_id(m) for m in self.modalities}
        self._control_tokens = ControlTokens(tokenizer.added_tokens_encoder)
        # The first call overrides settings of the tokenizer's file, such as truncation; later calls change nothing of a fast tokenizer.
        tokenizer("")
        self._lock: contextlib.AbstractContextManager[Any] = (
            contextlib.nullcontext() if tokenizer.is_fast else threading.Lock()
        )
        self._probe = ProbeCache(self._probe_uncached, PROBES_BYTES)

    def layout(
        self,
        messages: Sequence[dict[str, Any]],
        media: Sequence[MediumInfo],
        tools: Sequence[dict[str, Any]] = (),
        reasons: bool | None = None,
        choices: Sequence[SamplingChoice] = (),
    ) -> PromptLayout:
        """Lay out a conversation: `render` it and encode the text."""
        return self.render(messages, media, tools, reasons, choices).encode()

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        media: Sequence[MediumInfo],
        tools: Sequence[dict[str, Any]] = (),
        reasons: bool | None = None,
        choices: Sequence[SamplingChoice] = (),
    ) -> RenderedPrompt:
        """Render a conversation. Content parts are {"type": "text"|"image"|"video"|"audio", ...}; media in order of use.

        Tools, calls and their results are in the shape of Hugging Face's chat templates: the arguments of a call as an object. An
        assistant's message may have `reasoning_content`. `reasons`, `choices`: see `Frontend.render`.

        Ranges of `PromptLayout.media` are in the order of `media`, even if the model's template moves a medium. A sound that is
        `of_video` has an audio part behind the part of its video. The template does not get it: the model's processor puts the tokens
        of the sound among the video's tokens.

        Raises:
            UnsupportedInputError: the model cannot take this modality or size, or its template these messages; the message names the
                part and the remedy.
            CountMismatchError: the tokenizer did not keep a placeholder; the checkpoint's tokenizer and template disagree.
        """
        self._check_parts(messages, media)
        self._check_tool_calls(messages)
        sanitize = self._mentions_control_token(messages, tools)
        messages = _without_sounds_of_videos(messages, media)
        if sanitize:
            messages = self._mark(messages)
            tools = self._marked(list(tools), keys=True)
        reasoning = self.reasoning
        if any("reasoning_content" in message for message in messages):
            place = "" if reasoning is None else reasoning.history
            messages = [reasoning_forms.with_reasoning(message, place) for message in messages]
        variables = {} if reasoning is None else reasoning.variables(reasons)
        if self._processor is None:
            text = self._render(messages, tools, variables)
            begins = None if reasoning is None else reasoning.begin_after(text)
            return RenderedPrompt(
                len(text),
                begins,
                lambda: PromptLayout(self._encode(text, sanitize, add_special_tokens=False), []),
            )
        choices = choices or [NO_CHOICE] * len(media)
        plans = [
            self._sampling(number, info, choice)
            for number, (info, choice) in enumerate(zip(media, choices, strict=True))
        ]
        probes = [
            self._probe_medium(n, info, plan) for n, (info, plan) in enumerate(zip(media, plans, strict=True))
        ]
        text = self._render(messages, tools, variables)
        begins = None if reasoning is None else reasoning.begin_after(text)
        return RenderedPrompt(len(text), begins, lambda: self._expanded(text, sanitize, media, plans, probes))

    def _expanded(
        self,
        text: str,
        sanitize: bool,
        media: Sequence[MediumInfo],
        plans: Sequence[SamplingPlan],
        probes: Sequence[Probe],
    ) -> PromptLayout:
        replacements: dict[str, list[str]] = {}
        for number, (info, probe) in enumerate(zip(media, probes, strict=True)):
            if info.of_video:
                continue
            replacement = probe.replacement
            if len(_group(media, number)) > 1:
                assert self._inputs is not None
                tokens = probes[number + 1].replacement.count(self._placeholder["audio"])
                replacement = self._adapter.video_with_sound(self._inputs, probe.geometry, tokens)
            replacements.setdefault(info.modality, []).append(replacement)
        expanded, order = self._adapter.expand(self._processor, text, replacements)
        token_ids = self._encode(expanded, sanitize)
        return PromptLayout(token_ids, self._place(token_ids, media, plans, probes, order))

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Encode a text in which control tokens count as such.

        `special_tokens`: add the tokens that the tokenizer puts around a text, unless the text begins with the first of them.
        """
        return self._encode(text, sanitize=False, add_special_tokens=None if special_tokens else False)

    def decode(
        self, token_ids: Sequence[int], *, special_tokens: bool = False, kept: AbstractSet[int] = frozenset()
    ) -> str:
        """Decode token ids to text. Special tokens are skipped, unless they are `kept` or `special_tokens` is true."""
        if kept.isdisjoint(token_ids):
            return self._decode(list(token_ids), special_tokens)
        text, part = "", list[int]()
        for token_id in token_ids:
            if token_id in kept:
                text += self._decode(part, special_tokens) + str(self.tokenizer.decode([token_id]))
                part = []
            else:
                part.append(token_id)
        return text + self._decode(part, special_tokens)

    def _decode(self, token_ids: list[int], special_tokens: bool) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=not special_tokens))

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """How the vocabulary spells these tokens; "" for an id without a token."""
        return [token or "" for token in self.tokenizer.convert_ids_to_tokens(list(token_ids))]

    def sequences_of(self, word: str) -> list[list[int]]:
        """Token ids of a word at the beginning of a text, and also after a space, as vLLM has them.

        The second sequence is left out unless it begins with another token and has as many. Empty if the word is spaces alone.
        """
        word = word.lstrip()
        first = self._encode(word, sanitize=False, add_special_tokens=False)
        if not first:
            return []
        spaced = self._encode(f" {word}", sanitize=False, add_special_tokens=False)
        other = len(spaced) == len(first) and spaced[0] != first[0]
        return [first, spaced] if other else [first]

    def _check_parts(self, messages: Sequence[dict[str, Any]], media: Sequence[MediumInfo]) -> None:
        wanted: list[str] = []
        for m, message in enumerate(messages):
            content = message.get("content")
            for p, part in enumerate(content if isinstance(content, list) else []):
                kind = part.get("type")
                if kind in MODALITIES:
                    if kind not in self.modalities:
                        takes = ", ".join(sorted(self.modalities)) or "text only"
                        raise UnsupportedInputError(
                            f"messages[{m}].content[{p}]: this model does not accept {kind} (accepted: {takes}); "
                            "remove the part or use another model"
                        )
                    wanted.append(kind)
                elif kind != "text":
                    raise UnsupportedInputError(
                        f"messages[{m}].content[{p}].type: {kind!r} is unknown; use text, image, video or audio"
                    )
        given = [info.modality for info in media]
        if wanted != given:
            raise UnsupportedInputError(
                f"messages reference the media {wanted}, but {given} were passed; pass them in order of use"
            )

    def _check_tool_calls(self, messages: Sequence[dict[str, Any]]) -> None:
        """Refuse parts of messages that the template would silently leave out."""
        for m, message in enumerate(messages):
            if (message.get("tool_calls") or message["role"] == "tool") and not self._renders_tool_calls:
                field = "tool_calls" if message.get("tool_calls") else "role"
                raise UnsupportedInputError(
                    f"messages[{m}].{field}: this model's chat template does not render tool calls and their results; "
                    "describe them in the content of assistant and user messages, or use another model"
                )

    @functools.cached_property
    def _renders_tool_calls(self) -> bool:
        """Whether the template's text has the name, the arguments and the result of a call."""
        return call_forms.renders_call(self._rendered_if_possible(call_forms.probed_call()))

    @functools.cached_property
    def renders_tools(self) -> bool:
        """Whether the model's template has a place for tools. The first access takes milliseconds."""
        conversation = call_forms.probed_call()[:1]
        return call_forms.renders_tool(self._rendered_if_possible(conversation, [call_forms.probed_tool()]))

    @functools.cached_property
    def call_spelling(self) -> Spelling | None:
        """How the model writes calls of tools; None: in no known form. The first access takes milliseconds."""
        conversation = call_forms.probed_call()
        added = self.tokenizer.added_tokens_encoder
        tokens = {token: int(added[token]) for token in call_forms.MAY_BE_TOKENS if token in added}
        before = self._rendered_if_possible(conversation[:1])
        return call_forms.spelling_of(self._rendered_if_possible(conversation), before, tokens)

    @functools.cached_property
    def reasoning(self) -> Reasoning | None:
        """How the model reasons before it answers; None: in no known form. The first access takes milliseconds."""
        templates = [getattr(owner, "chat_template", None) for owner in (self._processor, self.tokenizer)]
        sources = [
            source
            for template in templates
            for source in (template.values() if isinstance(template, dict) else [template])
            if isinstance(source, str)
        ]
        return reasoning_forms.found_reasoning(
            sources,
            self.tokenizer.added_tokens_encoder,
            lambda messages, variables: self._rendered_if_possible(messages, variables=variables),
            call_forms.probed_call(),
        )

    def _rendered_if_possible(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] = (),
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        try:
            return self._render(messages, tools, variables)
        except UnsupportedInputError:
            return ""

    def _mentions_control_token(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]
    ) -> bool:
        return any(
            self._control_tokens.appear_in(text)
            for message in messages
            for key in _WRITTEN & message.keys()
            for text in _written(message[key])
        ) or any(map(self._control_tokens.appear_in, _written(list(tools), keys=True)))

    def _mark(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Mark control tokens that users wrote, so that they are neither replaced nor encoded as such."""
        return [
            {**message, **{key: self._marked(message[key]) for key in _WRITTEN & message.keys()}}
            for message in messages
        ]

    def _marked(self, value: Any, *, keys: bool = False) -> Any:
        """`value` with its control tokens marked. `keys`: also in the names of fields, which the user chose."""
        if isinstance(value, dict):
            return {
                (self._marked(name) if keys else name): (
                    field
                    if name == "type" and not keys
                    else self._marked(field, keys=keys or name == "arguments")
                )
                for name, field in value.items()
            }
        if isinstance(value, list):
            return [self._marked(item, keys=keys) for item in value]
        return self._control_tokens.marked(value) if isinstance(value, str) else value

    def _render(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]],
        variables: Mapping[str, Any],
    ) -> str:
        """Render a conversation to text, with one marker for each medium.

        Raises:
            UnsupportedInputError: the template refuses it, as many refuse roles that do not alternate.
        """
        try:
            if self._processor is not None:
                return self._adapter.render(self._processor, _as_parts(messages), tools, **variables)
            return str(
                self.tokenizer.apply_chat_template(
                    _as_text(messages),
                    tools=list(tools) or None,
                    tokenize=False,
                    add_generation_prompt=True,
                    **variables,
                )
            )
        except (TemplateError, *PROCESSOR_ERRORS) as error:
            raise UnsupportedInputError(
                f"messages: this model's chat template cannot render them: {str(error)[:300]}; change their roles, order or content"
            ) from error

    def _encode(self, text: str, sanitize: bool, add_special_tokens: bool | None = None) -> list[int]:
        if add_special_tokens is None:
            # As in the processors: a template that writes the first token writes all of them.
            bos = self.tokenizer.bos_token
            add_special_tokens = not (bos and text.startswith(bos))
        with self._lock:  # only a tokenizer written in Python has a real lock
            if not sanitize:
                return [
                    int(i) for i in self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
                ]
            ids = self.tokenizer(text, add_special_tokens=False, sanitize_control_tokens=True)["input_ids"]
            first = self.tokenizer("", add_special_tokens=True)["input_ids"][:1] if add_special_tokens else []
        return [int(i) for i in [*(i for i in first if i == self.tokenizer.bos_token_id), *ids]]

    def _sampling(self, number: int, info: MediumInfo, choice: SamplingChoice) -> SamplingPlan:
        if info.modality == "video":
            try:
                if choice.searches:
                    plan = self._plan_of_found(number, choice)
                else:
                    plan = SamplingPlan(frame_indices=self._frame_indices(number, info, choice))
            except PROCESSOR_ERRORS as error:
                raise UnsupportedInputError(
                    f"medium {number} (video, {info.num_frames} frames): this model's processor cannot sample it: {error}; request another "
                    "number of frames"
                ) from error
            return self._with_frame_size(number, info, choice, grouped(plan, self._pooled_frames))
        if info.modality == "audio":
            assert self._processor is not None
            rate = int(self._processor.feature_extractor.sampling_rate)
            samples = self._samples(info, rate)
            limit = self._adapter.max_audio_samples(self._processor)
            if limit and samples > limit:
                if self._policy.audio.too_long == "Reject":
                    raise UnsupportedInputError(
                        f"medium {number} (audio) lasts {samples / rate:.1f} s, but this model accepts at most {limit / rate:.1f} s; send a "
                        "shorter clip or several clips, or set spec.gateway.media.audio.tooLong to Truncate"
                    )
                samples = limit
            return SamplingPlan(sample_rate_hz=rate, num_samples=samples, of_video=info.of_video)
        return replace(self._image_plan(number, info, choice), page=info.page)

    def _image_plan(self, number: int, info: MediumInfo, choice: SamplingChoice) -> SamplingPlan:
        """The plan of an image. If the choice changes nothing, it is the plan without one."""
        plain = SamplingPlan()
        if choice.min_pixels is None and choice.max_pixels is None and not choice.low_detail:
            return plain
        assert self._processor is not None
        images = self._processor.image_processor
        default = {name: int(edge) for name, edge in dict(images.size).items() if edge}
        if not self._adapter.bounds_pixels(images):
            if choice.min_pixels is not None or choice.max_pixels is not None:
                raise UnsupportedInputError(
                    f"medium {number} (image): min_pixels and max_pixels: this model's processor takes no number of pixels; omit them"
                )
            lower = set(default) == {"longest_edge"} and default["longest_edge"] > LOW_DETAIL_SIDE
            plan = SamplingPlan(size={"longest_edge": LOW_DETAIL_SIDE}) if lower else plain
            same = self._probe_medium(number, info, plan) == self._probe_medium(number, info, plain)
            return plain if same else plan
        for name, pixels in (("min_pixels", choice.min_pixels), ("max_pixels", choice.max_pixels)):
            if pixels is not None and pixels > default["longest_edge"]:
                raise UnsupportedInputError(
                    f"medium {number} (image): {name}: {pixels} are more than this model's processor makes of an image, which is "
                    f"{default['longest_edge']}; request fewer"
                )
        most = choice.max_pixels or default["longest_edge"]
        if choice.low_detail:
            most = min(most, LOW_DETAIL_SIDE**2)
        least = min(most, choice.min_pixels or default["shortest_edge"])
        plan = SamplingPlan(size={"shortest_edge": least, "longest_edge": most})
        probe = self._probe_medium(number, info, plan)
        if probe == self._probe_medium(number, info, plain):
            return plain
        # Rounding may exceed the maximum for an image far from square.
        if (pixels := _pixels(probe, images)) > default["longest_edge"]:
            raise UnsupportedInputError(
                f"medium {number} (image): min_pixels: this model's processor would make {pixels} pixels of {info.width}x{info.height}, more "
                f"than its maximum of {default['longest_edge']}; request fewer"
            )
        return plan

    def amounts(self, media: Sequence[MediumInfo], choices: Sequence[SamplingChoice]) -> list[MediaAmount]:
        """See `Frontend.amounts`."""
        return [
            self._amount(number, info, choice)
            for number, (info, choice) in enumerate(zip(media, choices, strict=True))
        ]

    def _amount(self, number: int, info: MediumInfo, choice: SamplingChoice) -> MediaAmount:
        if self._processor is None or info.modality == "audio":
            return MediaAmount()
        plan = self._sampling(number, info, choice)
        frames = len(plan.frame_indices)
        is_video = info.modality == "video"
        resizer = self._processor.video_processor if is_video else self._processor.image_processor
        shares_pixels = is_video and self._adapter.frames_share_pixels(resizer)
        if not (self._adapter.bounds_pixels(resizer) or shares_pixels):
            return MediaAmount(frames)
        pixels = _pixels(self._probe_medium(number, info, plan), resizer)
        side = int(resizer.patch_size) * int(getattr(resizer, "merge_size", 1))
        return MediaAmount(frames, pixels, least_pixels=side**2)

    def _with_frame_size(
        self, number: int, info: MediumInfo, choice: SamplingChoice, plain: SamplingPlan
    ) -> SamplingPlan:
        """The plan of a video with bounded frames. If the bound changes nothing, it is the plan without one."""
        assert self._processor is not None
        assert self._inputs is not None
        videos = self._processor.video_processor
        shares_pixels = self._adapter.frames_share_pixels(videos)
        if choice.max_frame_pixels is None or not (self._adapter.bounds_pixels(videos) or shares_pixels):
            return plain
        most, default = choice.max_frame_pixels, self._inputs.video_size
        if shares_pixels:
            frames, group = len(plain.frame_indices), int(getattr(videos, "temporal_patch_size", None) or 1)
            most *= frames + -frames % group
        if most >= default["longest_edge"]:
            return plain
        size = {"shortest_edge": min(most, default["shortest_edge"]), "longest_edge": most}
        plan = replace(plain, size=size)
        same = self._probe_medium(number, info, plan) == self._probe_medium(number, info, plain)
        return plain if same else plan

    def _samples(self, info: MediumInfo, rate: int) -> int:
        """Number of samples of a whole sound at the model's rate."""
        return (info.num_samples * rate + info.sample_rate_hz - 1) // max(info.sample_rate_hz, 1)

    def _truncated_seconds(self, info: MediumInfo, plan: SamplingPlan) -> float:
        if info.modality != "audio":
            return 0.0
        return (self._samples(info, plan.sample_rate_hz) - plan.num_samples) / plan.sample_rate_hz

    def _frame_indices(self, number: int, info: MediumInfo, choice: SamplingChoice) -> list[int]:
        """Frames chosen by the model's own video processor for this choice, thinned evenly to the limit."""
        assert self._processor is not None
        chooser, total = self._processor.video_processor, info.num_frames
        if total < 1 or info.fps <= 0:
            raise UnsupportedInputError(
                f"medium {number} (video) has no frames or no frame rate; re-encode the file"
            )
        group, most, limit = self._frame_limits(choice)
        is_requested = choice.fps is not None or choice.num_frames is not None
        least = min(total, group if is_requested else 2 * group)
        if total == least:
            return thinned(range(total), limit)
        options = self._frames_wished(number, info, choice, group, least, most)
        if (
            choice.max_frames is not None
            and "max_frames" in inspect.signature(chooser.sample_frames).parameters
        ):
            options["max_frames"] = max(group, limit)
        metadata = VideoMetadata(
            total_num_frames=total,
            fps=info.fps,
            duration=total / info.fps,
            width=info.width,
            height=info.height,
        )
        chosen = {min(total - 1, max(0, int(i))) for i in chooser.sample_frames(metadata=metadata, **options)}
        return thinned(sorted(chosen), limit)

    def _frame_limits(self, choice: SamplingChoice) -> tuple[int, int, int]:
        """Frames of a group (a temporal patch, or frames to be pooled), the most of a video, and the most in whole groups."""
        assert self._processor is not None
        group = int(getattr(self._processor.video_processor, "temporal_patch_size", None) or 1)
        group = max(group, self._pooled_frames)
        most = self._policy.video.max_frames
        if choice.max_frames is not None:
            most = min(most, max(group, choice.max_frames))
        return group, most, max(1, most - most % group)

    def _plan_of_found(self, number: int, choice: SamplingChoice) -> SamplingPlan:
        """The plan of the frames found in the video, thinned evenly to the limit.

        Nothing is added to frames of timestamps. Others are filled up as the model needs: whole temporal patches, and two of them.
        """
        assert self._processor is not None
        assert choice.found is not None
        chooser, found = self._processor.video_processor, choice.found.frames
        group, most, limit = self._frame_limits(choice)
        if choice.timestamps is not None:
            if len(found) > limit and choice.max_frames is None:
                raise UnsupportedInputError(
                    f"medium {number} (video): timestamps: {len(found)} frames are more than the {limit} that this model takes of at most {most}; "
                    "request fewer, or raise spec.gateway.media.video.maxFrames"
                )
            return _plan_of(thinned(found, limit), group)
        for maximum in (getattr(chooser, "num_frames", None), getattr(chooser, "max_frames", None)):
            limit = min(limit, max(group, maximum - maximum % group)) if maximum else limit
        frames = thinned(found, limit)
        whole = -(-len(frames) // group) * group
        return _plan_of(choice.found.filled(frames, min(limit, max(2 * group, whole))), group)

    def _frames_wished(
        self, number: int, info: MediumInfo, choice: SamplingChoice, group: int, least: int, most: int
    ) -> dict[str, Any]:
        """The arguments with which the model's video processor samples frames.

        `group`: frames of a temporal patch. `least`, `most`: frames of this video. A processor with its own number of frames uses that
        number and not a rate, unless it takes both; a requested rate is converted to the number that it would give otherwise.
        """
        assert self._processor is not None
        chooser, total = self._processor.video_processor, info.num_frames
        parameters = inspect.signature(chooser.sample_frames).parameters
        whole = total - total % group
        if choice.num_frames is not None:
            if "num_frames" not in parameters:
                raise UnsupportedInputError(
                    f"medium {number} (video): num_frames: this model's processor samples by rate alone; use fps"
                )
            return {"num_frames": min(max(choice.num_frames, group), whole)}
        rate = choice.fps or self._policy.video.frames_per_second_milli / 1000
        rate = min(max(rate, _ROUNDED_UP * least * info.fps / total), info.fps)
        own_frames = getattr(chooser, "num_frames", None)
        if own_frames is None:
            return {"fps": rate}
        if "skip_secs" in parameters:
            return {"fps": rate, "num_frames": min(own_frames, most)}
        if choice.fps is not None:
            return {"num_frames": min(max(least, int(total / info.fps * rate)), whole)}
        return {"num_frames": min(own_frames, most, total)}

    def _probe_medium(self, number: int, info: MediumInfo, plan: SamplingPlan) -> Probe:
        try:
            probe = self._probe(
                info.modality,
                info.width,
                info.height,
                tuple(plan.timed_indices),
                info.fps,
                info.num_frames,
                plan.num_samples,
                tuple(sorted(plan.size.items())),
            )
        except PROCESSOR_ERRORS as error:
            what = (
                f"{info.num_samples} samples"
                if info.modality == "audio"
                else f"{info.width} x {info.height} pixels"
            )
            raise UnsupportedInputError(
                f"medium {number} ({info.modality}, {what}): the model's processor rejected it: {error}; send a different size"
            ) from error
        if not probe.replacement.count(self._placeholder[info.modality]):
            others = [p for m, p in self._placeholder.items() if m != info.modality]
            if any(other in probe.replacement for other in others):
                raise UnsupportedInputError(
                    f"medium {number} ({info.modality}): this model's processor marks {info.modality} with tokens other than "
                    f"{self._placeholder[info.modality]}, and no adapter defines them; send another modality, or report the model"
                )
            raise UnsupportedInputError(
                f"medium {number} ({info.modality}) is too short or too small to yield a token"
            )
        return probe

    def _probe_uncached(
        self,
        modality: Modality,
        width: int,
        height: int,
        indices: tuple[int, ...],
        fps: float,
        num_frames: int,
        num_samples: int,
        size: tuple[tuple[str, int], ...],
    ) -> Probe:
        assert self._inputs is not None
        if modality == "audio":
            if num_samples < 1:
                raise ValueError("it has no samples")
            processed = self._adapter.audio(self._inputs, np.broadcast_to(np.float32(0), (num_samples,)))
        elif width < 1 or height < 1:
            raise ValueError("it has no pixels")
        elif modality == "image":
            pixels = torch.empty(3, height, width, dtype=torch.uint8, device="meta")
            processed = self._adapter.image(self._inputs, pixels, dict(size))
        else:
            frames = torch.empty(len(indices), 3, height, width, dtype=torch.uint8, device="meta")
            processed = self._adapter.video(self._inputs, frames, list(indices), fps, num_frames, dict(size))
        facts = media_inputs.geometry(processed.outputs)
        inputs = media_inputs.tensors(processed.outputs)
        work = self._adapter.work(inputs, facts)
        if modality == "video":
            facts |= {"source_fps": fps, "source_num_frames": num_frames}
        input_bytes = sum(tensor.numel() * tensor.element_size() for tensor in inputs.values())
        return Probe(processed.replacement, facts, work, input_bytes)

    def _place(
        self,
        token_ids: list[int],
        media: Sequence[MediumInfo],
        plans: Sequence[SamplingPlan],
        probes: Sequence[Probe],
        order: Sequence[Modality],
    ) -> list[MediumLayout]:
        """Assign the placeholder positions to the media. Markers of one modality keep the order of their media."""
        positions = iter([i for i, token in enumerate(token_ids) if token in self._placeholder_ids])
        total = sum(
            p.replacement.count(self._placeholder[i.modality]) for i, p in zip(media, probes, strict=True)
        )
        found = sum(1 for token in token_ids if token in self._placeholder_ids)
        if total != found or len(order) != sum(not info.of_video for info in media):
            raise CountMismatchError(
                f"{total} placeholders of {len(media)} media were laid out, but the template and tokenizer made {found} of "
                f"{len(order)}; the checkpoint's chat template and tokenizer disagree"
            )
        queues = {
            modality: iter([n for n, m in enumerate(media) if m.modality == modality and not m.of_video])
            for modality in MODALITIES
        }
        placed: dict[int, MediumLayout] = {}
        for modality in order:
            group = _group(media, next(queues[modality]))
            counts = {n: probes[n].replacement.count(self._placeholder[media[n].modality]) for n in group}
            group_positions = [next(positions) for _ in range(sum(counts.values()))]
            for number in group:
                own = group_positions
                if len(group) > 1:
                    token = self._adapter.placeholder_id(media[number].modality)
                    own = [position for position in group_positions if token_ids[position] == token]
                if len(own) != counts[number]:
                    raise CountMismatchError(
                        f"medium {number} ({media[number].modality}) has {counts[number]} placeholders, but {len(own)} beside those of the same "
                        "file; the checkpoint's processor disagrees with itself"
                    )
                placed[number] = self._placed(media[number], plans[number], probes[number], own)
        return [placed[n] for n in range(len(media))]

    def _placed(
        self, info: MediumInfo, plan: SamplingPlan, probe: Probe, positions: Sequence[int]
    ) -> MediumLayout:
        decoded = info.decoded_bytes(len(plan.frame_indices), plan.num_samples)
        return MediumLayout(
            modality=info.modality,
            num_tokens=len(positions),
            ranges=_runs(positions),
            geometry=probe.geometry,
            sampling=plan,
            work=probe.work * plan.pooled_frames,
            host_bytes=decoded + probe.input_bytes * plan.pooled_frames,
            truncated_seconds=self._truncated_seconds(info, plan),
        )


def _group(media: Sequence[MediumInfo], number: int) -> list[int]:
    """Numbers of the media behind one marker: a video and its sound, or another medium alone."""
    following = number + 1
    return [number, following] if following < len(media) and media[following].of_video else [number]


def _without_sounds_of_videos(
    messages: Sequence[dict[str, Any]], media: Sequence[MediumInfo]
) -> Sequence[dict[str, Any]]:
    """The messages without the audio parts of videos' sounds, which have no marker."""
    if not any(info.of_video for info in media):
        return messages
    remaining = iter(media)
    stripped = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            content = [p for p in content if p.get("type") not in MODALITIES or not next(remaining).of_video]
        stripped.append({**message, "content": content})
    return stripped


def _plan_of(chosen: Sequence[FoundFrame], group: int) -> SamplingPlan:
    """The plan of these frames. The last one is repeated up to a whole temporal patch, as processors do if they take fewer."""
    frames = [*chosen, *[chosen[-1]] * (group - len(chosen))]
    indices, nominal = [frame.index for frame in frames], [frame.nominal for frame in frames]
    return SamplingPlan(frame_indices=indices, nominal_indices=[] if nominal == indices else nominal)


def _pixels(probe: Probe, processor: Any) -> int:
    """Pixels of an image, or of each frame of a video, after such a processor has resized it."""
    (grid,) = next(value for name, value in probe.geometry.items() if name.endswith("grid_thw"))
    return int(grid[-2] * grid[-1] * int(processor.patch_size) ** 2)


def _runs(positions: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending positions as [start, length] runs."""
    runs: list[tuple[int, int]] = []
    for position in positions:
        if runs and runs[-1][0] + runs[-1][1] == position:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((position, 1))
    return runs


def _written(value: Any, *, keys: bool = False) -> Iterator[str]:
    """Every text by the user in these fields of a message. `keys`: names of fields are by the user, too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, field in value.items():
            if keys:
                yield name
            if keys or name != "type":
                yield from _written(field, keys=keys or name == "arguments")
    elif isinstance(value, list):
        for item in value:
            yield from _written(item, keys=keys)


def _as_parts(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Content as a list of parts, and results of tools as text, as templates of multimodal models read them.

    A part keeps only its type and its text, or its reasoning.
    """
    normal = []
    for message in messages:
        content = message.get("content")
        if message["role"] == "tool":
            normal.extend(_as_text([message]))
            continue
        if isinstance(content, list):
            parts = [{k: v for k, v in part.items() if k in ("type", "text", "thinking")} for part in content]
        else:
            parts = [{"type": "text", "text": content or ""}]
        normal.append({**message, "content": parts})
    return normal


def _as_text(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Content as one string, as templates of text models read it; parts stay if one of them is the reasoning."""
    normal = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list) and not any("thinking" in part for part in content):
            content = "".join(part.get("text", "") for part in content)
        normal.append({**message, "content": content or ""})
    return normal


def load_processor(folder: Path, adapter: Adapter, model: ModelSpec) -> tuple[Any, Any | None]:
    """Load the tokenizer and, for multimodal models, the processor, with the tiles that `model` allows.

    Raises:
        UnsupportedModelError: the folder has no usable tokenizer or processor, its images cannot have so many tiles, or frames of its videos
            cannot be pooled.
    """
    try:
        loaded = AutoProcessor.from_pretrained(folder, local_files_only=True)
        if not isinstance(loaded, ProcessorMixin):
            check_pooling(adapter, None, model.pooled_video_frames)
            return AutoTokenizer.from_pretrained(folder, local_files_only=True), None
    except (OSError, ValueError, KeyError, ImportError, TypeError, AttributeError) as error:
        raise UnsupportedModelError(
            f"spec.model.id: the tokenizer or processor in {folder.name!r} cannot be loaded ({error}); the folder needs "
            "tokenizer.json and, for multimodal models, preprocessor_config.json or processor_config.json"
        ) from error
    processor = adapter.prepare_processor(loaded, folder)
    if model.max_image_tiles is not None:
        bound_tiles(processor, model.max_image_tiles)
    check_pooling(adapter, processor, model.pooled_video_frames)
    return processor.tokenizer, processor


def load_frontend(model: ModelSpec, media: MediaPolicy) -> HfFrontend:
    """Load the frontend of a model from settings files alone, without weights.

    Raises:
        UnsupportedModelError: the model is missing or cannot be served; the message names the field and the remedy.
    """
    folder = source.resolve(model, weights=False)
    config = source.load_config(folder)
    adapter = adapter_for(config)
    tokenizer, processor = load_processor(folder, adapter, model)
    if not getattr(processor, "chat_template", None) and not getattr(tokenizer, "chat_template", None):
        raise UnsupportedModelError(
            f"spec.model.id: {model.id!r} has no chat template; add chat_template.jinja to its folder"
        )
    return HfFrontend(
        tokenizer,
        processor,
        adapter,
        media,
        source.eos_token_ids(folder, config),
        source.resolve_max_model_len(model, config),
        model.pooled_video_frames,
    )
