"""The project's images: built with buildah without any daemon, or with docker, from the same files."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from e2e.shell import FailedError, run

REPOSITORY = Path(__file__).parents[1]
BUILD_SECONDS = 1500
TAG = "latest"
DEBIAN = "bookworm"


@dataclass(frozen=True, slots=True)
class Image:
    """An image and the file it is made from."""

    name: str
    containerfile: Path
    arguments: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def tagged(self) -> str:
        return f"{self.name}:{TAG}"


WORKER = REPOSITORY / "images" / "worker.Containerfile"
IMAGES = (
    Image("multimodal-operator", REPOSITORY / "images" / "operator.Containerfile"),
    Image("multimodal-nats", REPOSITORY / "images" / "nats.Containerfile"),
    # the default of ENGINE is unknown to buildah when it looks for unused stages
    Image("multimodal-worker", WORKER, {"ACCELERATOR": "cpu", "ENGINE": "native"}),
)
VLLM_IMAGE = Image("multimodal-worker-vllm", WORKER, {"ACCELERATOR": "cpu", "ENGINE": "vllm"})
PAUSE = Image("e2e-pause", REPOSITORY / "e2e" / "pause.Containerfile")


class Builder(Protocol):
    """What makes images."""

    name: str

    def prepare(self) -> None:
        """Make what every image needs."""

    def build(self, image: Image) -> str:
        """Make an image; returns its id."""

    def push(self, image: Image, registry: str) -> None:
        """Send it to a registry."""


class Docker:
    """Images in docker's own store, on the base image that the Containerfiles name."""

    name = "docker"

    def prepare(self) -> None:
        run("docker", "version", seconds=30)

    def build(self, image: Image) -> str:
        arguments = [f"--build-arg={key}={value}" for key, value in image.arguments.items()]
        run(
            *("docker", "build", "--quiet", "--file", image.containerfile, "--tag", image.tagged, *arguments),
            REPOSITORY,
            seconds=BUILD_SECONDS,
            env={"DOCKER_BUILDKIT": "1"},
        )
        return run("docker", "image", "inspect", "--format={{.Id}}", image.tagged).strip()

    def push(self, image: Image, registry: str) -> None:
        there = f"{registry}/{image.tagged}"
        run("docker", "tag", image.tagged, there)
        run("docker", "push", "--quiet", there, seconds=BUILD_SECONDS)


class Buildah:
    """Images in a store of this run's own, on a Debian that is made here. Needs root, and no registry."""

    name = "buildah"

    def __init__(self, cache: Path) -> None:
        self._store = cache / "buildah"
        self._temporary = cache / "tmp"
        self.env = {
            "STORAGE_DRIVER": "overlay",
            "TMPDIR": str(self._temporary),
            "BUILDAH_ISOLATION": "chroot",
        }
        self._buildah = (
            *("buildah", f"--root={self._store}", f"--runroot={cache / 'buildah-run'}"),
            f"--registries-conf={self._temporary / 'registries.conf'}",
        )
        self._base = f"localhost/e2e-debian-{DEBIAN}"

    def prepare(self) -> None:
        """Make the base image, if the store does not have it. The machine's certificate authorities come along."""
        self._temporary.mkdir(parents=True, exist_ok=True)
        (self._temporary / "registries.conf").write_text("unqualified-search-registries = []\n")
        if self._run("images", "--quiet", "--filter", f"reference={self._base}").strip():
            return
        tar = self._temporary / "debian.tar"
        authorities = "/etc/ssl/certs/ca-certificates.crt"
        command = [
            "mmdebstrap",
            "--quiet",
            "--variant=minbase",
            "--include=ca-certificates",
            DEBIAN,
            str(tar),
        ]
        if Path(authorities).exists():
            command.insert(3, f"--customize-hook=copy-in {authorities} {os.path.dirname(authorities)}")
        run(*command, seconds=300)
        container = self._run("from", "scratch").strip()
        self._run("add", "--quiet", container, tar, "/", seconds=120)
        self._run("commit", "--quiet", "--rm", container, self._base, seconds=120)
        tar.unlink()

    def build(self, image: Image) -> str:
        arguments = {"BASE": self._base, **image.arguments}
        output = self._run(
            *("build", "--quiet", "--layers", "--pull-never", f"--file={image.containerfile}"),
            *(f"--build-arg={key}={value}" for key, value in arguments.items()),
            f"--tag=localhost/{image.tagged}",
            REPOSITORY,
            seconds=BUILD_SECONDS,
        )
        return output.split()[-1]

    def layers(self, image: Image, epoch: str) -> list[str]:
        """Build an image without any cache, its files dated `epoch` (Unix seconds), and return the digests of its layers."""
        arguments = {"BASE": self._base, **image.arguments}
        made = self._run(
            *("build", "--quiet", "--no-cache", "--layers=false", "--pull-never", f"--timestamp={epoch}"),
            *(f"--build-arg={key}={value}" for key, value in arguments.items()),
            *(f"--file={image.containerfile}", REPOSITORY),
            seconds=BUILD_SECONDS,
        ).split()[-1]
        image_of = json.loads(self._run("inspect", "--type=image", made))["OCIv1"]
        return [str(layer) for layer in image_of["rootfs"]["diff_ids"]]

    def archive(self, image: Image) -> list[str | Path]:
        """The command that writes the image to its standard output, with its layers as they are: compressing costs minutes."""
        return [*self._buildah, "push", "--quiet", f"localhost/{image.tagged}", self._archive_name(image)]

    def push(self, image: Image, registry: str) -> None:
        there = f"docker://{registry}/{image.tagged}"
        self._run("push", "--quiet", f"localhost/{image.tagged}", there, seconds=BUILD_SECONDS)

    def _archive_name(self, image: Image) -> str:
        return f"docker-archive:/dev/stdout:{image.tagged}"

    def _run(self, *arguments: str | Path, seconds: float = 60) -> str:
        return run(*self._buildah, *arguments, seconds=seconds, env=self.env)


def builder(cache: Path) -> Builder:
    """What this machine can build with.

    Raises:
        FailedError: nothing.
    """
    if docker_runs():
        return Docker()
    if missing := [tool for tool in ("buildah", "mmdebstrap") if shutil.which(tool) is None]:
        raise FailedError(f"images cannot be built: start docker, or apt-get install {' '.join(missing)}")
    return Buildah(cache)


def docker_runs() -> bool:
    """Whether a docker daemon answers."""
    try:
        run("docker", "version", seconds=20)
    except FailedError:
        return False
    return True
