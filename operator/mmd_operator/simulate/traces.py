"""Requests over time: public traces read row by row, and generated loads.

CSV: Azure's text and multimodal traces (TIMESTAMP, ContextTokens, GeneratedTokens; NumImages where there are images, ours also NumVideos and
NumAudios; a missing column counts as zero) and BurstGPT (Timestamp, Request tokens, Response tokens). JSON lines: Mooncake (timestamp in
milliseconds, input_length, output_length) and Qwen-Bailian (the same with chat_id, timestamp in seconds). `ContextTokens` counts the whole
prompt, tokens of media included. Prefixes that requests share (hash_ids) are not modelled.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mmd_api.contract.pools import MODALITIES, Modality
from mmd_operator.simulate.calibration import HEAVIEST_FIRST, Kind

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURST_COLUMNS = ("Timestamp", "Request tokens", "Response tokens")
CSV_FORMS = (AZURE_COLUMNS, BURST_COLUMNS)
"""Columns of arrival time, prompt tokens and output tokens; others are ignored."""
LARGEST_COUNT = 100_000_000
_COLUMN_OF: dict[Modality, str] = {"image": "NumImages", "video": "NumVideos", "audio": "NumAudios"}


class TraceError(ValueError):
    """A trace that cannot be read; the message names the file, the row and the remedy."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their arrival. All arrays are [requests]; `arrivals` are seconds from the first one."""

    name: str
    arrivals: npt.NDArray[np.float64]
    media: dict[Modality, npt.NDArray[np.int64]]
    context_tokens: npt.NDArray[np.int64]
    output_tokens: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.arrivals)

    @property
    def seconds(self) -> float:
        """Time from the first arrival to the last."""
        return float(self.arrivals[-1]) if len(self) else 0.0

    def kinds(self) -> dict[Kind, npt.NDArray[np.bool_]]:
        """Masks of the requests of each kind, [requests]. A request has the kind of its heaviest medium, or is text."""
        remaining = np.ones(len(self), dtype=bool)
        kinds: dict[Kind, npt.NDArray[np.bool_]] = {}
        for modality in HEAVIEST_FIRST:
            kinds[modality] = remaining & (self.media[modality] > 0)
            remaining &= ~kinds[modality]
        return {"text": remaining, **kinds}

    def between(self, start: float, end: float) -> Trace:
        """The requests that arrive between two times, with arrivals counted from `start`."""
        selected = (self.arrivals >= start) & (self.arrivals < end)
        return Trace(
            self.name,
            self.arrivals[selected] - start,
            {m: counts[selected] for m, counts in self.media.items()},
            self.context_tokens[selected],
            self.output_tokens[selected],
        )

    def write_csv(self, path: Path) -> None:
        """Write the trace as a CSV that `load_trace` reads."""
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow([AZURE_COLUMNS[0], *_COLUMN_OF.values(), *AZURE_COLUMNS[1:]])
            columns = [self.media[m] for m in MODALITIES]
            for at, *counts in zip(
                self.arrivals, *columns, self.context_tokens, self.output_tokens, strict=True
            ):
                writer.writerow([datetime.fromtimestamp(float(at), UTC).isoformat(), *counts])


def load_trace(path: str | Path) -> Trace:
    """Read a trace; `.csv` is Azure's or BurstGPT's form, `.jsonl` Mooncake's or Qwen-Bailian's.

    Raises:
        TraceError: the file cannot be read, or a row is bad (named).
    """
    path = Path(path)
    readers: dict[str, Callable[[Path], Iterator[tuple[float, ...]]]] = {
        ".csv": _csv_rows,
        ".jsonl": _json_rows,
    }
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise TraceError(
            f"{path}: neither .csv (Azure, BurstGPT) nor .jsonl (Mooncake, Qwen-Bailian); rename or convert it"
        )
    try:
        rows = np.array(list(reader(path)), dtype=np.float64)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise TraceError(f"{path}: cannot be read ({error}); check the path") from error
    if not len(rows):
        raise TraceError(f"{path}: contains no requests; provide a trace with at least one row")
    return _trace(path.stem, rows)


def _trace(name: str, rows: npt.NDArray[np.float64]) -> Trace:
    """Build a trace from rows of (time, images, videos, audios, context, output), in any order."""
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    counts = rows[:, 1:].astype(np.int64)
    return Trace(
        name,
        rows[:, 0] - rows[0, 0],
        {modality: counts[:, n] for n, modality in enumerate(MODALITIES)},
        counts[:, 3],
        counts[:, 4],
    )


def _csv_rows(path: Path) -> Iterator[tuple[float, ...]]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(file)
        header = [name.strip() for name in next(reader, [])]
        form = next((form for form in CSV_FORMS if set(form) <= set(header)), None)
        if form is None:
            absent = [name for name in AZURE_COLUMNS if name not in header]
            raise TraceError(
                f"{path}: row 1: no column {', '.join(absent)}; the header must have the columns of an Azure or BurstGPT trace"
            )
        time_at, context_at, output_at = (header.index(name) for name in form)
        media_at = [header.index(name) if name in header else None for name in _COLUMN_OF.values()]
        for row in reader:
            where = f"{path}: row {reader.line_num}"
            if not row:
                continue
            if len(row) != len(header):
                raise TraceError(f"{where}: {len(row)} values for {len(header)} columns; fix or remove it")
            yield (
                _time(row[time_at], where),
                *(0 if n is None else _count(row[n], where, header[n]) for n in media_at),
                _count(row[context_at], where, header[context_at], least=1),
                _count(row[output_at], where, header[output_at]),
            )


