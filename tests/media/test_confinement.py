"""Code that has taken over a decode process tries to get out of it, through all layers together and through each one alone."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from mmd_api.contract.errors import BadMediaError
from mmd_api.spec.media import MediaPolicy
from mmd_workers.media import confinement, decode
from mmd_workers.media.confinement import LAYERS
from mmd_workers.media.probe import probe
from mmd_workers.media.sandbox import DecodePool

from .media_samples import AUDIO_KINDS, VIDEO_KINDS, audio_bytes, image_bytes, video_bytes

TAKEN_OVER = """
import os, sys
from mmd_workers.media import confinement, decode_process
only, user = {only!r}, {user!r}
if user:  # who may not be allowed to read the interpreter's files: they are loaded first
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    from mmd_workers.media import decode_jobs
    decode_jobs.load()
    os.setgroups([]); os.setresgid(user, user, user); os.setresuid(user, user, user)
    confinement._libc.prctl(4, 1, 0, 0, 0)  # dumpable, as a program that this user started
for name, layer in (("empty_root", "root"), ("own_user", "user"), ("landlock", "landlock"), ("seccomp", "seccomp")):
    if only and layer not in only:
        setattr(confinement, name, lambda **_: False)
if only and "namespaces" not in only:
    confinement._unshared = lambda flags: False
confine = confinement.confine

def then_attack(isolated):
    import ctypes, resource, signal, socket
    from mmd_workers.media import decode_jobs
    serve = decode_jobs.serve

    def attack(job, source, result):
        if "attack" not in job:
            return serve(job, source, result)
        libc = ctypes.CDLL(None, use_errno=True)
        scope = dict(os=os, socket=socket, libc=libc, ctypes=ctypes, resource=resource, result=result)
        try:
            exec(job["attack"], scope)
        except OSError as error:
            return dict(found=f"refused {{error.errno}}")
        if "error" in scope:
            return dict(found=f"refused {{scope['error']}}" if scope["error"] else "escaped")
        return dict(found=scope.get("found", "escaped"))

    decode_jobs.serve = attack
    return confine(isolated)

confinement.confine = then_attack
decode_process.main()
"""
imprisoned = pytest.mark.asyncio(loop_scope="module")
"""Of tests with the prison, which lives on one event loop."""
SECRET = "swordfish-7271"
ERROR = "; error = ctypes.get_errno() if value < 0 else 0"
ATTACKS = {
    "read a file": "open({secret!r}).read()",
    "write a file": "os.open({beside!r}, os.O_WRONLY | os.O_CREAT)",
    "read the parent's environment": "open('/proc/{parent}/environ', 'rb').read()",
    "read the parent's memory by file": "open('/proc/{parent}/mem', 'rb').read(1)",
    "read the parent's memory by call": "value = libc.process_vm_readv({parent}, b'', 1, b'', 1, 0)" + ERROR,
    "trace the parent": "value = libc.ptrace(16, {parent}, 0, 0)" + ERROR,
    "signal the parent": "os.kill({parent}, 0)",
    "connect": "socket.socket().connect(('127.0.0.1', {port}))",
    "run a program": "os.execv('/bin/true', ['/bin/true'])",
    "fork without end": "\nwhile True:\n    if os.fork() == 0:\n        import signal; signal.pause()\n",
    "make code": "libc.mmap.restype = ctypes.c_long; value = libc.mmap(0, 4096, 5, 0x22, -1, 0)" + ERROR,
    "shrink the result": "os.ftruncate(result, 1)",
}
HELD_BY = {  # the layers that stop an attack even when all others are gone
    "read a file": ("seccomp", "landlock", "root"),
    "write a file": ("seccomp", "landlock", "root", "user"),
    "read the parent's environment": ("seccomp", "landlock", "root", "user"),
    "read the parent's memory by file": ("seccomp", "landlock", "root", "user"),
    "read the parent's memory by call": ("seccomp", "landlock", "namespaces", "user"),
    "trace the parent": ("seccomp", "landlock", "namespaces", "user"),
    "signal the parent": ("seccomp", "landlock", "namespaces", "user"),
    "connect": ("seccomp", "landlock", "namespaces"),
    "run a program": ("seccomp", "landlock", "root"),
    "fork without end": ("seccomp", "user"),
    "make code": ("seccomp",),
    "shrink the result": ("seccomp", ""),  # "": the memory itself refuses
}
NEEDS = {"root": ("namespaces", "root"), "": ("",)}


def running(code: str) -> DecodePool:
    """A pool whose processes run other code."""
    pool = DecodePool(processes=1, decode_timeout_seconds=30)
    pool._program = ("-I", "-B", "-c", code)
    return pool


class Prison:
    """Pools of processes that obey an attacker, one for each choice of layers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._pools: dict[tuple[tuple[str, ...], int], DecodePool] = {}
        (folder / "secret").write_text(SECRET)
        self.listener = socket.create_server(("127.0.0.1", 0))

    async def pool(self, only: tuple[str, ...] = (), user: int = 0) -> DecodePool:
        if (only, user) not in self._pools:
            code = TAKEN_OVER.format(only=only, user=user)
            self._pools[only, user] = pool = running(code)
            await pool.start()
        return self._pools[only, user]

    async def attack(self, code: str, only: tuple[str, ...] = (), user: int = 0) -> str:
        pool = await self.pool(only, user)
        code = code.format(
            secret=str(self.folder / "secret"),
            beside=str(self.folder / "beside"),
            parent=os.getpid(),
            port=self.listener.getsockname()[1],
        )
        try:
            reply, _ = await pool._run({"attack": code}, b"medium", 8)
        except BadMediaError as error:
            return error.message
        return str(reply["found"])

    async def close(self) -> None:
        self.listener.close()
        await asyncio.gather(*(pool.close() for pool in self._pools.values()))
        for process in psutil.process_iter(
            ["ppid", "cmdline"]
        ):  # of forks: where only their number is limited, they survive
            if process.info["ppid"] == 1 and any(
                "then_attack" in word for word in process.info["cmdline"] or ()
            ):
                process.kill()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def prison(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Prison]:
    made = Prison(tmp_path_factory.mktemp("prison"))
    yield made
    await made.close()


