"""Where a deployment's weights are downloaded from, and the folder of a cache that each download has. Pure."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from mmd_api.spec.adapters import AdapterSpec
from mmd_api.spec.deployment import MultimodalDeploymentSpec
from mmd_api.spec.model import ModelSpec

HUB_SCHEME = "hf://"
MAX_READABLE_CHARACTERS = 80
_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True, slots=True)
class Download:
    """One model or adapter to download.

    `field`: its field of the spec, for messages. `url`: `hf://owner/name@revision`, or the value of
    `spec.model.storage.url`.
    """

    field: str
    url: str

    @property
    def folder(self) -> str:
        """Name of its folder in a cache, the same for every deployment."""
        return folder_of(self.url)


def downloads_of(spec: MultimodalDeploymentSpec) -> tuple[Download, ...]:
    """The downloads that pods of a deployment need: the model first, then adapters from the hub.

    Empty if nothing can be downloaded.
    """
    url = url_of(spec.model)
    if url is None:
        return ()
    adapters = {
        hub_url(a): f"spec.engine.adapters[{a.name}]" for a in spec.engine.adapters if a.source == "HubId"
    }
    return (
        Download("spec.model", url),
        *(Download(field, adapter_url) for adapter_url, field in adapters.items()),
    )


def url_of(part: ModelSpec | AdapterSpec) -> str | None:
    """Where a model or an adapter can be downloaded from; None for a path and a built-in model."""
    if isinstance(part, ModelSpec) and part.storage.url is not None:
        return part.storage.url
    return hub_url(part) if part.source == "HubId" else None


def hub_url(part: ModelSpec | AdapterSpec) -> str:
    """URL of a hub repository at its revision."""
    return f"{HUB_SCHEME}{part.id}" + (f"@{part.revision}" if part.revision is not None else "")


def folder_of(url: str) -> str:
    """Name of a folder: a part that people recognise, and a digest that tells downloads apart."""
    readable = _NOT_IN_A_NAME.sub("--", url.partition("://")[2]).strip("-.")[-MAX_READABLE_CHARACTERS:]
    return f"{readable.strip('-.')}-{hashlib.sha256(url.encode()).hexdigest()[:10]}"
