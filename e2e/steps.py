"""The table of what was done and how long it took."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

console = Console(width=120, highlight=False)


@dataclass(slots=True)
class Step:
    """`note` is filled by the code of the step."""

    name: str
    seconds: float = 0.0
    result: str = ""
    note: str = ""


@dataclass(slots=True)
class Steps:
    """All steps of a run, in order."""

    done: list[Step] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    @contextmanager
    def step(self, name: str) -> Iterator[Step]:
        step = Step(name)
        self.done.append(step)
        console.print(f"▸ {name}")
        began = time.monotonic()
        try:
            yield step
            step.result = "ok"
        except BaseException:
            step.result = "[red]failed[/red]"
            free = shutil.disk_usage(Path(__file__)).free / 2**30
            step.note = f"{step.note} {free:.1f} GiB of disk free".strip()
            raise
        finally:
            step.seconds = time.monotonic() - began
            console.print(f"  {step.result} after {step.seconds:.1f} s {step.note}")

    def table(self) -> Table:
        table = Table(title="make e2e", title_justify="left")
        for heading in ("step", "seconds", "result", ""):
            table.add_column(heading, justify="right" if heading == "seconds" else "left")
        for step in self.done:
            table.add_row(step.name, f"{step.seconds:.1f}", step.result, step.note)
        table.add_section()
        table.add_row("all", f"{time.monotonic() - self.began:.1f}")
        return table