def needs_layers(pool: DecodePool, *layers: str) -> None:
    if missing := [layer for layer in layers if not pool.layers.get(layer)]:
        pytest.skip(f"this machine refuses {', '.join(missing)}")


@imprisoned
@pytest.mark.parametrize("attack", ATTACKS)
async def test_a_decode_process_that_was_taken_over_cannot(attack: str, prison: Prison) -> None:
    found = await prison.attack(ATTACKS[attack])
    assert re.search("refused|SIGSYS", found), found
    assert not (prison.folder / "beside").exists()


@imprisoned
@pytest.mark.parametrize(("attack", "layer"), [(attack, layer) for attack, layers in HELD_BY.items() for layer in layers])  # fmt: skip
async def test_each_layer_alone_stops(attack: str, layer: str, prison: Prison) -> None:
    only = NEEDS.get(layer, (layer,))
    pool = await prison.pool(only)
    if layer:
        needs_layers(pool, *only)
    assert [name for name, active in pool.layers.items() if active] == [n for n in LAYERS if n in only]
    found = await prison.attack(ATTACKS[attack], only)
    assert re.search("SIGSYS" if found.startswith("the decoder crashed") else "refused", found), found


@imprisoned
async def test_without_any_layer_the_same_attacks_succeed(prison: Prison) -> None:
    """Otherwise the tests above would show nothing."""
    for attack in ("read a file", "write a file", "read the parent's environment", "signal the parent", "connect", "make code"):  # fmt: skip
        assert await prison.attack(ATTACKS[attack], ("none",)) == "escaped", attack
    (prison.folder / "beside").unlink()
    assert "exit status 0" in await prison.attack(ATTACKS["run a program"], ("none",))


