"""One decode process: takes a medium and a result buffer as file descriptors, fills the buffer, sends one message.

Only `sandbox.DecodePool` starts it. It has no secret and no environment, and after its start no file and no network.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import resource
import socket
import sys
import time
import traceback

from mmd_workers.media import confinement

MAX_MESSAGE_BYTES = 1 << 17
MAX_OPEN_FILES = 32
M_ARENA_MAX = -8  # malloc.h


def main() -> None:
    """Serve jobs until the other end of the socket is closed."""
    os.setpgid(0, 0)  # Ctrl-C reaches the worker, which stops its decoders itself
    control = socket.socket(fileno=int(sys.argv[1]))
    timeout_seconds, memory_bytes = int(sys.argv[2]), int(sys.argv[3])
    isolated = confinement.isolate(lambda pid: control.send(json.dumps({"pid": pid}).encode()))
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(M_ARENA_MAX, 2)  # arenas reserve address space, which is limited
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    from mmd_api.contract.errors import BadMediaError
    from mmd_workers.media import decode, decode_jobs

    decode_jobs.load()
    _limit(memory_bytes)
    layers = confinement.confine(isolated)
    _silence()
    control.send(json.dumps({"ready": True, "layers": layers}).encode())
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, MAX_MESSAGE_BYTES, 2)
        if not message:
            os._exit(0)
        control.send(b'{"started": true}')
        cpu_seconds = math.ceil(time.process_time() + timeout_seconds * decode.DECODE_THREADS + 1)
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, resource.RLIM_INFINITY))
        try:
            reply = decode_jobs.serve(json.loads(message), *descriptors)
        except BadMediaError as error:
            reply = {"bad_media": error.message}
        except MemoryError:
            reply = {
                "bad_media": f"decoding needs more than the {memory_bytes >> 20} MiB it may use; send a smaller file"
            }
        except Exception as error:  # noqa: BLE001  reported to the worker: nothing can be printed from here
            control.send(json.dumps({"died_of": _where(error)}).encode())
            os._exit(1)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        control.send(json.dumps(reply).encode())


def _limit(memory_bytes: int) -> None:
    """Limit the address space to that of the idle process plus `memory_bytes`. No file may grow, no core is written."""
    with open("/proc/self/statm") as statm:
        mapped = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + memory_bytes, mapped + memory_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (MAX_OPEN_FILES, MAX_OPEN_FILES))


def _where(error: BaseException) -> str:
    """An unexpected error with the last lines of code it passed through."""
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    path = " > ".join(f"{os.path.basename(f.filename)}:{f.lineno}" for f in frames)
    return f"{type(error).__name__}: {error} ({path})"[:1000]


def _silence() -> None:
    """Discard all output from now on: media must not write to the worker's log. Stdout is /dev/null already."""
    sys.stderr.flush()
    os.dup2(1, 2)


if __name__ == "__main__":
    main()
