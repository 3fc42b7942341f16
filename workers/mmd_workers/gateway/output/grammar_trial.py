"""The first compilation of a grammar from a client, in a process of its own.

The library's limits apply only after it has built the regular expressions. Small schemas can make these as large as they like, and deep
references take more stack than there is.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from mmd_api.contract.answers import Grammar
from mmd_api.contract.errors import GrammarFailedError, OverloadedError
from mmd_workers.gateway.output import grammar_process
from mmd_workers.model.grammar import PARSER_LIMITS, in_library_form, on_one_line

CPU_SECONDS = 0.5  # four times the need of the largest ordinary schemas
MEMORY_BYTES = 64 << 20  # beyond the idle process; three times the need of the largest ordinary schemas
STACK_BYTES = 2 << 20  # a quarter of a thread's, so that no other process fails on a grammar that passes here
WALL_SECONDS = 10.0  # generous, for a busy node
EXIT_SECONDS = 5.0
PROGRAM = ("-I", "-B", grammar_process.__file__)


class TooCostlyError(GrammarFailedError):
    """Compiling exceeds a limit; the message names it."""


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of compiling: CPU time, and address space beyond the idle process."""

    cpu_seconds: float
    peak_bytes: int


async def try_out(
    grammar: Grammar,
    *,
    cpu_seconds: float = CPU_SECONDS,
    memory_bytes: int = MEMORY_BYTES,
    stack_bytes: int = STACK_BYTES,
) -> Cost:
    """Compile a grammar in a process that has ended when this function returns, raises or is cancelled.

    Raises:
        GrammarFailedError: the library cannot compile the grammar; the message is the library's.
        TooCostlyError: the grammar exceeds one of these limits.
        OverloadedError: the process did not start, or did not get enough CPU in time. This is not the grammar's fault.
    """
    job = {
        "grammar": in_library_form(grammar, special_token_id=grammar_process.SPECIAL_TOKEN_ID),
        "limits": PARSER_LIMITS,
        "cpu_seconds": cpu_seconds,
        "memory_bytes": memory_bytes,
        "stack_bytes": stack_bytes,
    }
    status, output = await _run(json.dumps(job).encode())
    started, _, reply = output.partition(grammar_process.STARTED)
    if started or len(output) < len(grammar_process.STARTED) or status == -signal.SIGKILL:
        raise OverloadedError(
            "the process that compiles grammars did not start or was killed; check the gateway's memory limit, and retry"
        )
    if status in (-signal.SIGPROF, -signal.SIGXCPU):
        raise TooCostlyError(f"more than {cpu_seconds:g} s of CPU")
    if status == -signal.SIGABRT:
        raise TooCostlyError(f"more than {memory_bytes >> 20} MiB of memory")
    if status == -signal.SIGSEGV:
        raise TooCostlyError("more levels of references or nesting than fit its stack")
    if status != 0:
        raise GrammarFailedError("the compiler fails on it")
    result: dict[str, Any] = json.loads(reply)
    if result["error"]:
        raise GrammarFailedError(on_one_line(result["error"]))
    return Cost(result["cpu_seconds"], result["peak_bytes"])


async def _run(job: bytes) -> tuple[int, bytes]:
    """Run the process, and return its exit status and output. A process that is no longer awaited is killed and reaped first."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *PROGRAM,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={},
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(WALL_SECONDS):
            output, _ = await process.communicate(job)
            return await process.wait(), output
    except TimeoutError as error:
        raise OverloadedError(
            f"no grammar can be compiled within {WALL_SECONDS:g} s now; check the gateway's CPU, and retry"
        ) from error
    finally:
        if process.returncode is None:
            process.kill()
            with suppress(TimeoutError):
                async with asyncio.timeout(EXIT_SECONDS):
                    await process.wait()
