"""The parts of a message's content, and the medium that each of them is. Independent of the network and the model.

A part is one class here and one line of `_Part`: the tags of the unions, the error about an unknown type and the check of docs/api.md follow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from pydantic import Discriminator, Field, Tag

from mmd_api.contract.pools import Modality
from mmd_workers.gateway.strict import MAX_NAME_CHARACTERS, Ignored, Strict

Url = Annotated[str, Field(min_length=1)]


@dataclass(frozen=True, slots=True)
class MediaSource:
    """One medium of a request as given. `param` names the field that holds it; `url` is http(s) or data."""

    modality: Modality
    param: str
    url: str


class TextPart(Strict):
    """Text of a message."""

    type: Literal["text", "input_text"]
    text: str


class RefusalPart(Strict):
    """An assistant's refusal, which the model reads as what it said."""

    type: Literal["refusal"]
    refusal: str


class MediaUrl(Strict):
    """An http(s) or data URL."""

    url: Url


Detail = Annotated[
    Literal["auto", "low", "high", "original"] | None,
    Ignored("the model's own processor decides the resolution"),
]


class ImageUrl(MediaUrl):
    """The URL of an image."""

    detail: Detail = None


class ImageUrlPart(Strict):
    """An image by URL."""

    type: Literal["image_url"]
    image_url: ImageUrl

    def source(self, param: str) -> MediaSource:
        """The image."""
        return MediaSource("image", f"{param}.image_url.url", self.image_url.url)


class InputImagePart(Strict):
    """An image by URL, as the Responses API spells it."""

    type: Literal["input_image"]
    image_url: Url
    detail: Detail = None

    def source(self, param: str) -> MediaSource:
        """The image."""
        return MediaSource("image", f"{param}.image_url", self.image_url)


class VideoUrlPart(Strict):
    """A video by URL."""

    type: Literal["video_url"]
    video_url: MediaUrl

    def source(self, param: str) -> MediaSource:
        """The video."""
        return MediaSource("video", f"{param}.video_url.url", self.video_url.url)


class AudioUrlPart(Strict):
    """A sound by URL."""

    type: Literal["audio_url"]
    audio_url: MediaUrl

    def source(self, param: str) -> MediaSource:
        """The sound."""
        return MediaSource("audio", f"{param}.audio_url.url", self.audio_url.url)


class InputAudio(Strict):
    """Base64 of a sound file and the name of its format, as OpenAI's clients send it."""

    data: Annotated[str, Field(min_length=1)]
    format: Annotated[str, Field(pattern=r"^[a-z0-9]{1,16}$")]


class InputAudioPart(Strict):
    """A sound in the request itself."""

    type: Literal["input_audio"]
    input_audio: InputAudio

    def source(self, param: str) -> MediaSource:
        """The sound, as a data URL."""
        sound = self.input_audio
        return MediaSource(
            "audio", f"{param}.input_audio.data", f"data:audio/{sound.format};base64,{sound.data}"
        )


def type_of(value: object) -> str | None:
    """The part's type, cut to what an error names: pydantic copies it several times."""
    kind = value.get("type") if isinstance(value, dict) else None
    return None if kind is None else str(kind)[:MAX_NAME_CHARACTERS]


_Text = Annotated[TextPart, Tag("text")] | Annotated[TextPart, Tag("input_text")]
_Part = (
    _Text
    | Annotated[ImageUrlPart, Tag("image_url")]
    | Annotated[VideoUrlPart, Tag("video_url")]
    | Annotated[AudioUrlPart, Tag("audio_url")]
    | Annotated[InputAudioPart, Tag("input_audio")]
    | Annotated[InputImagePart, Tag("input_image")]
)
AnyPart = _Part | Annotated[RefusalPart, Tag("refusal")]

ContentPart = Annotated[_Part, Discriminator(type_of)]
AnswerPart = Annotated[AnyPart, Discriminator(type_of)]
"""What an assistant's message may have, too."""
ResultPart = Annotated[_Text, Discriminator(type_of)]
"""What the result of a tool call may have."""


def _tags(union: object) -> tuple[str, ...]:
    return tuple(get_args(member)[1].tag for member in get_args(union))


PART_TYPES = _tags(_Part)
"""Every type of part of a user's message, in the order in which errors name them."""
ANSWER_PART_TYPES = _tags(AnyPart)
"""Every type of part."""
