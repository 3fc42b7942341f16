"""Processes forked from one that has imported everything: they are distinguished, ended and counted like any others."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from mmd_api.contract.errors import PeerLostError
from mmd_api.spec.engine import EngineSpec
from mmd_cli.local.engines import EngineMissingError, Interpreter, interpreter_for
from mmd_cli.local.forkserver import IDLE_NICE, ForkedProcess, ForkServer
from mmd_cli.local.pods import LocalPod
from mmd_cli.local.supervisor import GaveUpError, Supervisor
from support.harness.clock import FakeClock
from support.harness.needed import lacking
from support.harness.waiting import until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.processes]
SECONDS = 60.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[ForkServer]:
    made = ForkServer({"READ_BY_A_LIBRARY": "early"})
    yield made
    await made.close()


async def python(server: ForkServer, code: str, nice: int = 0, **environment: str) -> ForkedProcess:
    return await server.start([sys.executable, "-c", code], environment, nice, 16_384)


async def ended(process: ForkedProcess) -> tuple[str, int]:
    """Everything it printed, and its exit status."""
    async with asyncio.timeout(SECONDS):
        return (await process.output.read()).decode(), await process.ended


async def test_a_process_has_its_own_environment_group_and_weight(server: ForkServer) -> None:
    code = """if True:
        import os, sys
        print(os.environ["OWN"], os.environ["READ_BY_A_LIBRARY"], os.getpid() == os.getpgid(0), sys.stdin.read() == "")
        print(os.getpriority(os.PRIO_PROCESS, 0), file=sys.stderr)
    """
    said, status = await ended(await python(server, code, nice=3, OWN="own"))
    nicest = min(19, os.getpriority(os.PRIO_PROCESS, 0) + 3)
    assert said.split() == ["own", "early", "True", "True", str(nicest)]
    assert status == 0


async def test_a_process_may_run_only_where_no_other_would(server: ForkServer) -> None:
    code = "import os; print(os.sched_getscheduler(0) == os.SCHED_IDLE)"
    assert await ended(await python(server, code, nice=IDLE_NICE)) == ("True\n", 0)


async def test_a_process_of_vllms_interpreter_may_run_on_every_core() -> None:
    """Intel's OpenMP, which vLLM needs on CPUs, pins what is forked from a process that has loaded it to one core."""
    try:
        interpreter = interpreter_for(EngineSpec(type="VLLM"))
    except EngineMissingError as error:
        lacking(str(error))
    server = ForkServer(interpreter.environment, interpreter.python, interpreter.imported)
    try:
        process = await server.start(["mmd", "worker", "--pool", "none", "--roles", "encode"], {}, 0, 16_384)
        assert os.sched_getaffinity(process.pid) == os.sched_getaffinity(0)
        await ended(process)
    finally:
        await server.close()


async def test_how_a_process_ended_is_known(server: ForkServer) -> None:
    assert (await ended(await python(server, "raise SystemExit(7)")))[1] == 7
    killed = await python(server, "import time; time.sleep(600)")
    assert killed.returncode is None
    os.kill(killed.pid, signal.SIGKILL)
    assert (await ended(killed))[1] == killed.returncode == -signal.SIGKILL


async def test_our_own_program_runs_without_importing_again(server: ForkServer) -> None:
    process = await server.start(["mmd", "worker", "--pool", "none", "--roles", "encode"], {}, 0, 16_384)
    said, status = await ended(process)
    assert "--pool none --roles encode: invalid; see --help" in said
    assert status == 2


async def test_a_command_that_cannot_run_is_reported(server: ForkServer) -> None:
    said, status = await ended(await server.start(["/nowhere/program"], {}, 0, 16_384))
    assert "/nowhere/program cannot be run: No such file or directory" in said
    assert status == 1


async def test_a_process_without_a_waiter_is_ended(server: ForkServer) -> None:
    starting = asyncio.create_task(python(server, "import time; time.sleep(600)"))
    await asyncio.sleep(0)
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    said, _ = await ended(await python(server, "import os; print(os.getppid())"))
    await until(lambda: not psutil.Process(int(said)).children())


async def test_pods_start_again_although_what_forked_them_is_killed() -> None:
    printed: asyncio.Queue[str] = asyncio.Queue()
    supervisor = Supervisor(lambda _, line: printed.put_nowait(line))
    code = "import os, time; print('pid', os.getpid(), os.getppid()); time.sleep(600)"
    supervisor.start(LocalPod("e-0", "encoder", [sys.executable, "-c", code], {}, 0, grace_seconds=5.0))
    try:
        async with asyncio.timeout(SECONDS):
            _, pid, parent = (await printed.get()).split()
            os.kill(int(parent), signal.SIGKILL)
            while not (line := await printed.get()).startswith("pid "):
                pass
        assert line.split()[1] != pid
        await until(lambda: not psutil.pid_exists(int(pid)))
    finally:
        await supervisor.close()
    await until(lambda: not psutil.pid_exists(int(line.split()[1])))


async def test_a_server_that_failed_to_start_starts_with_the_next_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server, descriptors = ForkServer(), psutil.Process().num_fds()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/nowhere/python")
        with pytest.raises(PeerLostError, match=r"cannot be started.*/nowhere/python"):
            await server.start(["mmd"], {}, 0, 16_384)
    assert psutil.Process().num_fds() == descriptors
    try:
        async with asyncio.timeout(SECONDS):
            said, status = await ended(await python(server, "print('here')"))
    finally:
        await server.close()
    assert (said, status) == ("here\n", 0)


async def test_two_orders_at_once_start_one_server() -> None:
    server = ForkServer()
    try:
        code = "import os; print(os.getppid())"
        both = await asyncio.gather(*(python(server, code) for _ in range(2)))
        parents = [(await ended(process))[0] for process in both]
    finally:
        await server.close()
    assert parents[0] == parents[1]


async def test_an_order_to_a_server_that_cannot_start_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHOME", "/nowhere")
    with pytest.raises(PeerLostError, match="exited with status 1"):
        await asyncio.wait_for(python(ForkServer(), ""), SECONDS)


async def test_a_servers_last_words_explain_why_its_pod_is_given_up(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    python = tmp_path / "python"
    python.write_text(
        "#!/bin/sh\necho Traceback >&2\necho 'ImportError: no module of that version' >&2\nexit 1\n"
    )
    python.chmod(0o755)
    given_up: list[GaveUpError] = []
    clock = FakeClock()
    supervisor = Supervisor(lambda *_: None, given_up.append, Interpreter(str(python)), clock)
    supervisor.start(LocalPod("e-0", "encoder", ["mmd"], {}, 0, grace_seconds=5.0))
    await clock.until(lambda: given_up)
    await supervisor.close()
    assert "exited with status 1: ImportError: no module of that version" in str(given_up[0])
    assert "Traceback\nImportError" in capfd.readouterr().err
