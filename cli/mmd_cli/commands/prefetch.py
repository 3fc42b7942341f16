"""`mmd prefetch`: downloads a deployment's weights to this machine's cache, where `mmd up` and
`mmd plan-memory` find them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as Bar

from mmd_api.contract.weights import WeightsError
from mmd_api.faults import InvalidDeploymentError
from mmd_cli.console import console, fail, fail_with_faults
from mmd_cli.errors import CommandError

if TYPE_CHECKING:
    from mmd_workers.weights.progress import DownloadProgress

REDRAW_SECONDS = 0.25


def prefetch(
    file: Annotated[Path, typer.Option("--file", "-f", exists=True, help="A MultimodalDeployment.")],
) -> None:
    """Download the weights of a deployment to this machine, as its Job does on a cluster. Continues an earlier download.

    Exit status: 0, all files are there and verified; 1, they are not.
    """
    from mmd_api.weights import downloads_of
    from mmd_cli.local import up as runner
    from mmd_workers.weights import cache
    from mmd_workers.weights.download import prefetch as download
    from mmd_workers.weights.progress import DownloadProgress

    try:
        downloads = downloads_of(runner.load(file).spec)
    except InvalidDeploymentError as error:
        fail_with_faults({str(file): error})
    if not downloads:
        console.print("nothing to download: the model is a path or built in")
        return
    progress = DownloadProgress()
    with _drawn(progress):
        try:
            download(downloads, cache.root(), progress)
        except WeightsError as error:
            raise fail(CommandError(error.message)) from error
    for entry in downloads:
        console.print(f"{entry.url}: {cache.root() / entry.folder}", highlight=False, soft_wrap=True)


@contextmanager
def _drawn(progress: DownloadProgress) -> Iterator[None]:
    """Draw the progress of a download until it ends."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True))
    with Bar(*columns, TransferSpeedColumn(), TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task("looking up", total=None)
        ended = threading.Event()

        def draw() -> None:
            now = progress.snapshot()
            bar.update(
                task, description=now.state.lower(), total=now.total_bytes or None, completed=now.bytes
            )

        def follow() -> None:
            while not ended.wait(REDRAW_SECONDS):
                draw()

        follower = threading.Thread(target=follow, name="progress", daemon=True)
        follower.start()
        try:
            yield
        finally:
            ended.set()
            follower.join()
            draw()
