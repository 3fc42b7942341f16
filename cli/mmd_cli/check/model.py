"""Loads a model twice: split as workers run it, and whole as transformers has it."""

from __future__ import annotations

from typing import Any

import torch

from mmd_api.spec.media import MediaPolicy
from mmd_api.spec.model import ModelSpec
from mmd_workers.engine.profile import activation_bytes
from mmd_workers.model import source
from mmd_workers.model.adapters import adapter_for
from mmd_workers.model.adapters.base import Adapter
from mmd_workers.model.encoder import HfEncoderModel, load_encoder
from mmd_workers.model.frontend import HfFrontend, load_frontend, load_processor
from mmd_workers.model.language import HfLanguageModel, load_language_model
from mmd_workers.model.roles import architecture_class

NEW_TOKENS = 12
CHUNK_TOKENS = 48  # small, so that prompts take several chunks
BLOCK_TOKENS = 16


class Checked:
    """Both copies of a model, with its adapter, tokenizer and processor."""

    def __init__(self, spec: ModelSpec, device: torch.device) -> None:
        folder = source.resolve(spec, weights=True)
        config = source.load_config(folder)
        self.adapter: Adapter = adapter_for(config)
        self.frontend: HfFrontend = load_frontend(spec, MediaPolicy())
        self.encoder: HfEncoderModel | None = load_encoder(spec, device) if self.frontend.modalities else None
        self.language: HfLanguageModel = load_language_model(spec, device)
        self.max_model_len = min(self.frontend.max_model_len, 8192)
        activation_bytes(
            self.language,
            chunk_tokens=CHUNK_TOKENS,
            max_sequences=1,
            block_tokens=BLOCK_TOKENS,
            max_model_len=self.max_model_len,
        )
        self.tokenizer, self.processor = load_processor(folder, self.adapter, spec)
        dtype = self.language.dtype
        whole = architecture_class(config).from_pretrained(
            folder, config=config, dtype=dtype, local_files_only=True
        )
        self.whole: Any = whole.eval().requires_grad_(False).to(device)
        self.model_type = str(config.model_type)
