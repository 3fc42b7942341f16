"""Turns chat messages and facts of media into token ids, without weights and decoding. Independent of the network and towers.

Counts come from the model's own processors, run on tensors that have a shape but no data (see `inputs`).
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from types import MappingProxyType
from typing import Any

from transformers import AutoProcessor, AutoTokenizer
from transformers.processing_utils import ProcessorMixin

from mmd_api.contract.errors import CountMismatchError, UnsupportedInputError, UnsupportedModelError
from mmd_api.contract.pools import MODALITIES, Modality
from mmd_api.spec.media import MediaPolicy
from mmd_api.spec.model import ModelSpec
from mmd_workers.media.choice import NO_CHOICE, SamplingChoice
from mmd_workers.media.medium import MediumInfo
from mmd_workers.media.reduction import MediaAmount
from mmd_workers.model import call_forms, source
from mmd_workers.model import reasoning as reasoning_forms
from mmd_workers.model.adapters import adapter_for
from mmd_workers.model.adapters.base import Adapter
from mmd_workers.model.call_forms import Spelling
from mmd_workers.model.chat_template import ChatTemplate
from mmd_workers.model.frame_pooling import check_pooling
from mmd_workers.model.grammar import Grammars
from mmd_workers.model.inputs import MediaInputs
from mmd_workers.model.probe_cache import Probe
from mmd_workers.model.prompt import MediumLayout, PromptLayout, RenderedPrompt, SamplingPlan
from mmd_workers.model.reasoning import Begin, Reasoning
from mmd_workers.model.sampling_plans import SamplingPlanner, truncated_seconds
from mmd_workers.model.tiles import bound_tiles


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
        sampling_defaults: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """`pooled_frames`: number of successive frames of a video that become one. `sampling_defaults`: see `Frontend`."""
        self.tokenizer = tokenizer
        self.eos_token_ids = eos_token_ids
        self.sampling_defaults = dict(sampling_defaults)
        self.max_model_len = max_model_len
        self.vocab_size = int(adapter.config.get_text_config().vocab_size)
        self.longest_token_characters = max(map(len, tokenizer.get_vocab()))
        self.modalities: frozenset[Modality] = adapter.modalities(processor) if processor else frozenset()
        self.takes_sound_of_videos = adapter.interleaves_sound and {"video", "audio"} <= self.modalities
        self.bidirectional_prompt = adapter.bidirectional == "prompt"
        self.grammars = Grammars(lambda: tokenizer, self.vocab_size, eos_token_ids)
        self._adapter = adapter
        self._processor = processor
        self._inputs = MediaInputs(processor, shapes_only=True) if processor else None
        self._placeholder: dict[Modality, str] = {}
        for modality in self.modalities:
            token_id = adapter.placeholder_id(modality)
            self._placeholder[modality] = str(tokenizer.convert_ids_to_tokens(token_id))
        self.placeholder_ids = frozenset(adapter.placeholder_ids(self.vocab_size))
        self._placeholder_ids = {adapter.placeholder_id(m) for m in self.modalities}
        self._template = ChatTemplate(tokenizer, processor, adapter)
        self._planner = (
            SamplingPlanner(processor, adapter, self._inputs, self._placeholder, policy, pooled_frames)
            if self._inputs is not None
            else None
        )
        # The first call overrides settings of the tokenizer's file, such as truncation; later calls change nothing of a fast tokenizer.
        tokenizer("")
        self._lock: contextlib.AbstractContextManager[Any] = (
            contextlib.nullcontext() if tokenizer.is_fast else threading.Lock()
        )

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
        *,
        continues: bool = False,
    ) -> RenderedPrompt:
        """Render a conversation. Content parts are {"type": "text"|"image"|"video"|"audio", ...}; media in order of use.

        Tools, calls and their results are in the shape of Hugging Face's chat templates: the arguments of a call as an object. An
        assistant's message may have `reasoning_content`. `reasons`, `choices`, `continues`: see `Frontend.render`.

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
        sanitize = self._template.mention_control_tokens(messages, tools)
        messages = _without_sounds_of_videos(messages, media)
        if sanitize:
            messages = self._template.mark(messages)
            tools = self._template.marked(list(tools), keys=True)
        reasoning = self.reasoning
        if any("reasoning_content" in message for message in messages):
            place = "" if reasoning is None else reasoning.history
            messages = [reasoning_forms.with_reasoning(message, place) for message in messages]
        variables = {} if reasoning is None else reasoning.variables(reasons)
        plans: list[SamplingPlan] = []
        probes: list[Probe] = []
        if self._planner is not None:
            choices = choices or [NO_CHOICE] * len(media)
            plans = [
                self._planner.plan(number, info, choice)
                for number, (info, choice) in enumerate(zip(media, choices, strict=True))
            ]
            probes = [
                self._planner.probe(number, info, plan)
                for number, (info, plan) in enumerate(zip(media, plans, strict=True))
            ]
        render = self._template.render_to_continue if continues else self._template.render
        text = render(messages, tools, variables)

        def encoded() -> PromptLayout:
            if self._planner is None:
                return PromptLayout(self._encode(text, sanitize, add_special_tokens=False), [])
            return self._expanded(text, sanitize, media, plans, probes)

        begins: Begin | None = None if reasoning is None else reasoning.begin_after(text)
        if begins == "before" and continues and not _is_blank(messages[-1]):
            begins = "after"
        return RenderedPrompt(len(text), begins, encoded)

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
        render, calls = self._template.render_if_possible, call_forms.probed_call()
        return any(
            call_forms.renders_call(render(calls, tools), render(calls[:1], tools))
            for tools in ([], [call_forms.probed_tool()])
        )

    @functools.cached_property
    def renders_tools(self) -> bool:
        """Whether the model's template has a place for tools. The first access takes milliseconds."""
        conversation = call_forms.probed_call()[:1]
        return call_forms.renders_tool(
            self._template.render_if_possible(conversation, [call_forms.probed_tool()])
        )

    @functools.cached_property
    def call_spelling(self) -> Spelling | None:
        """How the model writes calls of tools; None: in no known form. The first access takes milliseconds."""
        conversation, tools = call_forms.probed_call(), [call_forms.probed_tool()]
        added = self.tokenizer.added_tokens_encoder
        tokens = {token: int(added[token]) for token in call_forms.MAY_BE_TOKENS if token in added}
        before = self._template.render_if_possible(conversation[:1], tools)
        return call_forms.spelling_of(self._template.render_if_possible(conversation, tools), before, tokens)

    @functools.cached_property
    def reasoning(self) -> Reasoning | None:
        """How the model reasons before it answers; None: in no known form. The first access takes milliseconds."""
        return reasoning_forms.found_reasoning(
            self._template.sources,
            self.tokenizer.added_tokens_encoder,
            lambda messages, variables: self._template.render_if_possible(messages, variables=variables),
            call_forms.probed_call(),
        )

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

    def amounts(self, media: Sequence[MediumInfo], choices: Sequence[SamplingChoice]) -> list[MediaAmount]:
        """See `Frontend.amounts`."""
        if self._planner is None:
            return [MediaAmount() for _ in media]
        return [
            self._planner.amount(number, info, choice)
            for number, (info, choice) in enumerate(zip(media, choices, strict=True))
        ]

    def _place(
        self,
        token_ids: list[int],
        media: Sequence[MediumInfo],
        plans: Sequence[SamplingPlan],
        probes: Sequence[Probe],
        order: Sequence[Modality],
    ) -> list[MediumLayout]:
        """Assign the placeholder positions to the media. Markers of one modality keep the order of their media."""
        placeholders = [i for i, token in enumerate(token_ids) if token in self._placeholder_ids]
        counts = [
            probe.replacement.count(self._placeholder[info.modality])
            for info, probe in zip(media, probes, strict=True)
        ]
        total, num_placeholders, positions = sum(counts), len(placeholders), iter(placeholders)
        if total != num_placeholders or len(order) != sum(not info.of_video for info in media):
            raise CountMismatchError(
                f"{total} placeholders of {len(media)} media were laid out, but the template and tokenizer made {num_placeholders} of "
                f"{len(order)}; the checkpoint's chat template and tokenizer disagree"
            )
        queues = {
            modality: iter([n for n, m in enumerate(media) if m.modality == modality and not m.of_video])
            for modality in MODALITIES
        }
        placed: dict[int, MediumLayout] = {}
        for modality in order:
            group = _group(media, next(queues[modality]))
            group_positions = [next(positions) for _ in range(sum(counts[number] for number in group))]
            for number in group:
                medium_positions = group_positions
                if len(group) > 1:
                    token = self._adapter.placeholder_id(media[number].modality)
                    medium_positions = [
                        position for position in group_positions if token_ids[position] == token
                    ]
                if len(medium_positions) != counts[number]:
                    raise CountMismatchError(
                        f"medium {number} ({media[number].modality}) has {counts[number]} placeholders, but {len(medium_positions)} beside those of the same "
                        "file; the checkpoint's processor disagrees with itself"
                    )
                placed[number] = self._placed(media[number], plans[number], probes[number], medium_positions)
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
            truncated_seconds=truncated_seconds(info, plan),
        )


def _is_blank(message: dict[str, Any]) -> bool:
    """True if a message has no text."""
    return not any(part.get("text", "").strip() for part in message["content"])


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


def _runs(positions: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending positions as [start, length] runs."""
    runs: list[tuple[int, int]] = []
    for position in positions:
        if runs and runs[-1][0] + runs[-1][1] == position:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((position, 1))
    return runs


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
        source.sampling_defaults(folder),
    )