def _json_rows(path: Path) -> Iterator[tuple[float, ...]]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            where = f"{path}: row {number}"
            if not line.strip():
                continue
            try:
                row: Any = json.loads(line)
            except json.JSONDecodeError as error:
                raise TraceError(f"{where}: not JSON ({error.msg}); fix or remove it") from error
            if not isinstance(row, dict) or not {"timestamp", "input_length", "output_length"} <= row.keys():
                raise TraceError(f"{where}: needs timestamp, input_length and output_length; add them")
            time_unit_seconds = 1.0 if "chat_id" in row else 0.001
            yield (
                _number(row["timestamp"], where, "timestamp") * time_unit_seconds,
                0,
                0,
                0,
                _count(row["input_length"], where, "input_length", least=1),
                _count(row["output_length"], where, "output_length"),
            )


def _time(text: str, where: str) -> float:
    """An ISO date and time (UTC unless it states otherwise), or seconds."""
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        return _number(text, where, "TIMESTAMP")
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _number(value: object, where: str, column: str) -> float:
    try:
        number = float(value)  # type: ignore[arg-type]  # whatever JSON or CSV held
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, bool) or not (math.isfinite(number) and number >= 0):
        raise TraceError(f"{where}: {column} is {value!r}; give a time or a number of at least 0")
    return number


def _count(value: object, where: str, column: str, least: int = 0) -> int:
    number = _number(value, where, column)
    if not number.is_integer() or not least <= number <= LARGEST_COUNT:
        raise TraceError(f"{where}: {column} is {value!r}; give an integer from {least} to {LARGEST_COUNT}")
    return int(number)


# --- generated loads ------------------------------------------------------------------------------------------


def _synthetic(
    name: str, rng: np.random.Generator, arrivals: npt.NDArray[np.float64], video_share: Any
) -> Trace:
    """Two in five requests bring images, `video_share` a video instead, one in fifty a sound; lengths are log-normal."""
    count = len(arrivals)
    draw = rng.random(count)
    videos = (draw < video_share).astype(np.int64)
    images = np.where((draw > 0.6) & (videos == 0), rng.geometric(0.6, count), 0).astype(np.int64)
    audios = (rng.random(count) < 0.02).astype(np.int64)
    text = np.clip(rng.lognormal(5.5, 1.0, count), 8, 16_000).astype(np.int64)
    return Trace(
        name,
        arrivals,
        {"image": images, "video": videos, "audio": audios},
        text + images * 800 + videos * 6000 + audios * 400,
        np.clip(rng.lognormal(4.6, 0.8, count), 1, 2000).astype(np.int64),
    )


def _thinned(
    rng: np.random.Generator,
    seconds: float,
    peak_rate: float,
    rate: Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]],
) -> npt.NDArray[np.float64]:
    """Arrivals of a Poisson process whose rate changes over time (Lewis and Shedler's thinning)."""
    candidates = np.sort(rng.random(rng.poisson(peak_rate * seconds)) * seconds)
    return candidates[rng.random(len(candidates)) * peak_rate < rate(candidates)]


def bursty(rate: float, seconds: float, seed: int) -> Trace:
    """A Poisson load of `rate` requests a second that now and then is four times as high for half a minute."""
    rng = np.random.default_rng(seed)
    starts = np.sort(rng.random(max(1, int(seconds / 300))) * seconds)

    def rates(at: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        since = at - starts[np.maximum(np.searchsorted(starts, at, side="right") - 1, 0)]
        return np.where((since >= 0) & (since < 30), 4 * rate, rate)

    return _synthetic("bursty", rng, _thinned(rng, seconds, 4 * rate, rates), 0.05)


def diurnal(rate: float, seconds: float, seed: int) -> Trace:
    """One day compressed into `seconds`: from 0.2 times `rate` at night to 1.8 times `rate` in the afternoon."""
    rng = np.random.default_rng(seed)

    def rates(at: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return rate * (1 - 0.8 * np.cos(2 * np.pi * at / seconds))

    return _synthetic("diurnal", rng, _thinned(rng, seconds, 1.8 * rate, rates), 0.05)


def video_storm(rate: float, seconds: float, seed: int) -> Trace:
    """A steady load in whose middle third every second request brings a video."""
    rng = np.random.default_rng(seed)
    arrivals = _thinned(rng, seconds, rate, lambda at: np.full(len(at), rate))
    storm = (arrivals > seconds / 3) & (arrivals < 2 * seconds / 3)
    return _synthetic("video-storm", rng, arrivals, np.where(storm, 0.5, 0.02))


GENERATORS: dict[str, Callable[[float, float, int], Trace]] = {
    "bursty": bursty,
    "diurnal": diurnal,
    "video-storm": video_storm,
}
