"""Animated images as videos: number and times of their pictures from headers, and the pictures as Pillow composes them.

Knows no policy. Only parts that are declared as video get here: of an image part the first picture counts. Sequences of AVIF and
HEIC have a track like any video.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from fractions import Fraction
from itertools import accumulate, islice

from PIL import GifImagePlugin, Image, PngImagePlugin

from mmd_api.contract.errors import BadMediaError
from mmd_workers.media import containers

CONTAINERS = frozenset({"gif", "png", "webp"})
TICKS_PER_SECOND = 1_000_000
SHORTEST_TICKS, SUBSTITUTE_TICKS = 10_000, 100_000
"""A picture that asks for the first or less is shown for the second, as in browsers and FFmpeg: many files have 0."""


def is_animated(data: bytes, container: str) -> bool:
    """Whether an image file has several pictures that are shown one after the other."""
    if container in CONTAINERS:
        return len(list(islice(_durations(data, container), 2))) > 1
    return containers.has_tracks(data, container)


def packet_table(data: bytes, container: str, most: int) -> containers.VideoTable:
    """The pictures of an animation in order, as `containers.video_table` has the packets of a video. Each but the first builds on
    the one before it.

    Raises:
        BadMediaError: the file's headers contradict each other.
    """
    durations = list(islice(_durations(data, container), most + 1))
    if container == "png" and len(durations) <= most and (declared := _declared(data)) != len(durations):
        raise BadMediaError(
            f"the png declares {declared} pictures, but has {len(durations)}; send a complete, valid file"
        )
    shown: list[int] = [ticks if ticks > SHORTEST_TICKS else SUBSTITUTE_TICKS for ticks in durations]
    count = len(shown)
    starts: list[int | None] = [0, *accumulate(shown[:-1])]
    return containers.VideoTable(
        codec=container,
        time_base=Fraction(1, TICKS_PER_SECOND),
        pts=starts[:count],
        key=[number == 0 for number in range(count)],
        shown=[True] * count,
        completing=[False] * count,
        last_duration=shown[-1] if shown else 0,
    )


def pictures(data: bytes, container: str) -> Iterator[Image.Image]:
    """The pictures of an animation in order, loaded, each valid until the next one.

    Raises:
        BadMediaError: the data is broken or truncated.
    """
    image = containers.open_image(data, container)
    # A PNG may begin with a picture for viewers without animations.
    number = int(getattr(image, "default_image", False))
    try:
        while True:
            if isinstance(image, GifImagePlugin.GifImageFile):
                image.disposal_method = 0  # Pillow keeps that of the picture before where one has 0
            try:
                image.seek(number)
            except EOFError:
                return
            _load(image)
            yield image
            number += 1
    except containers.BROKEN_IMAGE as error:
        raise BadMediaError(
            f"picture {number} of the {container} cannot be decoded ({error}); send a complete, valid file"
        ) from error


def _load(image: Image.Image) -> None:
    """Load a picture. Pillow draws one of a PNG on its copy of the picture before, which may have to be shown again."""
    if not isinstance(image, PngImagePlugin.PngImageFile) or image._prev_im is None:
        image.load()
        return
    before = image._prev_im.copy() if image.dispose_op == PngImagePlugin.Disposal.OP_PREVIOUS else None
    image.load()
    if before is not None:
        image._prev_im = before


def _durations(data: bytes, container: str) -> Iterator[int]:
    """Ticks that each picture asks to be shown for. None of an image without animation."""
    return {"gif": _gif_durations, "png": _png_durations, "webp": _webp_durations}[container](data)


def _gif_durations(data: bytes) -> Iterator[int]:
    """GIF 89a, 20 and 23."""
    if len(data) < 13:
        return
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    at, hundredths, is_first = 13 + _table_bytes(flags), 0, True
    while at + 10 <= len(data) and data[at] != 0x3B:
        kind = data[at]
        if kind == 0x2C:
            left, top, columns, rows, flags = struct.unpack_from("<4HB", data, at + 1)
            if is_first:  # decoders enlarge the canvas to the first picture
                width, height, is_first = max(width, left + columns), max(height, top + rows), False
            if left + columns > width or top + rows > height:
                raise BadMediaError(
                    f"a picture of the gif reaches beyond its {width}x{height} pixels; re-encode the file"
                )
            yield hundredths * TICKS_PER_SECOND // 100
            hundredths = 0
            at += 11 + _table_bytes(flags)
        elif kind == 0x21:
            if data[at + 1] == 0xF9:
                hundredths = int.from_bytes(data[at + 4 : at + 6], "little")
            at += 2
        else:
            at += 1
            continue
        while at < len(data) and data[at]:
            at += 1 + data[at]
        at += 1


def _table_bytes(flags: int) -> int:
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


def _png_durations(data: bytes) -> Iterator[int]:
    """PNG, third edition, 11.3.6.2. Without an acTL chunk before the pixels, there is no animation."""
    has_begun = False
    for kind, at in containers.png_chunks(data):
        has_begun |= kind == b"acTL"
        if kind == b"IDAT" and not has_begun:
            return
        if kind == b"fcTL" and has_begun and at + 24 <= len(data):
            number, parts = struct.unpack_from(">HH", data, at + 20)
            yield number * TICKS_PER_SECOND // (parts or 100)


def _declared(png: bytes) -> int:
    places = (at for kind, at in containers.png_chunks(png) if kind == b"acTL")
    at = next(places, len(png))
    return int.from_bytes(png[at : at + 4], "big")


def _webp_durations(data: bytes) -> Iterator[int]:
    """RFC 9649, 2.7.1.1."""
    at = 12
    while at + 8 <= len(data):
        name, size = struct.unpack_from("<4sI", data, at)
        if name == b"ANMF":
            yield int.from_bytes(data[at + 20 : at + 23], "little") * TICKS_PER_SECOND // 1000
        at += 8 + size + (size & 1)
