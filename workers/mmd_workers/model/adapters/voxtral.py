"""Voxtral: its processor neither counts nor replaces audio tokens outside of mistral-common, so both are done here."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mmd_api.contract.pools import Modality
from mmd_workers.model.adapters.base import Adapter
from mmd_workers.model.inputs import MediaInputs, Processed
from mmd_workers.model.prompt import MediumLayout
from mmd_workers.model.runs import Along, TowerRun


class VoxtralAdapter(Adapter):
    """Sound is cut into windows of 30 s, the last one padded; every window becomes the same number of tokens."""

    def modalities(self, processor: Any) -> frozenset[Modality]:
        """Sound only."""
        del processor
        return frozenset({"audio"})

    def render(
        self,
        processor: Any,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] = (),
        *,
        begins_answer: bool = True,
        **variables: Any,
    ) -> str:
        """Render with the tokenizer's template: the processor's own method insists on decoding sound itself."""
        return str(
            processor.tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=begins_answer,
                **variables,
            )
        )

    def expand(
        self, processor: Any, text: str, replacements: Mapping[str, list[str]]
    ) -> tuple[str, list[Modality]]:
        """Replace each audio marker."""
        sounds = iter(replacements.get("audio", []))
        order: list[Modality] = []

        def put(_: re.Match[str]) -> str:
            order.append("audio")
            return next(sounds)

        return re.sub(re.escape(processor.audio_token), put, text), order

    def audio(self, inputs: MediaInputs, waveform: Any) -> Processed:
        """Mel features [windows, mels, frames] and the audio tokens they become."""
        processor = inputs.processor
        settings = {**type(processor).audio_kwargs}
        window_frames = settings.pop("max_source_positions")
        extracted = processor.feature_extractor([waveform], **settings)
        mel = torch.as_tensor(extracted["input_features"])
        windows = mel.reshape(mel.shape[-2], -1, window_frames).transpose(0, 1)
        audio = self.config.audio_config
        rows = windows.shape[0] * audio.max_source_positions * audio.hidden_size // audio.intermediate_size
        return Processed(processor.audio_token * rows, {"input_features": windows})

    def tower_run(self, modality: Modality) -> TowerRun:
        """Windows of any number of sounds share a run."""
        del modality
        return Along({"input_features": 0}, divided=True)

    def unsplit_inputs(
        self, processor: Any, given: Mapping[str, Any], media: Sequence[MediumLayout]
    ) -> dict[str, Any]:
        """The processor's own mel windows, and a prompt made here: without mistral-common it makes no prompt with sound in it."""
        text, sounds = given["text"][0], given.get("audio", [])
        settings = {**type(processor).audio_kwargs}
        frames = settings.pop("max_source_positions")
        inputs: dict[str, Any] = {}
        if sounds:
            inputs["input_features"] = processor._retrieve_input_features(sounds, frames, **settings)
        for medium in media:
            text = text.replace(processor.audio_token, "\0" * medium.num_tokens, 1)
        ids = processor.tokenizer(text.replace("\0", processor.audio_token), return_tensors="pt")
        return inputs | {name: ids[name] for name in ("input_ids", "attention_mask")}
