"""Measures a medium by headers and packet tables alone: no pixel and no sample is decoded. Knows the policy, no model.

Limits hold here, before anything is decoded; every refusal names the limit, the value and the field that would raise it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from mmd_api.contract.errors import BadMediaError
from mmd_api.contract.pools import Modality
from mmd_workers.media import animations, containers, document
from mmd_workers.media.formats.announced import missing_bytes
from mmd_workers.media.formats.unserved import unserved
from mmd_workers.media.identity import digest
from mmd_workers.media.medium import MediumInfo, MediumKind

if TYPE_CHECKING:  # decode processes import this module's neighbours and stay free of pydantic
    from mmd_api.spec.media import MediaPolicy

FIELD = "spec.gateway.media"
MAX_SOURCE_FRAMES_PER_SECOND = 240  # frames of a source are bounded by its allowed duration times this
MAX_PACKETS_PER_SECOND = 2000  # the shortest in use are Opus frames of 2.5 ms; PCM packets are far larger
MIN_SAMPLE_RATE_HZ, MAX_SAMPLE_RATE_HZ = 1_000, 384_000
TRUNCATION_SLACK_SECONDS = 0.1


def probe(
    data: bytes,
    modality: Modality,
    policy: MediaPolicy,
    known_digest: str | None = None,
    page: int = 0,
    of_video: bool = False,
) -> MediumInfo:
    """Measure a medium; `modality` is what the request declared, and is only checked.

    `known_digest`: digest of these bytes, if already computed. `page`: page of a document whose image is the medium; 0: the bytes
    are the medium. `of_video`: the sound belongs to a video, so the file may have as many bytes as a video.

    Runs in the calling process: bytes from outside belong in `sandbox.DecodePool.probe`.

    Raises:
        BadMediaError: the bytes are not of this modality, are broken or truncated, or exceed a limit of the policy.
    """
    if not data:
        raise BadMediaError(f"the {modality} is empty; send the file's bytes")
    kind = kind_of_file(modality, page, of_video)
    limit_bytes = getattr(policy, kind).max_bytes
    if len(data) > limit_bytes:
        raise _over(kind, "bytes", len(data), limit_bytes, "maxBytes")
    if page:
        width, height = document.page_size(data, page, policy)
        sha256 = known_digest or digest(data)
        return MediumInfo(
            modality, sha256, len(data), containers.DOCUMENT, width=width, height=height, page=page
        )
    container = containers.sniff(data)
    if container is None:
        if (known := unserved(data)) is not None:
            raise BadMediaError(f"the {modality} is {known[0]}, which is not served; {known[1]}")
        allowed = ", ".join(sorted(containers.CONTAINERS[modality]))
        raise BadMediaError(
            f"the {modality} has an unknown format (its first bytes match no supported format); send one of: {allowed}"
        )
    is_still = (
        modality == "video"
        and container in containers.IMAGE_FORMATS
        and not animations.is_animated(data, container)
    )
    if container not in containers.CONTAINERS[modality] or is_still:
        raise BadMediaError(
            f"declared as {modality}, but the bytes are {container}; use the content part of that type"
        )
    measure = {"image": _probe_image, "video": _probe_video, "audio": _probe_audio}[modality]
    facts = measure(data, container, policy)
    sha256 = known_digest or digest(data)
    return MediumInfo(modality, sha256, len(data), container, **facts, of_video=of_video)


def kind_of_file(modality: Modality, page: int, of_video: bool) -> MediumKind:
    """The kind of the file that is or contains a medium. Its limit of bytes counts."""
    if page:
        return "document"
    return "video" if of_video else modality


def probe_pages(data: bytes, pages: str, most: int, policy: MediaPolicy) -> list[MediumInfo]:
    """Measure the chosen pages of a document as images; see `document.page_sizes`. Runs in the calling process.

    Raises:
        BadMediaError: the bytes are no document, are broken, or exceed a limit of the policy.
    """
    if not data:
        raise BadMediaError("the document is empty; send the file's bytes")
    limit_bytes = policy.document.max_bytes
    if len(data) > limit_bytes:
        raise _over("document", "bytes", len(data), limit_bytes, "maxBytes")
    if (container := containers.sniff(data)) != containers.DOCUMENT:
        raise BadMediaError(
            f"declared as document, but the bytes are {container or 'of an unknown format'}; send a PDF"
        )
    return [
        MediumInfo("image", "", len(data), containers.DOCUMENT, width=width, height=height, page=number)
        for number, width, height in document.page_sizes(data, pages, most, policy)
    ]


def resampled_num_samples(num_samples: int, source_hz: int, target_hz: int) -> int:
    """Length of a waveform after resampling: ceil(n * target / source), as in librosa and `decode_audio`."""
    return -(-num_samples * target_hz // source_hz)


def _over(
    modality: MediumKind, what: str, value: float, limit: float, field: str, of: str | None = None
) -> BadMediaError:
    return BadMediaError(
        f"the {modality} has {value:g} {what}, more than the limit of {limit:g}; send less, or raise {FIELD}.{of or modality}.{field}"
        if isinstance(value, float)
        else f"the {modality} has {value} {what}, more than the limit of {limit}; send less, or raise {FIELD}.{of or modality}.{field}"
    )


def _probe_image(data: bytes, container: str, policy: MediaPolicy) -> dict[str, Any]:
    image = containers.open_image(data, container)
    width, height = image.size
    _check_pixels("image", width, height, policy)
    if image.mode not in containers.PIXEL_MODES:
        raise BadMediaError(
            f"the {container} image has pixels of mode {image.mode}, which have no defined colours in 8 bits; send 8 or 16 bits a channel, "
            "grey, RGB or CMYK"
        )
    if containers.is_preview(image):
        raise BadMediaError(
            f"the first page of the {container} is a preview, as in camera raw files; convert it to JPEG, PNG or a TIFF of one page"
        )
    if containers.orientation(image, data) >= 5 and not containers.turned_by_pillow(image):
        width, height = height, width
    return {"width": width, "height": height}


def _check_pixels(modality: Modality, width: int, height: int, policy: MediaPolicy) -> None:
    if width < 1 or height < 1:
        raise BadMediaError(f"the {modality} is {width}x{height} pixels; send a non-empty one")
    if width * height > policy.image.max_pixels:
        raise _over(
            modality,
            f"pixels ({width}x{height})",
            width * height,
            policy.image.max_pixels,
            "maxPixels",
            "image",
        )


def _probe_animation(data: bytes, container: str, policy: MediaPolicy) -> dict[str, Any]:
    size = _probe_image(data, container, policy)
    limit_seconds = policy.video.max_duration_seconds
    table = animations.packet_table(data, container, limit_seconds * MAX_SOURCE_FRAMES_PER_SECOND)
    _check_packets(table, limit_seconds)
    fps, duration = _timing(0.0, table)
    if duration > limit_seconds:
        raise _over("video", "seconds", duration, limit_seconds, "maxDurationSeconds")
    return {**size, "num_frames": table.num_frames, "fps": fps, "duration_seconds": duration}


def _check_packets(table: containers.VideoTable, limit_seconds: int) -> None:
    if len(table.pts) > (limit := limit_seconds * MAX_SOURCE_FRAMES_PER_SECOND):
        raise _over("video", "or more frames", len(table.pts), limit, "maxDurationSeconds")


def _probe_video(data: bytes, container: str, policy: MediaPolicy) -> dict[str, Any]:
    if container in animations.CONTAINERS:
        return _probe_animation(data, container, policy)
    limit_seconds = policy.video.max_duration_seconds
    with containers.open_av(data, container, packets_only=True) as opened:
        stream = containers.video_stream(opened, container)
        has_sound = containers.has_audio_stream(opened)
        width, height = stream.codec_context.width, stream.codec_context.height
        _check_pixels("video", width, height, policy)
        if stream.duration and (declared := float(stream.duration * stream.time_base)) > limit_seconds:
            raise _over("video", "seconds", declared, limit_seconds, "maxDurationSeconds")
        table = containers.video_table(opened, stream, limit_seconds * MAX_SOURCE_FRAMES_PER_SECOND)
        _check_packets(table, limit_seconds)
        if container in containers.ISO_MEDIA and len(table.pts) < stream.frames - 1:
            raise BadMediaError(
                f"the video is truncated: its index declares {stream.frames} frames, but only {len(table.pts)} are present; send the complete file"
            )
        num_frames = table.num_frames
        if num_frames == 0:
            raise BadMediaError("the video has no frames; send one with at least one frame")
        fps, duration = _timing(float(stream.average_rate or stream.guessed_rate or 0), table)
        orientation = containers.track_orientation(data, container, stream.id)
    if duration > limit_seconds:
        raise _over("video", "seconds", duration, limit_seconds, "maxDurationSeconds")
    if orientation >= 5:
        width, height = height, width
    return {
        "width": width,
        "height": height,
        "num_frames": num_frames,
        "fps": fps,
        "duration_seconds": duration,
        "has_sound": has_sound,
    }


def _timing(declared: float, table: containers.VideoTable) -> tuple[float, float]:
    """Frames per second and duration. The declared rate counts when the timestamps agree with it to two percent."""
    times = table.presentation()
    measured = 0.0
    if times is not None and len(times) > 1:
        measured = (len(times) - 1) / float((times[-1] - times[0]) * table.time_base)
    elif times is not None and table.last_duration > 0:
        measured = 1 / float(table.last_duration * table.time_base)
    fps = declared
    if measured and not (declared and abs(declared - measured) <= 0.02 * measured):
        fps = measured
    if not (math.isfinite(fps) and 0 < fps <= 10_000):
        raise BadMediaError(
            "the video's timestamps yield no frame rate; re-encode the file with a frame rate"
        )
    return fps, table.num_frames / fps


def _probe_audio(data: bytes, container: str, policy: MediaPolicy) -> dict[str, Any]:
    limit_seconds = policy.audio.max_duration_seconds
    with containers.open_av(data, container) as opened:
        stream = containers.audio_stream(opened)
        rate = stream.codec_context.sample_rate
        if not MIN_SAMPLE_RATE_HZ <= rate <= MAX_SAMPLE_RATE_HZ:
            raise BadMediaError(
                f"the audio's sample rate is {rate} Hz; send {MIN_SAMPLE_RATE_HZ} to {MAX_SAMPLE_RATE_HZ} Hz"
            )
        declared = float(stream.duration * stream.time_base) if stream.duration else 0.0
        if declared > limit_seconds and container in ("wav", "flac", "mp4"):
            raise _over("audio", "seconds", declared, limit_seconds, "maxDurationSeconds")
        num_samples = containers.count_samples(opened, stream, limit_seconds * MAX_PACKETS_PER_SECOND)
    duration = num_samples / rate
    if num_samples == 0:
        raise BadMediaError("the audio has no samples; send a non-empty clip")
    if duration > limit_seconds:
        raise _over("audio", "seconds", duration, limit_seconds, "maxDurationSeconds")
    if missing := missing_bytes(data, container):
        raise BadMediaError(
            f"the audio is truncated: {missing} bytes that its header declares are missing; send the complete file"
        )
    if container in ("flac", "mp4") and declared - duration > TRUNCATION_SLACK_SECONDS + 0.02 * declared:
        raise BadMediaError(
            f"the audio is truncated: its header declares {declared:.2f} seconds, but only {duration:.2f} are present; send the complete file"
        )
    return {"duration_seconds": duration, "num_samples": num_samples, "sample_rate_hz": rate}
