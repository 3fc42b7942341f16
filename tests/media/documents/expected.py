"""Writes expected.json: for each page that Poppler renders at 144 dots per inch, its size, and the mean colours of 12 x 8 cells. Run by make.sh."""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
COLUMNS, ROWS = 12, 8


def pages(name: str) -> list[dict[str, object]]:
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["pdftoppm", "-r", "144", HERE / name, f"{folder}/page"], check=True)
        return [page(path) for path in sorted(Path(folder).iterdir())]


def page(path: Path) -> dict[str, object]:
    _, size, _, data = path.read_bytes().split(b"\n", 3)
    width, height = map(int, size.split())
    pixels = np.frombuffer(data, np.uint8).reshape(height, width, 3)
    found = [
        cell.mean((0, 1)).round().astype(int).tolist()
        for row in np.array_split(pixels, ROWS, axis=0)
        for cell in np.array_split(row, COLUMNS, axis=1)
    ]
    return {"size": [width, height], "cells": found}


names = sorted(path.name for path in HERE.glob("*.pdf") if path.name != "encrypted.pdf")
(HERE / "expected.json").write_text(json.dumps({name: pages(name) for name in names}) + "\n")
