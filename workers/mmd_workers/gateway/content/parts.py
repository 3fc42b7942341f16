"""The parts of a message's content, and the media they stand for. Independent of the network and the model.

Each part is a class here and a line of `_Part`. The tags of the unions, the error about an unknown type and the check of docs/api.md follow
from these.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated, Literal, Self, get_args

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from mmd_api.contract.pools import Modality
from mmd_workers.gateway.basics.strict import MAX_NAME_CHARACTERS, Explained, Ignored, Strict
from mmd_workers.media.choice import NO_CHOICE, FrameSampling, SamplingChoice
from mmd_workers.media.medium import MediumKind

MAX_FRAMES = 4096  # maximum frames of a video that a resource can allow
Url = Annotated[str, Field(min_length=1)]
FileId = Annotated[str, Field(min_length=1, max_length=64)]
SourceKind = MediumKind | Literal["file"]
"""What a part declares: a medium, a document whose pages become images, or a file whose bytes decide."""


@dataclass(frozen=True, slots=True)
class MediaSource:
    """One medium of a request as given.

    `param`: the field that holds it. `part`: the object with the fields of `choice`. `url`: http(s) or data; empty if `file_id` names an
    uploaded file. `pages`: of a document; empty: all.
    """

    modality: SourceKind
    param: str
    url: str = ""
    choice: SamplingChoice = NO_CHOICE
    part: str = ""
    file_id: str = ""
    pages: str = ""

    @property
    def kind(self) -> MediumKind:
        """The kind of a source whose file has been examined."""
        assert self.modality != "file", "a file's kind is not known yet"
        return self.modality

    @property
    def medium(self) -> Modality:
        """The modality that the model gets; a document becomes images."""
        return "image" if self.kind == "document" else self.kind


class CacheControl(Strict):
    """A mark that a prefix is to be cached."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


CacheMark = Annotated[CacheControl | None, Ignored("prefixes of prompts are cached without it")]


class ContentPartFields(Strict):
    """What all parts have in common."""

    cache_control: CacheMark = None


class MediaPartFields(ContentPartFields):
    """What all media have in common."""

    uuid: Annotated[str | None, Field(max_length=256), Ignored("the bytes say which medium it is")] = None


class TextPart(ContentPartFields):
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
    Explained(
        "`low` bounds the image to 512 x 512 pixels where the model's processor can, and has no effect elsewhere; the others are that "
        "processor's own size"
    ),
]
PixelCount = Annotated[int, Field(ge=1, le=2**40)]


class PixelFields(Strict):
    """How many pixels an image is resized to."""

    min_pixels: PixelCount | None = None
    max_pixels: PixelCount | None = None

    @model_validator(mode="after")
    def _has_a_range(self) -> Self:
        if self.min_pixels is not None and self.max_pixels is not None and self.min_pixels > self.max_pixels:
            raise PydanticCustomError("min_pixels", "min_pixels must be at most max_pixels")
        return self

    def choice_of_pixels(self, detail: str | None = None) -> SamplingChoice:
        """The sampling that these fields and the detail choose."""
        low = detail == "low" and self.max_pixels is None
        return SamplingChoice(min_pixels=self.min_pixels, max_pixels=self.max_pixels, low_detail=low)


class ImageUrl(MediaUrl):
    """The URL of an image."""

    detail: Detail = None


class ImageUrlPart(PixelFields, MediaPartFields):
    """An image by URL."""

    type: Literal["image_url"]
    image_url: ImageUrl

    def source(self, param: str) -> MediaSource:
        """The image as a source."""
        choice = self.choice_of_pixels(self.image_url.detail)
        return MediaSource("image", f"{param}.image_url.url", self.image_url.url, choice, param)


