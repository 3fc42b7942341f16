"""Compiles one grammar and reports what that took. `grammar_trial` starts it as a file: it imports nothing of this project, so that it
is there in a tenth of a second, and may end in any way that a hostile grammar causes.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

SPECIAL_TOKEN_ID = 257  # of the vocabulary of bytes that it compiles for
STARTED = b"started\n"  # before the grammar is touched: an end after it is the grammar's doing


def main() -> None:
    """Read a JSON object from stdin: `grammar` (in the library's form), `limits` (of its parser), `cpu_seconds`, `memory_bytes`,
    `stack_bytes`. Write `STARTED`, then a JSON object: `error` (the library's words, or empty), `cpu_seconds`, `peak_bytes` (address
    space beyond that at the start).
    """
    request = json.load(sys.stdin.buffer)
    tokenizer = LLTokenizer("byte")  # what compiling takes does not depend on the vocabulary
    limits = LLParserLimits(**request["limits"])
    sys.stdout.buffer.write(STARTED)
    sys.stdout.buffer.flush()
    at_start = _address_space("VmSize")
    _limit(at_start + request["memory_bytes"], request["stack_bytes"], request["cpu_seconds"])
    begun = time.process_time()
    try:
        compiled = LLMatcher(tokenizer, request["grammar"], log_level=0, limits=limits)
        error = compiled.get_error() if compiled.is_error() else ""
    except ValueError as raised:
        error = str(raised)
    except MemoryError:
        os.abort()  # as the library does
    cost = {
        "cpu_seconds": time.process_time() - begun,
        "peak_bytes": max(0, _address_space("VmPeak") - at_start),
    }
    sys.stdout.buffer.write(json.dumps({"error": error[:1000], **cost}).encode())


def _limit(memory_bytes: int, stack_bytes: int, cpu_seconds: float) -> None:
    """The timer ends this process by SIGPROF, an allocation beyond the memory by SIGABRT, and the stack's end by SIGSEGV."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_STACK, (stack_bytes, stack_bytes))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    whole_seconds = int(time.process_time() + cpu_seconds) + 2  # should the timer fail
    resource.setrlimit(resource.RLIMIT_CPU, (whole_seconds, whole_seconds))
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)


def _address_space(field: str) -> int:
    """Bytes: `VmSize` now, `VmPeak` at most so far."""
    with open("/proc/self/status") as status:
        (line,) = (line for line in status if line.startswith(f"{field}:"))
    return int(line.split()[1]) << 10


if __name__ == "__main__":
    main()
