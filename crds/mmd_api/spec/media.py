"""Limits on media."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from mmd_api.base import ApiModel
from mmd_api.rule import Rule
from mmd_api.spec.fields import Name
from mmd_api.spec.quality import UnderLoad


def _hosts_used(m: MediaPolicy) -> bool:
    return m.allow_http or not m.allowed_hosts


MEDIA = (
    Rule(
        field="allowedHosts",
        cel="self.allowHttp || self.allowedHosts.size() == 0",
        holds=_hosts_used,
        problem="allowedHosts has no effect while allowHttp is false",
        remedy="set allowHttp: true, or remove allowedHosts",
    ),
)


class ImagePolicy(ApiModel):
    """Limits for an image."""

    max_bytes: Annotated[int, Field(ge=1024, le=2**40)] = 20 * 2**20
    """Maximum file size."""
    max_pixels: Annotated[int, Field(ge=1024, le=2**40)] = 50_000_000
    """Maximum width × height, checked before the image is decoded."""


class VideoPolicy(ApiModel):
    """Limits and frame sampling for a video."""

    max_bytes: Annotated[int, Field(ge=1024, le=2**40)] = 512 * 2**20
    """Maximum file size."""
    max_duration_seconds: Annotated[int, Field(ge=1, le=86_400)] = 600
    """Maximum duration."""
    max_frames: Annotated[int, Field(ge=1, le=4096)] = 64
    """Maximum number of frames sampled from a video."""
    frames_per_second_milli: Annotated[int, Field(ge=1, le=120_000)] = 2000
    """Frames sampled per 1000 seconds of video; 2000 is two frames per second."""
    sampling: Literal["Uniform", "KeyFrames", "SceneChanges"] = "Uniform"
    """How frames are chosen of a video for which the request chooses none. SceneChanges decodes the video at the gateway to find them."""
    too_long: Literal["Reject", "FewerFrames"] = "Reject"
    """Behaviour when a prompt does not fit the model's context because of its videos. FewerFrames samples fewer frames of each, evenly, and where the
    least of them would not fit either, lowers their resolution as far as the model's processor takes a number of pixels. The response reports it."""


class AudioPolicy(ApiModel):
    """Limits for an audio clip."""

    max_bytes: Annotated[int, Field(ge=1024, le=2**40)] = 100 * 2**20
    """Maximum file size."""
    max_duration_seconds: Annotated[int, Field(ge=1, le=86_400)] = 600
    """Maximum duration."""
    too_long: Literal["Reject", "Truncate"] = "Reject"
    """Behaviour when a clip is longer than the model's audio window. Truncate keeps the beginning and reports it in the response."""


class DocumentPolicy(ApiModel):
    """Limits and resolution for a PDF, of which each page is an image: limits for an image hold for each page."""

    max_bytes: Annotated[int, Field(ge=1024, le=2**40)] = 50 * 2**20
    """Maximum file size."""
    max_pages: Annotated[int, Field(ge=1, le=256)] = 16
    """Maximum number of pages that a request takes of a document. Each counts among maxItemsPerRequest."""
    dots_per_inch: Annotated[int, Field(ge=24, le=600)] = 144
    """Pixels per inch of a page. The model's processor resizes the image as any other."""


class MediaPolicy(ApiModel, rules=MEDIA):
    """Limits on the media of a request and on their sources."""

    max_items_per_request: Annotated[int, Field(ge=0, le=256)] = 16
    """Maximum number of media items in a request."""
    image: ImagePolicy = ImagePolicy()
    """Limits for an image."""
    video: VideoPolicy = VideoPolicy()
    """Limits and frame sampling for a video."""
    audio: AudioPolicy = AudioPolicy()
    """Limits for an audio clip."""
    document: DocumentPolicy = DocumentPolicy()
    """Limits and resolution for a PDF."""
    allow_http: bool = True
    """Whether media may be referenced by HTTP(S) URL. Data URLs are always allowed."""
    allowed_hosts: Annotated[list[Name], Field(max_length=64)] = []
    """Hosts that URLs may reference. If empty, all hosts are allowed."""
    allow_private_addresses: bool = False
    """Whether URLs may resolve to private, loopback or link-local addresses."""
    fetch_timeout_seconds: Annotated[int, Field(ge=1, le=600)] = 20
    """Timeout for fetching a URL."""
    decode_timeout_seconds: Annotated[int, Field(ge=1, le=600)] = 60
    """Timeout for decoding a media item."""
    under_load: UnderLoad | None = None
    """Fewer pixels and frames for new requests while the pools are loaded, reported in the response. If unset, load changes nothing."""
    failure_policy: Literal["Fail", "TextOnly", "DegradeFrames", "DegradeResolution"] = "Fail"
    """What happens to a request with a media item that the encoders fail on or do not finish within jobTimeoutSeconds. Fail ends the request;
    DegradeFrames and DegradeResolution try again with half of its frames or pixels, twice at most; TextOnly replaces it by a text that says so.
    The response reports it. Damaged and refused files always end their request."""