class InputImagePart(PixelFields, MediaPartFields):
    """An image by URL or an uploaded one, as the Responses API spells it."""

    type: Literal["input_image"]
    image_url: Url | None = None
    file_id: FileId | None = None
    detail: Detail = None

    @model_validator(mode="after")
    def _names_one(self) -> Self:
        _check_one(self, "image_url", "file_id")
        return self

    def source(self, param: str) -> MediaSource:
        """The image as a source."""
        field, choice = "file_id" if self.file_id else "image_url", self.choice_of_pixels(self.detail)
        return MediaSource(
            "image", f"{param}.{field}", self.image_url or "", choice, param, self.file_id or ""
        )


Pages = Annotated[
    str | None,
    Field(max_length=1024, pattern=r"^[0-9]{1,9}(-([0-9]{1,9})?)?(,[0-9]{1,9}(-([0-9]{1,9})?)?)*$"),
    Explained("of a PDF, counted from 1, such as `1-3,7,10-`, in ascending order; all of them by default"),
]
FileName = Annotated[str | None, Field(max_length=1024), Ignored("the bytes say what a file is")]


class FileContent(Strict):
    """An uploaded file, or a file in the request itself as a data URL or base64."""

    file_id: FileId | None = None
    file_data: Annotated[str, Field(min_length=1)] | None = None
    filename: FileName = None

    @model_validator(mode="after")
    def _names_one(self) -> Self:
        _check_one(self, "file_id", "file_data")
        return self


class FilePart(PixelFields, MediaPartFields):
    """A file: an image, a video, a sound, or a PDF, of which each page becomes an image."""

    type: Literal["file"]
    file: FileContent
    pages: Pages = None

    def source(self, param: str) -> MediaSource:
        """The file as a source."""
        field = "file_id" if self.file.file_id else "file_data"
        url = _data_url(self.file.file_data) if self.file.file_data else ""
        choice, pages = self.choice_of_pixels(), self.pages or ""
        return MediaSource(
            "file", f"{param}.file.{field}", url, choice, param, self.file.file_id or "", pages
        )


class InputFilePart(PixelFields, MediaPartFields):
    """A file as the Responses API spells it."""

    type: Literal["input_file"]
    file_id: FileId | None = None
    file_data: Annotated[str, Field(min_length=1)] | None = None
    file_url: Annotated[Url | None, Explained("of a PDF")] = None
    filename: FileName = None
    detail: Detail = None
    pages: Pages = None

    @model_validator(mode="after")
    def _names_one(self) -> Self:
        _check_one(self, "file_id", "file_data", "file_url")
        return self

    def source(self, param: str) -> MediaSource:
        """The file as a source."""
        choice, pages = self.choice_of_pixels(self.detail), self.pages or ""
        if self.file_url:
            return MediaSource("document", f"{param}.file_url", self.file_url, choice, param, "", pages)
        field = "file_id" if self.file_id else "file_data"
        url = _data_url(self.file_data) if self.file_data else ""
        return MediaSource("file", f"{param}.{field}", url, choice, param, self.file_id or "", pages)


def _check_one(part: Strict, *names: str) -> None:
    if sum(getattr(part, name) is not None for name in names) != 1:
        raise PydanticCustomError("one_of", "{names}", {"names": f"send one of {', '.join(names)}"})


def _data_url(data: str, media_type: str = "application/octet-stream") -> str:
    """The data as a data URL; some clients send only the base64."""
    return data if data[:5].lower() == "data:" else f"data:{media_type};base64,{data}"


class FrameFields(Strict):
    """Which frames of a video the model gets."""

    fps: Annotated[float, Field(gt=0, le=1000)] | None = None
    num_frames: Annotated[int, Field(ge=1, le=MAX_FRAMES)] | None = None
    max_frames: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    sampling: FrameSampling | None = None

    @model_validator(mode="after")
    def _has_one_number(self) -> Self:
        if self.fps is not None and self.num_frames is not None:
            raise PydanticCustomError("fps_and_num_frames", "set fps or num_frames, not both")
        counted = self.fps is not None or self.num_frames is not None
        if counted and self.sampling in ("keyframes", "scene_changes"):
            raise PydanticCustomError(
                "sampling_and_number",
                "fps and num_frames are for uniform sampling; bound the others by max_frames",
            )
        return self

    def choice_of_frames(self) -> SamplingChoice:
        """The sampling that these fields choose."""
        return SamplingChoice(self.fps, self.num_frames, self.max_frames, sampling=self.sampling)


