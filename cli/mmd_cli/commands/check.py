"""`mmd check`: compares a model, as workers split it, with the whole model."""

from __future__ import annotations

from typing import Annotated

import typer

from mmd_api.contract.errors import MmdError
from mmd_cli.console import console


def check(
    model: Annotated[str, typer.Argument(help="Hub id, directory, or builtin/demo.")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the hub.")] = None,
    dtype: Annotated[str, typer.Option(help="Float32, BFloat16 or Float16.")] = "Float32",
    device: Annotated[str, typer.Option(help="cpu, or cuda.")] = "cpu",
) -> None:
    """Compare a model split into roles with the same model in transformers.

    Exit status: 0, agrees; 1, differs; 2, rejected or cannot be loaded; 3, nothing differs but not everything was compared.

    Both copies are loaded at once: the device needs memory for the weights twice.
    """
    import torch
    import transformers

    from mmd_api import faults
    from mmd_api.spec.model import ModelSpec
    from mmd_cli.check.check_report import lines_of
    from mmd_cli.check.compare import check as compare

    if dtype not in ("Float32", "BFloat16", "Float16"):
        raise typer.BadParameter(f"--dtype {dtype}: not supported; see --help for the accepted values")
    try:
        where = torch.device(device)
    except RuntimeError:
        where = None
    if where is None or where.type not in ("cpu", "cuda"):
        raise typer.BadParameter(f"--device {device}: not supported; use cpu, cuda or cuda:1")
    try:
        spec = faults.parse(ModelSpec, {"id": model, "revision": revision, "dtype": dtype})
    except faults.InvalidDeploymentError as error:
        raise typer.BadParameter(f"model {error}") from error
    transformers.logging.set_verbosity_error()
    try:
        report = compare(spec, where)
    except MmdError as error:
        console.print(f"refused ({error.code}): {error.message}", highlight=False, soft_wrap=True)
        raise typer.Exit(2) from error
    for line in lines_of(report):
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    if report.verdict != "agrees":
        raise typer.Exit(1 if report.verdict == "differs" else 3)