@imprisoned
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
async def test_a_worker_without_privileges_confines_as_well(prison: Prison) -> None:
    pool = await prison.pool(user=65532)
    needs_layers(pool, *LAYERS)
    for attack, code in ATTACKS.items():
        found = await prison.attack(code, user=65532)
        assert re.search("refused|SIGSYS", found), f"{attack}: {found}"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_threads_are_not_limited_for_a_user_that_other_pods_share() -> None:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setgroups([])
            os.setresgid(65532, 65532, 65532)
            os.setresuid(65532, 65532, 65532)
            before = resource.getrlimit(resource.RLIMIT_NPROC)
            is_own = confinement.own_user(in_own_namespace=False)
            status = int(is_own or resource.getrlimit(resource.RLIMIT_NPROC) != before)
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@imprisoned
async def test_a_decode_process_has_no_environment_and_no_file_of_its_parent(
    prison: Prison, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MMD_NATS_PASSWORD", SECRET)
    inherited = os.open(prison.folder / "secret", os.O_RDONLY)
    os.set_inheritable(inherited, True)
    pool = await prison.pool()
    assert await prison.attack("found = 'alive'") == "alive"  # the attack before this may have killed it
    assert Path(f"/proc/{pool.process_ids[0]}/environ").read_bytes() == b""
    count = """if True:
        found = []
        for number in range(4096):  # the control socket keeps the number that it has in the parent
            try:
                os.fstat(number)
                found.append(number)
            except OSError:
                pass
    """
    descriptors = await prison.attack(count)
    links = [os.readlink(path) for path in Path(f"/proc/{pool.process_ids[0]}/fd").iterdir()]
    os.close(inherited)
    assert len(eval(descriptors)) == 4 + 2  # stdin, stdout, stderr and the control socket; the job's two
    assert sorted(re.sub(r"\d+", "N", link) for link in links) == ["/dev/null"] * 3 + ["socket:[N]"]


async def test_everything_that_is_served_decodes_inside_as_it_does_outside() -> None:
    """Nothing is left to load, open or start once the layers are up."""
    policy = MediaPolicy()
    pool = DecodePool(processes=1, decode_timeout_seconds=60)
    await pool.start()
    first = pool.process_ids
    try:
        for format_ in ("PNG", "JPEG", "WEBP", "GIF", "BMP"):
            data = (
                image_bytes(format_, orientation=6) if format_ in ("JPEG", "WEBP") else image_bytes(format_)
            )
            info = await pool.probe(data, "image", policy)
            assert info == probe(data, "image", policy)
            image = await pool.decode_image(data, info)
            assert (image.pixels == decode.decode_image(data, info).pixels).all(), format_
        for codec, container, options in VIDEO_KINDS:
            data = video_bytes(codec, container, options=options)
            info = await pool.probe(data, "video", policy)
            assert info == probe(data, "video", policy)
            clip = await pool.decode_video(data, info, [0, info.num_frames - 1])
            assert (clip.frames == decode.decode_video(data, info, [0, info.num_frames - 1]).frames).all()
        for kind in AUDIO_KINDS:
            data = audio_bytes(*kind)
            info = await pool.probe(data, "audio", policy)
            assert info == probe(data, "audio", policy)
            heard = await pool.decode_audio(data, info, 16_000, 16_000)
            assert (heard.waveform == decode.decode_audio(data, info, 16_000, 16_000).waveform).all(), kind
        assert pool.process_ids == first
    finally:
        await pool.close()


async def test_a_decoder_cannot_lie_about_what_a_medium_is() -> None:
    lie = """
from mmd_workers.media import confinement, decode_process
confine = confinement.confine
def then_lie(isolated):
    from mmd_workers.media import decode_jobs
    serve = decode_jobs.serve
    def lying(job, source, result):
        reply = serve(job, source, result)
        reply["info"].update(digest="0" * 64, num_bytes=1)
        if reply["info"]["height"] == 47:
            reply["info"].update(height=10**9)
        return reply
    decode_jobs.serve = lying
    return confine(isolated)
confinement.confine = then_lie
decode_process.main()
"""
    pool = running(lie)
    await pool.start()
    try:
        data = image_bytes("PNG")
        assert await pool.probe(data, "image", MediaPolicy()) == probe(data, "image", MediaPolicy())
        with pytest.raises(BadMediaError, match="inconsistent data"):
            await pool.probe(image_bytes("PNG", _rows(47)), "image", MediaPolicy())
    finally:
        await pool.close()


def _rows(count: int):
    import numpy as np

    return np.zeros((count, 9, 3), np.uint8)
