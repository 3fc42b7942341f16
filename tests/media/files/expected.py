"""Writes expected.json: what the programs of Debian read from the files of this folder, in a few numbers for each.

Images and frames are the mean colours of 4 x 3 cells, sounds a few samples of 16 bits. Run by make.sh.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
IMAGES = {"png", "jpg", "webp", "gif", "bmp", "tiff", "avif", "heic"}
VIDEOS = {"mp4", "mov", "mkv", "webm", "ts", "avi", "flv", "mpg", "mts", "3gp"}
UPRIGHT = {  # of which ImageMagick 6 and avifdec do not know
    "turned.png": ["-rotate", "90"],
    "turned.avif": ["-rotate", "90"],
    "xmp.png": ["-rotate", "270"],
}
MISTIMED = {"packed.mkv", "unpacked.mp4", "copied.mp4", "copied.mkv"}
"""Whose times are those of decoding."""
COLUMNS, ROWS, POINTS = 4, 3, 24


def run(*command: str) -> bytes:
    return subprocess.run(command, check=True, capture_output=True, cwd=HERE).stdout


def cells(pixels: np.ndarray) -> list[list[int]]:
    """Mean colours of the cells of [height, width, 3], row by row."""
    return [
        cell.mean((0, 1)).round().astype(int).tolist()
        for row in np.array_split(pixels, ROWS, axis=0)
        for cell in np.array_split(row, COLUMNS, axis=1)
    ]


def image(name: str) -> dict[str, object]:
    upright = UPRIGHT.get(name, ["-auto-orient"])
    shown = f"{name}[0]"
    scratch = "/tmp/expected.png"
    if name.endswith(".avif"):
        run("avifdec", "--index", "0", name, scratch) if name == "animated.avif" else run(
            "avifdec", name, scratch
        )
        shown = scratch
    elif name.endswith(".heic"):
        run("heif-convert", name, scratch)
        shown = scratch
    elif name == "animated.webp":
        run("webpmux", "-get", "frame", "1", name, "-o", "/tmp/expected.webp")
        run("dwebp", "/tmp/expected.webp", "-o", scratch)
        shown = scratch
    elif name.endswith(".webp"):
        run("dwebp", name, "-o", scratch)
        shown = scratch
    made = ["convert", shown, *upright, "-alpha", "off", "-colorspace", "sRGB", "-depth", "8"]
    width, height = map(int, run(*made, "-format", "%w %h", "info:").split())
    pixels = np.frombuffer(run(*made, "rgb:-"), np.uint8).reshape(height, width, 3)
    return {"size": [width, height], "cells": cells(pixels)}


def probed(name: str, stream: str, fields: str) -> list[str]:
    shown = run(
        "ffprobe",
        "-v",
        "error",
        "-select_streams",
        stream,
        "-show_entries",
        f"stream={fields}",
        "-of",
        "json",
        name,
    )
    streams = json.loads(shown)["streams"]
    return [str(streams[0][field]) for field in fields.split(",")] if streams else []


def video(name: str) -> dict[str, object]:
    ppm = run(
        "ffmpeg",
        "-v",
        "error",
        "-i",
        name,
        "-map",
        "0:v:0",
        "-vsync",
        "passthrough",
        "-pix_fmt",
        "rgb24",
        "-f",
        "image2pipe",
        "-c:v",
        "ppm",
        "-",
    )
    frames = []
    while ppm:
        _, size, _, rest = ppm.split(b"\n", 3)
        width, height = map(int, size.split())
        frames.append(np.frombuffer(rest[: 3 * width * height], np.uint8).reshape(height, width, 3))
        ppm = rest[3 * width * height :]
    chosen = sorted({0, len(frames) // 2, len(frames) - 1})
    return {
        "size": [width, height],
        "frames": len(frames),
        **shown(name),
        "cells": {number: cells(frames[number]) for number in chosen},
    }


def shown(name: str) -> dict[str, object]:
    """Which frames are key frames, and the seconds of each after the first one; of files without true timestamps, none."""
    entries = "frame=key_frame,best_effort_timestamp_time"
    listed = run(
        "ffprobe", "-v", "error", "-select_streams", "v:0", "-show_entries", entries, "-of", "json", name
    )
    frames = json.loads(listed)["frames"]
    keys = [number for number, frame in enumerate(frames) if frame["key_frame"]]
    if name.endswith(".avi") or name in MISTIMED:
        return {"keys": keys}
    seconds = [float(frame["best_effort_timestamp_time"]) for frame in frames]
    return {"keys": keys, "seconds": [round(at - seconds[0], 3) for at in seconds]}


def sound(name: str) -> dict[str, object]:
    rate, channels = map(int, probed(name, "a:0", "sample_rate,channels"))
    if name == "lossless.caf":  # FFmpeg cuts the end of ALAC in CAF off twice
        return sound("lossless.m4a")
    if name.endswith(".ogg"):  # FFmpeg miscounts the end of Vorbis
        raw = run("oggdec", "-Q", "-R", "-o", "-", name)
    else:
        raw = run("ffmpeg", "-v", "error", "-i", name, "-map", "0:a:0", "-ac", "1", "-f", "s16le", "-")
    samples = np.frombuffer(raw, "<i2")
    if name.endswith(
        (".m4a", ".mp4")
    ):  # FFmpeg 5 leaves the encoder's padding at the end, which the edit list cuts
        samples = samples[: round(float(probed(name, "a:0", "duration")[0]) * rate)]
    at = np.linspace(0, len(samples) - 1, POINTS).astype(int)
    return {"rate": rate, "channels": channels, "samples": len(samples), "points": samples[at].tolist()}


def main() -> None:
    found: dict[str, dict[str, object]] = {"image": {}, "video": {}, "audio": {}}
    for path in sorted(HERE.iterdir()):
        kind = path.suffix[1:]
        if kind in IMAGES:
            found["image"][path.name] = image(path.name)
        elif kind not in ("py", "sh", "md", "json"):
            if kind in VIDEOS and probed(path.name, "v:0", "codec_name"):
                found["video"][path.name] = video(path.name)
            if probed(path.name, "a:0", "codec_name"):
                found["audio"][path.name] = sound(path.name)
    lines = [
        f' "{kind}": {{\n'
        + ",\n".join(
            f'  "{name}": {json.dumps(facts, separators=(",", ":"))}' for name, facts in files.items()
        )
        + "\n }"
        for kind, files in found.items()
    ]
    (HERE / "expected.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
