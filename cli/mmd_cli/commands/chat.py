"""`mmd chat`: a question about files, with a streamed answer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from mmd_cli.console import NameOption, UrlOption, console, fail
from mmd_cli.errors import CommandError
from mmd_cli.local import state
from mmd_workers.observe.logs import printable


def chat(
    text: Annotated[
        str | None, typer.Argument(help="Question to ask. Without it, an interactive chat starts.")
    ] = None,
    image: Annotated[list[Path] | None, typer.Option(help="Image file. Repeatable.")] = None,
    video: Annotated[list[Path] | None, typer.Option(help="Video file. Repeatable.")] = None,
    audio: Annotated[list[Path] | None, typer.Option(help="Audio file. Repeatable.")] = None,
    url: UrlOption = None,
    name: NameOption = None,
    max_tokens: Annotated[int, typer.Option(help="Maximum number of tokens to generate.")] = 256,
    temperature: Annotated[float, typer.Option(help="Sampling temperature. 0 is greedy.")] = 0.0,
) -> None:
    """Ask a question about text, images, video or audio; the answer is streamed."""
    from mmd_cli import client as gateway_client

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
                console.print(
                    printable(piece, keep="\n\t"), end="", highlight=False, markup=False, soft_wrap=True
                )
            console.print()
            if text is not None:
                return
            history.append({"role": "assistant", "content": answer.text})
    except (EOFError, KeyboardInterrupt):
        console.print()
    except CommandError as error:
        raise fail(error) from error
