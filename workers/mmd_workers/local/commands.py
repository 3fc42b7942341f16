"""The commands that run, or speak to, a pipeline on this machine: worker, gateway, up, demo, chat, status, trace.

What takes long to import is imported by the commands that need it: every pod starts with this file.
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

import httpx
import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

from mmd_api.faults import InvalidDeploymentError
from mmd_api.pipeline import PoolName, Role
from mmd_workers.errors import MmdError
from mmd_workers.imports import uncollected
from mmd_workers.local import state, watching

T = TypeVar("T")

console = Console(width=None if sys.stdout.isatty() else 160)
errors = Console(stderr=True)

UrlOption = Annotated[
    str | None, typer.Option(help="The gateway's address; default: the deployment that runs here.")
]
NameOption = Annotated[str | None, typer.Option(help="Which of several deployments that run here.")]


def register(app: typer.Typer) -> None:
    """Add this file's commands to the root command."""
    for command in (worker, gateway, up, demo, chat, status, trace):
        app.command()(command)
    watching.register(app)


def _fail(error: MmdError) -> typer.Exit:
    errors.print(f"[red]error[/red] ({error.code}): {error.message}", highlight=False, soft_wrap=True)
    return typer.Exit(1)


def _run(work: Coroutine[Any, Any, T]) -> T:
    """Run a command's coroutine; what is wrong is said in one line, not in a traceback."""
    try:
        return asyncio.run(work)
    except MmdError as error:
        raise _fail(error) from error
    except InvalidDeploymentError as error:
        for fault in error.faults:
            errors.print(f"[red]error[/red] (invalid): {fault}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error
    except asyncio.CancelledError as error:
        raise typer.Exit(128 + signal.SIGTERM) from error


def _end_when_asked() -> None:
    """End by SIGTERM until the event loop has a handler of its own: Linux keeps the signal from a container's first process that
    has none, and a pod that is deleted while it starts would go on, and serve, until its grace is over."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def worker(
    pool: Annotated[str, typer.Option(help="encoder, prefill or decode: the pool this pod belongs to.")],
    roles: Annotated[str, typer.Option(help="Comma-separated roles out of encode, prefill, decode.")],
) -> None:
    """Run one worker pod (what the containers of the pools run)."""
    _end_when_asked()
    with uncollected():
        from mmd_workers.settings import WorkerSettings
        from mmd_workers.worker import run

    chosen = roles.split(",")
    if pool not in ("encoder", "prefill", "decode") or not set(chosen) <= {"encode", "prefill", "decode"}:
        raise typer.BadParameter(f"--pool {pool} --roles {roles}: see --help for what each may be")
    run(WorkerSettings.from_environment(), cast("PoolName", pool), cast("tuple[Role, ...]", tuple(chosen)))


def gateway() -> None:
    """Run one gateway pod (what the gateway's container runs)."""
    _end_when_asked()
    with uncollected():
        from mmd_workers.gateway.service import run
        from mmd_workers.settings import WorkerSettings

    run(WorkerSettings.from_environment())


def up(
    file: Annotated[Path, typer.Option("--file", "-f", exists=True, help="A MultimodalDeployment.")],
    port: Annotated[int, typer.Option(help="Where the gateway listens.")] = 8000,
    threads: Annotated[int, typer.Option(help="Compute threads of each worker; 0: share the cores.")] = 0,
) -> None:
    """Run a whole deployment as processes on this machine, until Ctrl-C."""
    from mmd_workers.local import up as runner

    async def serve() -> None:
        deployment = runner.load(file)
        with _Progress() as progress:
            async with runner.running(
                deployment, port=port, threads=threads, log_line=progress.log, progress=progress.show
            ) as local:
                progress.stop()
                console.print(
                    f"[bold]{local.name}[/bold] serves {local.model} at {local.gateway_url}/v1",
                    highlight=False,
                )
                console.print(
                    "ask it: mmd chat --image FILE    look: mmd status    stop: Ctrl-C", highlight=False
                )
                await runner.until_stopped()
                console.print("stopping: requests under way are finished first", highlight=False)

    _run(serve())


def demo(
    file: Annotated[
        Path, typer.Option("--file", "-f", exists=True, help="A deployment of the demo model.")
    ] = Path("examples/demo.yaml"),
    report: Annotated[Path, typer.Option(help="Where the HTML report goes.")] = Path("demo-report.html"),
    seed: Annotated[int, typer.Option(help="Which files are drawn.")] = 20_261_121,
) -> None:
    """Start a pipeline and ask it about an image, a video and a sound; exit 0 only when every answer is right."""
    from mmd_workers.local import client as gateway_client
    from mmd_workers.local import demo as questions
    from mmd_workers.local import report as html
    from mmd_workers.local import up as runner

    async def serve() -> list[questions.Asked]:
        with _Progress(quiet_logs=True) as progress:
            async with runner.running(
                runner.load(file), log_line=progress.log, progress=progress.show
            ) as local:
                progress.stop()
                client = gateway_client.Client(local.gateway_url)
                asked = []
                for label, sample in questions.samples(seed):
                    asked.append(await asyncio.to_thread(questions.ask, client, label, sample))
                    console.print(
                        f"{label}: {sample.question} → {asked[-1].answer.text.strip()}", highlight=False
                    )
                return asked

    asked = _run(serve())
    console.print(_demo_table(asked))
    html.write(report, asked, "What the demo asked, and where each request went")
    console.print(f"timelines: {report.resolve()}", highlight=False, soft_wrap=True)
    wrong = sum(not item.right for item in asked)
    if wrong:
        errors.print(f"[red]{wrong} of {len(asked)} answers are wrong[/red]")
        raise typer.Exit(1)


def _demo_table(asked: list[Any]) -> Table:
    from mmd_workers.local.demo import PHASES

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


def chat(
    text: Annotated[
        str | None, typer.Argument(help="The question; without it, a conversation begins.")
    ] = None,
    image: Annotated[list[Path] | None, typer.Option(help="An image file; may be repeated.")] = None,
    video: Annotated[list[Path] | None, typer.Option(help="A video file; may be repeated.")] = None,
    audio: Annotated[list[Path] | None, typer.Option(help="A sound file; may be repeated.")] = None,
    url: UrlOption = None,
    name: NameOption = None,
    max_tokens: Annotated[int, typer.Option(help="At most this many tokens.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
) -> None:
    """Ask a question about text, images, videos and sounds; the answer streams."""
    from mmd_workers.local import client as gateway_client

    try:
        client = gateway_client.Client(url or state.find(name).gateway_url)
        parts = [
            gateway_client.file_part(kind, path)
            for kind, paths in (("image", image), ("video", video), ("audio", audio))
            for path in paths or []
        ]
        history: list[dict[str, Any]] = []
        while True:
            question = text if text is not None else console.input("[bold]> [/bold]")
            history.append({"role": "user", "content": [*parts, {"type": "text", "text": question}]})
            parts = []
            answer = gateway_client.Answer()
            for piece in client.stream(history, answer, max_tokens=max_tokens, temperature=temperature):
                console.print(piece, end="", highlight=False, markup=False, soft_wrap=True)
            console.print()
            if text is not None:
                return
            history.append({"role": "assistant", "content": answer.text})
    except (EOFError, KeyboardInterrupt):
        console.print()
    except MmdError as error:
        raise _fail(error) from error


def status(
    name: NameOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Show the pods of the deployment that runs here: roles, state, work in hand."""
    try:
        running = state.find(name)
    except MmdError as error:
        raise _fail(error) from error
    pods = []
    for pod in running.pods:
        path = "/debug/state" if pod.component == "gateway" else "/state"
        try:
            facts = httpx.get(pod.http_url + path, timeout=3.0).json()
        except (httpx.HTTPError, ValueError):
            facts = {"state": "unreachable"}
        pods.append({"pod": pod.name, "component": pod.component, "url": pod.http_url, **facts})
    if as_json:
        sys.stdout.write(
            json.dumps({"name": running.name, "gateway": running.gateway_url, "pods": pods}, indent=1) + "\n"
        )
        return
    table = Table(title=f"{running.name} at {running.gateway_url}", title_justify="left")
    headings = (
        "pod",
        "roles",
        "state",
        "encode work",
        "waiting tokens",
        "sequences",
        "KV blocks used",
        "measured",
    )
    for heading in headings:
        table.add_column(heading)
    for facts in pods:
        load = facts.get("load", {})
        used = load.get("kv_blocks_total", 0) - load.get("kv_blocks_free", 0)
        table.add_row(
            facts["pod"],
            ", ".join(facts.get("roles", [facts["component"]])),
            facts.get("state", "unknown"),
            str(sum(load.get("encode_queued_work", {}).values())) if load else "",
            str(load.get("prefill_waiting_tokens", "")),
            f"{load['decode_running']}/{load['decode_max_sequences']}"
            if load.get("decode_max_sequences")
            else "",
            f"{used}/{load['kv_blocks_total']}" if load.get("kv_blocks_total") else "",
            _measured(load),
        )
    console.print(table)
    for decision in running.decisions.values():
        console.print(decision, highlight=False, soft_wrap=True)


def _measured(load: Mapping[str, Any]) -> str:
    """What the pod has found that it does in a second, by kind of work."""
    rates = [f"{rate:,.0f} {kind}/s" for kind, rate in load.get("encode_work_per_second", {}).items()]
    tokens = load.get("prefill_tokens_per_second", 0.0)
    return ", ".join([*rates, *([f"{tokens:,.0f} tokens/s"] if tokens else [])])


def trace(
    request: Annotated[str, typer.Argument(help="A request id, from the response's id or x-request-id.")],
    url: UrlOption = None,
    name: NameOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Show the timeline of a recent request, phase by phase."""
    from mmd_workers.local import client as gateway_client

    try:
        timeline = gateway_client.Client(url or state.find(name).gateway_url).timeline(request)
    except MmdError as error:
        raise _fail(error) from error
    if as_json:
        sys.stdout.write(json.dumps(timeline, indent=1) + "\n")
        return
    begin, width = float(timeline["arrived"]), 40
    span = max(float(timeline["finished"]) - begin, 1e-6)
    title = f"{timeline['request_id']}  {timeline['code']}  trace {timeline['trace_id']}"
    table = Table(title=title, title_justify="left")
    for heading in ("phase", "pod", "from ms", "ms", "when", "what"):
        table.add_column(heading, justify="right" if heading.endswith("ms") else "left")
    for phase in sorted(timeline["phases"], key=lambda item: item["start"]):
        left = min(width - 1, max(0, int(width * (phase["start"] - begin) / span)))
        length = max(1, min(width - left, round(width * (phase["end"] - phase["start"]) / span)))
        table.add_row(
            phase["name"].replace("_", " "),
            phase.get("pod", ""),
            f"{1000 * (phase['start'] - begin):.1f}",
            f"{1000 * (phase['end'] - phase['start']):.1f}",
            " " * left + "█" * length,
            ", ".join(f"{name} {value}" for name, value in phase["detail"].items() if name != "feature"),
        )
    console.print(table)
    for attempt in timeline["attempts"]:
        if attempt["lost"]:
            console.print(
                f"attempt {attempt['number']} on {attempt['prefill_pod']} was lost: {attempt['lost']}",
                highlight=False,
                markup=False,
            )
    if timeline["error"]:
        console.print(timeline["error"], highlight=False, markup=False, soft_wrap=True)


class _Progress:
    """Pods coming up as a live table on a terminal, as lines elsewhere; afterwards prefixed log lines."""

    def __init__(self, quiet_logs: bool = False) -> None:
        self._quiet = quiet_logs
        self._live: Live | None = None
        self._told: dict[str, str] = {}

    def __enter__(self) -> _Progress:
        if console.is_terminal:
            self._live = Live(console=console, refresh_per_second=8, transient=False)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """No more progress to show."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def show(self, pods: list[Any]) -> None:
        """Show how far the pods are."""
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
            if self._told.get(item.pod.name) != item.state:
                self._told[item.pod.name] = item.state
                console.print(f"{item.pod.name}: {item.state} ({item.seconds:.1f} s)", highlight=False)

    def log(self, pod: str, line: str) -> None:
        """A line that a pod printed."""
        if not self._quiet or re.search(r"\b(ERROR|CRITICAL|Traceback)\b", line) or "ended with code" in line:
            console.print(f"[dim]{pod}[/dim] ", end="", highlight=False)
            console.print(line, highlight=False, markup=False, soft_wrap=True)
