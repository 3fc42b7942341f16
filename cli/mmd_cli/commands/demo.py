"""`mmd demo`: runs a pipeline on this machine and asks it about an image, a video and a sound."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from mmd_api.spec.engine import EngineSpec, EngineType
from mmd_cli.commands.up import StartProgress
from mmd_cli.console import console, errors, run


def demo(
    file: Annotated[
        Path, typer.Option("--file", "-f", exists=True, help="Deployment file of the demo model.")
    ] = Path("examples/demo.yaml"),
    report: Annotated[Path, typer.Option(help="File to write the HTML report to.")] = Path(
        "demo-report.html"
    ),
    seed: Annotated[int, typer.Option(help="Seed for the generated files.")] = 20_261_121,
    engine: Annotated[
        EngineType | None,
        typer.Option(case_sensitive=False, help="Engine to use instead of the one in the file."),
    ] = None,
) -> None:
    """Start a pipeline and ask it about an image, a video and an audio clip; exit 0 only if every answer is correct."""
    from mmd_cli import client as gateway_client
    from mmd_cli import demo as questions
    from mmd_cli import report as html
    from mmd_cli.local import up as runner

    deployment = runner.load(file)
    if engine is not None:
        chosen = deployment.spec.model_copy(update={"engine": EngineSpec(type=engine)})
        deployment = deployment.model_copy(update={"spec": chosen})

    async def serve() -> list[questions.Asked]:
        with StartProgress(quiet_logs=True) as progress:
            async with runner.running(deployment, log_line=progress.log, progress=progress.show) as local:
                progress.stop()
                client = gateway_client.Client(local.gateway_url)
                asked = []
                for label, sample in questions.samples(seed):
                    asked.append(
                        await asyncio.to_thread(questions.ask, client, local.admin_url, label, sample)
                    )
                    console.print(
                        f"{label}: {sample.question} → {asked[-1].answer.text.strip()}", highlight=False
                    )
                return asked

    asked = run(serve())
    console.print(_demo_table(asked))
    html.write(report, asked, "Questions of the demo, and the path of each request")
    console.print(f"timelines: {report.resolve()}", highlight=False, soft_wrap=True)
    wrong = sum(not item.right for item in asked)
    if wrong:
        errors.print(f"[red]{wrong} of {len(asked)} answers are wrong[/red]")
        raise typer.Exit(1)


def _demo_table(asked: list[Any]) -> Table:
    from mmd_cli.demo import PHASES

    table = Table(title="milliseconds by phase", title_justify="left")
    for heading in ("file", "question", "streamed answer", "right"):
        table.add_column(heading)
    for phase in PHASES:
        table.add_column(phase.replace("_", " "), justify="right")
    for item in asked:
        table.add_row(
            item.label,
            item.sample.question,
            item.answer.text.strip(),
            "[green]yes[/green]" if item.right else f"[red]no[/red]: {item.sample.answer}",
            *(
                f"{item.answer.timings[phase]:.0f}" if phase in item.answer.timings else "–"
                for phase in PHASES
            ),
        )
    return table
