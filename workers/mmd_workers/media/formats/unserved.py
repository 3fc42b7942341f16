"""Formats that are recognised and not served, each with its remedy. Independent of policies and the model; opens nothing."""

from __future__ import annotations

_PICTURE = "convert it to PNG or JPEG, for example with `magick FILE picture.png`"
_VIDEO = "convert it to MP4, for example with `ffmpeg -i FILE -pix_fmt yuv420p video.mp4`"
_SOUND = "convert it to FLAC, for example with `ffmpeg -i FILE sound.flac`"
_MOVIE = "convert it to MP4 or FLAC, for example with `ffmpeg -i FILE -pix_fmt yuv420p video.mp4`"

FORMATS: tuple[tuple[int, bytes, str, str], ...] = (
    (0, b"\x30\x26\xb2\x75\x8e\x66\xcf\x11", "ASF (WMV, WMA)", _MOVIE),
    (0, b".RMF", "RealMedia", _MOVIE),
    (0, b"\x06\x0e\x2b\x34", "MXF", _MOVIE),
    (0, b"\0\0\x01\xb3", "an MPEG video stream without a container", _VIDEO),
    (0, b"\0\0\0\x01", "an H.264 or HEVC stream without a container", _VIDEO),
    (0, b"DKIF", "IVF", _VIDEO),
    (0, b"YUV4MPEG2", "YUV4MPEG2", _VIDEO),
    (0, b"\x1f\x07\0", "DV", _VIDEO),
    (0, b"FWS", "Flash (SWF)", _VIDEO),
    (0, b"CWS", "Flash (SWF)", _VIDEO),
    (8, b"AIFF", "AIFF", _SOUND),
    (8, b"AIFC", "AIFF-C", _SOUND),
    (0, b"\x0b\x77", "AC-3", _SOUND),
    (0, b"MAC ", "Monkey's Audio", _SOUND),
    (0, b"wvpk", "WavPack", _SOUND),
    (0, b"DSD ", "DSD", _SOUND),
    (0, b"MThd", "MIDI", "render it to sound and send that as WAV or FLAC"),
    (4, b"JXL \r\n\x87\n", "JPEG XL", _PICTURE),
    (0, b"\xff\x0a", "JPEG XL", _PICTURE),
    (4, b"jP  \r\n\x87\n", "JPEG 2000", _PICTURE),
    (0, b"\xff\x4f\xff\x51", "JPEG 2000", _PICTURE),
    (0, b"MM\0+", "BigTIFF in big-endian order", "save it as little-endian or classic TIFF, or as PNG"),
    (0, b"8BPS", "Photoshop (PSD)", _PICTURE),
    (0, b"\x76\x2f\x31\x01", "OpenEXR", "tone-map it and send it as PNG or JPEG"),
    (0, b"#?RADIANCE", "Radiance HDR", "tone-map it and send it as PNG or JPEG"),
    (128, b"DICM", "DICOM", "apply its window and send it as PNG"),
    (0, b"\0\0\x01\0", "ICO", _PICTURE),
    (0, b"<svg", "SVG", "render it and send it as PNG"),
)
"""(offset, magic bytes, name, remedy)."""


def unserved(data: bytes) -> tuple[str, str] | None:
    """Name and remedy of a format that is known and not served."""
    for at, magic, name, remedy in FORMATS:
        if data.startswith(magic, at):
            return name, remedy
    if data[:5] == b"<?xml" and b"<svg" in data[:1024]:
        return "SVG", "render it and send it as PNG"
    return None
