"""Real media files, made with Pillow and FFmpeg, whose content is known frame by frame and sample by sample."""

import io
import struct
import tempfile
import zlib
from pathlib import Path

import av
import numpy as np
from PIL import Image


def picture(width=64, height=48):
    """A picture whose four corners differ: red, green, blue, white."""
    a = np.zeros((height, width, 3), np.uint8)
    a[: height // 2, : width // 2] = (255, 0, 0)
    a[: height // 2, width // 2 :] = (0, 255, 0)
    a[height // 2 :, : width // 2] = (0, 0, 255)
    a[height // 2 :, width // 2 :] = (255, 255, 255)
    return a


def image_bytes(fmt, pixels=None, orientation=None, **options):
    image = Image.fromarray(picture() if pixels is None else pixels)
    if orientation:
        exif = Image.Exif()
        exif[0x0112] = orientation
        options["exif"] = exif
    out = io.BytesIO()
    image.save(out, fmt, **options)
    return out.getvalue()


def png_claiming(width, height):
    """A tiny PNG whose header claims a size."""

    def chunk(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b"\0" * 64))
        + chunk(b"IEND", b"")
    )


def frame_pixels(number, width=64, height=48):
    """A frame whose eight stripes, black or white, spell its number in binary."""
    a = np.zeros((height, width, 3), np.uint8)
    for bit in range(8):
        if number >> bit & 1:
            a[:, bit * width // 8 : (bit + 1) * width // 8] = 255
    return a


def number_of(pixels):
    """Frame number that `frame_pixels` drew."""
    width = pixels.shape[1]
    stripes = [pixels[:, bit * width // 8 : (bit + 1) * width // 8].mean() for bit in range(8)]
    return sum(1 << bit for bit, level in enumerate(stripes) if level > 128)


PIXEL_FORMATS = {"mjpeg": "yuvj420p", "prores_ks": "yuv422p10le"}


def video_bytes(
    codec="libx264",
    container="mp4",
    frames=60,
    fps=30,
    width=64,
    height=48,
    rotation=0,
    options=None,
    mux=None,
    draw=None,
):
    with (
        tempfile.NamedTemporaryFile() as out,
        av.open(out.name, "w", format=container, options=mux or {}) as c,
    ):
        s = c.add_stream(codec, rate=fps, options=options or {})
        s.width, s.height, s.pix_fmt = width, height, PIXEL_FORMATS.get(codec, "yuv420p")
        if rotation:
            s.set_display_rotation(rotation)
        for i in range(frames):
            pixels = (draw or frame_pixels)(i, width, height)
            c.mux(s.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        c.mux(s.encode())
        c.close()
        return Path(out.name).read_bytes()


def tone(num_samples, rate, hertz=440.0):
    return (0.4 * np.sin(2 * np.pi * hertz * np.arange(num_samples) / rate)).astype(np.float32)


def audio_bytes(
    codec="pcm_s16le", fmt="s16", container="wav", rate=44100, num_samples=44100, waveform=None, layout="mono"
):
    waveform = tone(num_samples, rate) if waveform is None else waveform
    planes = waveform if waveform.ndim == 2 else waveform[None]
    out = io.BytesIO()
    with av.open(out, "w", format=container) as c:
        s = c.add_stream(codec, rate=rate, layout=layout, format=fmt)
        convert = av.AudioResampler(format=fmt, layout=layout, rate=rate)
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(planes), format="fltp", layout=layout)
        frame.sample_rate, frame.pts = rate, 0
        for converted in [*convert.resample(frame), *convert.resample(None)]:
            c.mux(s.encode(converted))
        c.mux(s.encode(None))
    return out.getvalue()


AUDIO_KINDS = [
    ("pcm_s16le", "s16", "wav", 44100),
    ("pcm_f32le", "flt", "wav", 48000),
    ("libmp3lame", "s16p", "mp3", 44100),
    ("libmp3lame", "s16p", "matroska", 44100),
    ("libopus", "s16", "ogg", 48000),
    ("libopus", "s16", "webm", 48000),
    ("flac", "s16", "flac", 44100),
    ("flac", "s16", "ogg", 44100),
    ("aac", "fltp", "ipod", 44100),
    ("aac", "fltp", "mp4", 48000),
    ("aac", "fltp", "adts", 44100),
    ("pcm_s16be", "s16", "caf", 44100),
    ("alac", "s16p", "caf", 44100),
    ("pcm_alaw", "s16", "au", 8000),
    ("pcm_mulaw", "s16", "wav", 8000),
    ("pcm_s24le", "s32", "w64", 48000),
]
VIDEO_KINDS = [
    ("libx264", "mp4", {}),
    ("libx264", "mov", {"bf": "3", "g": "12"}),
    ("libx264", "matroska", {"g": "10"}),
    ("libx264", "mpegts", {}),
    ("libvpx-vp9", "webm", {"deadline": "realtime", "cpu-used": "8", "g": "15"}),
    ("libvpx", "webm", {"deadline": "good", "cpu-used": "5", "auto-alt-ref": "1", "lag-in-frames": "16"}),
    ("mpeg4", "mp4", {}),
    ("mpeg4", "avi", {}),
    ("libx264", "flv", {"bf": "2"}),
    ("flv", "flv", {}),
    ("mpeg2video", "vob", {"bf": "2", "g": "12"}),
    ("mpeg1video", "mpeg", {"bf": "2", "g": "12"}),
    ("mjpeg", "avi", {}),
    ("mjpeg", "mov", {}),
    ("prores_ks", "mov", {}),
]
