"""Compiles one grammar in its own process, and reports the cost.

`grammar_trial` runs it as a file. It imports nothing of this project, so that it starts in a tenth of a second, and a hostile grammar may
end it in any way.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

SPECIAL_TOKEN_ID = 257  # in the vocabulary of bytes, for which grammars are compiled here
STARTED = b"started\n"  # written before the grammar is touched; the grammar causes any end after it


def main() -> None:
    """Read a job from stdin, and write the result to stdout, both as JSON objects.

    The job has `grammar` (in the library's form), `limits` (of its parser), `cpu_seconds`, `memory_bytes` and `stack_bytes`. Before the result,
    `STARTED` is written. The result has `error` (the library's message, or empty), `cpu_seconds` and `peak_bytes` (address space beyond that
    at the start).
    """
    request = json.load(sys.stdin.buffer)
    tokenizer = LLTokenizer("byte")  # the cost of compiling does not depend on the vocabulary
    limits = LLParserLimits(**request["limits"])
    sys.stdout.buffer.write(STARTED)
    sys.stdout.buffer.flush()
    at_start = _address_space("VmSize")
    _limit(at_start + request["memory_bytes"], request["stack_bytes"], request["cpu_seconds"])
    started_at = time.process_time()
    try:
        compiled = LLMatcher(tokenizer, request["grammar"], log_level=0, limits=limits)
        error = compiled.get_error() if compiled.is_error() else ""
    except ValueError as raised:
        error = str(raised)
    except MemoryError:
        os.abort()  # as the library does
    cost = {
        "cpu_seconds": time.process_time() - started_at,
        "peak_bytes": max(0, _address_space("VmPeak") - at_start),
    }
    sys.stdout.buffer.write(json.dumps({"error": error[:1000], **cost}).encode())


def _limit(memory_bytes: int, stack_bytes: int, cpu_seconds: float) -> None:
    """Limit this process: the timer ends it by SIGPROF, excess memory by SIGABRT, and excess stack by SIGSEGV."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_STACK, (stack_bytes, stack_bytes))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    whole_seconds = int(time.process_time() + cpu_seconds) + 2  # in case the timer fails
    resource.setrlimit(resource.RLIMIT_CPU, (whole_seconds, whole_seconds))
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)


def _address_space(field: str) -> int:
    """Bytes of address space: `VmSize` now, or the maximum so far with `VmPeak`."""
    with open("/proc/self/status") as status:
        (line,) = (line for line in status if line.startswith(f"{field}:"))
    return int(line.split()[1]) << 10


if __name__ == "__main__":
    main()
