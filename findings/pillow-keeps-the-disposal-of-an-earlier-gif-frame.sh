#!/usr/bin/env bash
# Pillow 13.0.0: a GIF frame without a disposal of its own gets that of the frame before it, and disappears.
#
# Each frame of a GIF says what becomes of it before the next one is drawn: 0 says nothing, which viewers and FFmpeg read as "leave it",
# 2 clears it. Pillow sets the method only where a frame has one that is not 0, so a frame with 0 after one with 2 is cleared, too.
#
# Here three frames of 3x1 pixels draw one pixel each: the first with disposal 2, the others with 0. Seen: in the third frame FFmpeg (av 18.1.0)
# has the second pixel, and Pillow has not. Exit status 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check pillow==13.0.0 av==18.1.0 numpy==2.4.6
cat >"$folder/frames.py" <<'PYTHON'
import io
import struct
import sys

import av
from PIL import Image

RED, GREEN, BLUE = 1, 2, 3
PALETTE = bytes([0, 0, 0, 255, 0, 0, 0, 255, 0, 0, 0, 255])


def pixel(left, colour, disposal):
    """A frame of one pixel at `left`. Its data: clear, the colour, end, of 3 bits each, the lowest first."""
    control = struct.pack("<BBBBHBB", 0x21, 0xF9, 4, disposal << 2, 10, 0, 0)
    image = struct.pack("<BHHHHB", 0x2C, left, 0, 1, 1, 0)
    codes = 4 | colour << 3 | 5 << 6
    return control + image + bytes([2, 2]) + codes.to_bytes(2, "little") + b"\0"


data = b"GIF89a" + struct.pack("<HHBBB", 3, 1, 0x91, 0, 0) + PALETTE
data += pixel(0, RED, 2) + pixel(1, GREEN, 0) + pixel(2, BLUE, 0) + b";"

with av.open(io.BytesIO(data)) as container:
    reference = [frame.to_ndarray(format="rgba")[0].tolist() for frame in container.decode(video=0)]
pillow = []
with Image.open(io.BytesIO(data)) as image:
    for number in range(image.n_frames):
        image.seek(number)
        frame = image.convert("RGBA")
        pillow.append([list(frame.getpixel((x, 0))) for x in range(3)])
for number, (theirs, ours) in enumerate(zip(reference, pillow, strict=True)):
    print(f"frame {number}: FFmpeg {theirs}, Pillow {ours}")
green = [0, 255, 0, 255]
sys.exit(not (reference[2][1] == green and pillow[2][1] != green))
PYTHON
"$folder/venv/bin/python" "$folder/frames.py"