class ProcessorKwargs(FrameFields, PixelFields):
    """How the media of a request are sampled whose parts do not say so themselves, as vLLM's server spells it."""

    do_sample_frames: Annotated[Literal[True] | None, Ignored("frames are always sampled")] = None
    use_audio_in_video: Annotated[
        bool | None,
        Explained("`true`: each video has its own sound, interleaved by time, if the model can take it so"),
    ] = None

    @property
    def choice(self) -> SamplingChoice:
        """The sampling that these fields choose."""
        choice = self.choice_of_frames().or_else(self.choice_of_pixels())
        return replace(choice, with_sound=bool(self.use_audio_in_video))


def _ascending(seconds: list[float]) -> list[float]:
    if any(after < before for before, after in pairwise(seconds)):
        raise PydanticCustomError("not_ascending", "must be in ascending order")
    return seconds


Timestamps = Annotated[
    Annotated[
        list[Annotated[float, Field(ge=0, le=86_400)]],
        Field(min_length=1, max_length=MAX_FRAMES, fail_fast=True),
        AfterValidator(_ascending),
    ]
    | None,
    Explained("seconds after the first frame, in ascending order: the frames shown then"),
]


class VideoUrlPart(FrameFields, MediaPartFields):
    """A video by URL."""

    type: Literal["video_url"]
    video_url: MediaUrl
    timestamps: Timestamps = None

    @model_validator(mode="after")
    def _has_one_way(self) -> Self:
        if self.timestamps is not None and self.choice_of_frames() != SamplingChoice(
            max_frames=self.max_frames
        ):
            raise PydanticCustomError(
                "timestamps_and_others", "set timestamps without fps, num_frames and sampling"
            )
        return self

    def source(self, param: str) -> MediaSource:
        """The video as a source."""
        choice = self.choice_of_frames()
        if self.timestamps is not None:
            choice = replace(choice, timestamps=tuple(self.timestamps))
        return MediaSource("video", f"{param}.video_url.url", self.video_url.url, choice, param)


class AudioUrlPart(MediaPartFields):
    """A sound by URL."""

    type: Literal["audio_url"]
    audio_url: MediaUrl

    def source(self, param: str) -> MediaSource:
        """The sound as a source."""
        return MediaSource("audio", f"{param}.audio_url.url", self.audio_url.url)


class InputAudio(Strict):
    """Base64 of a sound file and the name of its format, as OpenAI's clients send it."""

    data: Annotated[str, Field(min_length=1)]
    format: Annotated[str, Field(pattern=r"^[a-z0-9]{1,16}$")]


class InputAudioPart(MediaPartFields):
    """A sound in the request itself."""

    type: Literal["input_audio"]
    input_audio: InputAudio

    def source(self, param: str) -> MediaSource:
        """The sound as a source with a data URL."""
        sound = self.input_audio
        return MediaSource(
            "audio", f"{param}.input_audio.data", _data_url(sound.data, f"audio/{sound.format}")
        )


def type_of(value: object) -> str | None:
    """The part's type, cut to the length in error messages, because pydantic copies it several times."""
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
    | Annotated[FilePart, Tag("file")]
    | Annotated[InputFilePart, Tag("input_file")]
)
AnyPart = _Part | Annotated[RefusalPart, Tag("refusal")]

ContentPart = Annotated[_Part, Discriminator(type_of)]
AnswerContentPart = Annotated[AnyPart, Discriminator(type_of)]
"""A part of an assistant's message."""


def _tags(union: object) -> tuple[str, ...]:
    return tuple(get_args(member)[1].tag for member in get_args(union))


PART_TYPES = _tags(_Part)
"""Types of the parts of a user's message, in the order of error messages."""
ANSWER_PART_TYPES = _tags(AnyPart)
"""Types of all parts."""
