"""`mmd up`: runs a whole deployment as processes on this machine, until Ctrl-C."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.live import Live
from rich.table import Table

from mmd_cli.console import NO_KEYS, console, run
from mmd_cli.local.state import EXITED
from mmd_workers.observe.logs import printable


def up(
    file: Annotated[Path, typer.Option("--file", "-f", exists=True, help="A MultimodalDeployment.")],
    port: Annotated[int, typer.Option(help="Port of the API.")] = 8000,
    admin_port: Annotated[int, typer.Option(help="Port for metrics and state. 0 picks a free port.")] = 0,
    threads: Annotated[
        int, typer.Option(help="Compute threads per worker. 0 divides the cores among the workers.")
    ] = 0,
    keys: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="Tenants and hashes of their API keys, for spec.gateway.auth. The gateway follows the file.",
        ),
    ] = None,
    tls: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            file_okay=False,
            help="Folder with tls.crt and tls.key, for spec.gateway.tls. The gateway follows them.",
        ),
    ] = None,
) -> None:
    """Run a deployment as processes on this machine, until Ctrl-C."""
    from mmd_cli.local import up as runner
    from mmd_cli.local.pods import LocalSecrets

    async def serve() -> None:
        deployment = runner.load(file)
        with StartProgress() as progress:
            async with runner.running(
                deployment,
                port=port,
                admin_port=admin_port,
                threads=threads,
                log_line=progress.log,
                progress=progress.show,
                follow=file,
                secrets=LocalSecrets(keys, tls),
            ) as local:
                progress.stop()
                console.print(
                    f"[bold]{local.name}[/bold] serves {local.model} at {local.gateway_url}/v1",
                    highlight=False,
                )
                console.print(
                    "ask: mmd chat --image FILE    inspect: mmd status    stop: Ctrl-C", highlight=False
                )
                console.print(f"page, metrics and state: {local.admin_url}", highlight=False)
                if keys is None:
                    console.print(f"API keys: {NO_KEYS}", highlight=False)
                await runner.until_stopped()
                console.print("stopping once the requests in flight have finished", highlight=False)

    run(serve())


class StartProgress:
    """Shows starting pods as a live table on a terminal, as lines elsewhere.

    Afterwards it prints prefixed log lines.
    """

    def __init__(self, quiet_logs: bool = False) -> None:
        self._quiet = quiet_logs
        self._live: Live | None = None
        self._printed: dict[str, str] = {}

    def __enter__(self) -> StartProgress:
        if console.is_terminal:
            self._live = Live(console=console, refresh_per_second=8, transient=False)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End the live table."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def show(self, pods: list[Any]) -> None:
        """Show how far the pods have come."""
        if self._live is not None:
            table = Table.grid(padding=(0, 2))
            for item in pods:
                mark = {"ready": "[green]●[/green]", "loading": "[yellow]●[/yellow]"}.get(
                    item.state, "[dim]●[/dim]"
                )
                table.add_row(mark, item.pod.name, item.state, f"{item.seconds:.1f} s")
            self._live.update(table)
            return
        for item in pods:
            if self._printed.get(item.pod.name) != item.state:
                self._printed[item.pod.name] = item.state
                console.print(f"{item.pod.name}: {item.state} ({item.seconds:.1f} s)", highlight=False)

    def log(self, pod: str, line: str) -> None:
        """Print a line that a pod has printed."""
        if not self._quiet or re.search(r"\b(ERROR|CRITICAL|Traceback)\b", line) or EXITED in line:
            console.print(f"[dim]{pod}[/dim] ", end="", highlight=False)
            console.print(printable(line, keep="\t"), highlight=False, markup=False, soft_wrap=True)
