"""One small medium of each modality, as a data URL."""

from __future__ import annotations

import base64
import io
import wave

import av
from PIL import Image


def wav() -> bytes:
    out = io.BytesIO()
    with wave.open(out, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(16_000)
        sound.writeframes(b"\0\1" * 8_000)
    return out.getvalue()


def png() -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (56, 56), (200, 30, 30)).save(out, "PNG")
    return out.getvalue()


def pdf() -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (56, 56), (200, 30, 30)).save(out, "PDF")
    return out.getvalue()


def mp4() -> bytes:
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=8)
        stream.width = stream.height = 64
        stream.pix_fmt = "yuv420p"
        for i in range(8):
            frame = av.VideoFrame.from_image(Image.new("RGB", (64, 64), (30 * i, 0, 0)))
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return out.getvalue()


def url(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
