"""Checks `extraArgs`, and vLLM's names in the spec, with vLLM itself."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from vllm import __version__
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS
from vllm.utils.argparse_utils import FlexibleArgumentParser

from mmd_api.contract.errors import EngineSettingsError
from mmd_api.spec.engine import EngineSpec

OF_PYDANTIC = re.compile(r"\[type=.*\]|For further information visit \S+")
"""Parts of pydantic's messages that repeat the value."""


class _Parser(FlexibleArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def parsed(arguments: Sequence[str], field: str) -> dict[str, Any]:
    """Return keyword arguments of `EngineArgs` for command line arguments, without defaults. `field`: their
    field in the spec.

    Raises:
        EngineSettingsError: vLLM's parser refuses an argument; the message names it and has the reason.
    """
    for refusal in refused(arguments, field):
        raise EngineSettingsError(refusal)
    return _given(arguments)


def refused(arguments: Sequence[str], field: str) -> list[str]:
    """List what vLLM's parser refuses, with field, problem and remedy: single arguments, or otherwise all together."""
    refusals = [
        f"{field}.extraArgs[{number}]: {problem}"
        for number, argument in enumerate(arguments)
        if (problem := _problem([argument]) or _repeated(argument, arguments[:number]))
    ]
    if not refusals and (problem := _problem(arguments)):
        refusals.append(f"{field}.extraArgs: {problem}")
    return refusals


def checked_quantization(method: str | None, field: str) -> str | None:
    """Return the method, if vLLM has it.

    Raises:
        EngineSettingsError: vLLM does not have the method.
    """
    if method is None or method in QUANTIZATION_METHODS:
        return method
    raise EngineSettingsError(
        f"{field}.quantization: vLLM {__version__} has no method {method}; choose one of {', '.join(sorted(QUANTIZATION_METHODS))}"
    )


def _problem(arguments: Sequence[str]) -> str:
    try:
        _given(arguments)
    except (ValueError, TypeError) as error:
        words = " ".join(OF_PYDANTIC.sub("", str(error)).split())
        for argument in arguments:
            words = words.replace(argument, _name(argument))  # a misspelt argument may have a secret value
        return f"vLLM {__version__} refuses it ({words}); fix it, or remove it"
    return ""


def _repeated(argument: str, earlier_arguments: Sequence[str]) -> str:
    """Return the problem of an argument that is given twice; vLLM would use the last value."""
    if _plain(argument) not in map(_plain, earlier_arguments):
        return ""
    return f"{_name(argument)} is given more than once; keep one"


def _name(argument: str) -> str:
    return argument.partition("=")[0]


def _plain(argument: str) -> str:
    return _name(argument).removeprefix("--no-").removeprefix("--")


def _given(arguments: Sequence[str]) -> dict[str, Any]:
    parser = EngineArgs.add_cli_args(_Parser(allow_abbrev=False))
    defaults, parsed_values = vars(parser.parse_args([])), vars(parser.parse_args(list(arguments)))
    return {name: value for name, value in parsed_values.items() if value != defaults[name]}


def faults(engine: EngineSpec) -> Iterator[str]:
    """Yield what vLLM refuses in a spec, with field, problem and remedy."""
    for name, settings in (("prefill", engine.prefill), ("decode", engine.decode)):
        if settings is None:
            continue
        field = f"spec.engine.{name}"
        try:
            checked_quantization(settings.quantization, field)
        except EngineSettingsError as error:
            yield error.message
        yield from refused(settings.extra_args, field)
