"""Finds a model's files and reads its configuration. Reads settings files only; independent of weights and architectures."""

from __future__ import annotations

import json
import logging
import os
import re
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from transformers import AutoConfig, GenerationConfig

from mmd_api.contract.errors import UnsupportedModelError
from mmd_api.spec.adapters import AdapterSpec
from mmd_api.spec.model import ModelSpec
from mmd_api.weights import url_of
from mmd_workers.weights import cache

log = logging.getLogger(__name__)

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BUILTIN = {"builtin/demo": "demo"}
SETTINGS_PATTERNS = ["*.json", "*.jinja", "*.txt", "*.model"]
WEIGHT_PATTERNS = [*SETTINGS_PATTERNS, "*.safetensors"]
HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[\w.-]+$")
SAMPLING_BOUNDS = {
    "temperature": (0.0, 2.0),
    "top_p": (1e-9, 1.0),
    "top_k": (0, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
}
"""Parameters that a checkpoint may recommend, with the values that a request may have."""
DTYPES = {"Float32": torch.float32, "BFloat16": torch.bfloat16, "Float16": torch.float16}


def resolve(spec: ModelSpec, *, weights: bool) -> Path:
    """Find the local folder of a model. It is fetched from the hub if `spec.id` names neither a folder nor a built-in model.

    `weights` False fetches settings only. The token for private repositories is read from HF_TOKEN.

    Raises:
        UnsupportedModelError: there is no such model; the message names spec.model.id and the remedy.
    """
    if spec.id in BUILTIN:
        return _checked(Path(str(resources.files("mmd_workers.model"))) / BUILTIN[spec.id], spec.id)
    if spec.storage.url is not None and _cached(spec, "spec.model") is None:
        raise UnsupportedModelError(
            f"spec.model.storage.url: {spec.storage.url} has not been downloaded; run `mmd prefetch -f FILE`"
        )
    patterns = WEIGHT_PATTERNS if weights else SETTINGS_PATTERNS
    return _checked(_folder(spec, "spec.model", patterns), spec.id)


def resolve_adapter(spec: AdapterSpec, *, weights: bool) -> Path:
    """Find the local folder of an adapter, in the same way as for a model.

    Raises:
        UnsupportedModelError: there is no such adapter; the message names its entry in spec.engine.adapters and the remedy.
    """
    field = f"spec.engine.adapters[{spec.name}]"
    folder = _folder(spec, field, [ADAPTER_CONFIG, ADAPTER_WEIGHTS] if weights else [ADAPTER_CONFIG])
    if not (folder / ADAPTER_CONFIG).is_file():
        raise UnsupportedModelError(
            f"{field}.id: {spec.id!r} has no {ADAPTER_CONFIG}; use a folder as PEFT saves it, with {ADAPTER_WEIGHTS} beside it"
        )
    return folder


def commit_of(folder: Path, spec: ModelSpec | AdapterSpec) -> str | None:
    """The commit in a hub repository's folder; None if the folder is no hub repository."""
    is_snapshot = folder.parent.name == "snapshots" and spec.id not in BUILTIN and not Path(spec.id).is_dir()
    return folder.name if is_snapshot else None


def _cached(spec: ModelSpec | AdapterSpec, field: str) -> Path | None:
    """The folder of a complete download, if the cache has it."""
    url = url_of(spec)
    try:
        folder = cache.found(url) if url is not None else None
    except OSError as error:
        raise UnsupportedModelError(
            f"{field}: the cache ({cache.root()}) cannot be read ({error}); check its volume and that volume's server"
        ) from error
    if url is not None and folder is None and cache.is_required():
        raise UnsupportedModelError(
            f"{field}: {url} is not in the cache ({cache.root()}), although its Job is complete; delete that Job "
            "(`kubectl delete job -l app.kubernetes.io/component=weights`), and the operator downloads the files again"
        )
    return folder


def _folder(spec: ModelSpec | AdapterSpec, field: str, patterns: list[str]) -> Path:
    if (cached := _cached(spec, field)) is not None:
        return cached
    local = Path(spec.id)
    if local.is_absolute() or local.is_dir():
        return local
    if not HUB_ID.match(spec.id):
        raise UnsupportedModelError(
            f"{field}.id: {spec.id!r} is neither an existing folder nor a hub id; use an absolute path or `owner/name`"
        )
    return _from_hub(spec, field, patterns)


def _checked(folder: Path, model_id: str) -> Path:
    if not (folder / "config.json").is_file():
        raise UnsupportedModelError(
            f"spec.model.id: {model_id!r} has no config.json; use a folder in the Hugging Face layout "
            "(config.json, *.safetensors, tokenizer.json, processor settings)"
        )
    return folder


def _from_hub(spec: ModelSpec | AdapterSpec, field: str, patterns: list[str]) -> Path:
    where = f"{field}.id: {spec.id!r}"
    try:
        path = snapshot_download(
            spec.id,
            revision=spec.revision,
            allow_patterns=patterns,
            token=os.environ.get("HF_TOKEN"),
        )
    except GatedRepoError as error:
        raise UnsupportedModelError(
            f"{where} is gated; accept its license on the hub and set spec.model.storage.tokenSecret to a Secret with your token"
        ) from error
    except RevisionNotFoundError as error:
        raise UnsupportedModelError(
            f"{field}.revision: {spec.revision!r} does not exist in {spec.id!r}"
        ) from error
    except RepositoryNotFoundError as error:
        raise UnsupportedModelError(
            f"{where} does not exist on the hub or is private; check the spelling, or set spec.model.storage.tokenSecret to a Secret with your token"
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
        raise UnsupportedModelError(
            f"{where} could not be fetched and is not in the local cache ({type(error).__name__}: {error}); "
            "give this pod network access to the hub, or put the files on a claim or in the image and set id to their path"
        ) from error
    return Path(path)


def load_config(folder: Path) -> Any:
    """Load the Hugging Face configuration of the served part: for an omni model, the thinker.

    Raises:
        UnsupportedModelError: the installed transformers does not know this model type.
    """
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (ValueError, KeyError, OSError) as error:
        raise UnsupportedModelError(
            f"spec.model.id: the configuration in {folder.name!r} cannot be read ({error}); use an architecture that the "
            "installed transformers implements: code from model repositories is never run"
        ) from error
    return getattr(config, "thinker_config", config)


def sampling_defaults(folder: Path) -> dict[str, float]:
    """The sampling that generation_config.json recommends, by the names of the API's parameters.

    Values that no request could have are left out, with a warning.

    Raises:
        UnsupportedModelError: the file is not a JSON object.
    """
    file = folder / "generation_config.json"
    try:
        recommended = json.loads(file.read_text()) if file.is_file() else {}
        if not isinstance(recommended, dict):
            raise TypeError("it is not an object")
    except (OSError, ValueError, TypeError) as error:
        raise UnsupportedModelError(
            f"spec.model.id: generation_config.json in {folder.name!r} cannot be read ({error}); fix or remove the file"
        ) from error
    defaults: dict[str, float] = {}
    for name, (low, high) in SAMPLING_BOUNDS.items():
        value = recommended.get(name)
        if value is None:
            continue
        is_number = isinstance(value, int if name == "top_k" else int | float) and not isinstance(value, bool)
        if not is_number or not low <= value <= high:
            log.warning("%s of %s is ignored: %.80r is not from %g to %g", name, file, value, low, high)
            continue
        defaults[name] = value if name == "top_k" else float(value)
    return defaults


def resolve_dtype(spec: ModelSpec, config: Any) -> torch.dtype:
    """The dtype of weights, embeddings and KV. Auto: the dtype of the saved checkpoint, or float32 if it states none."""
    if spec.dtype != "Auto":
        return DTYPES[spec.dtype]
    for source in (config, config.get_text_config()):
        dtype = getattr(source, "dtype", None)
        if isinstance(dtype, torch.dtype):
            return dtype
    return torch.float32


def resolve_max_model_len(spec: ModelSpec, config: Any) -> int:
    """The longest sequence, prompt and output together, in tokens.

    Raises:
        UnsupportedModelError: spec.model.maxModelLen exceeds the positions of the model.
    """
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    if spec.max_model_len is None:
        return int(limit) if limit else 4096
    if limit and spec.max_model_len > limit:
        raise UnsupportedModelError(
            f"spec.model.maxModelLen: {spec.max_model_len} exceeds the model's {limit} positions; lower it or remove it"
        )
    return spec.max_model_len


def eos_token_ids(folder: Path, config: Any) -> frozenset[int]:
    """Token ids that end an answer, from generation_config.json or else from the model's configuration."""
    token_ids: Any = None
    if (folder / "generation_config.json").is_file():
        token_ids = GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id
    if token_ids is None:
        token_ids = getattr(config.get_text_config(), "eos_token_id", None)
    if token_ids is None:
        token_ids = getattr(config, "eos_token_id", None)
    if token_ids is None:
        return frozenset()
    return frozenset(int(i) for i in (token_ids if isinstance(token_ids, (list, tuple)) else [token_ids]))
