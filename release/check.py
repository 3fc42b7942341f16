"""What can be checked of a release before it is tagged: `make release-check`. `--layers` also builds images twice and compares them.

Needs helm and PyPI, from which it takes two programs at the versions below; with `--layers`, buildah, mmdebstrap and root.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import yaml

from e2e.images import IMAGES, Buildah
from e2e.shell import FailedError, run
from release.changelog import REPOSITORY, changelog, subjects_of

CHART = REPOSITORY / "charts" / "multimodal-operator"
WORKFLOW = REPOSITORY / ".github" / "workflows" / "release.yaml"
KUBERNETES = ("1.29.0", "1.31.0", "1.33.1", "1.35.0", "1.37.0")
"""Whose schemas the manifests are held against: the oldest that the chart admits, and others up to the newest."""
VALIDATE = ("kubernetes-validate==1.37.0", "kubernetes-validate")
SBOM = ("cyclonedx-bom==7.5.0", "cyclonedx-py")
WITH_VALUES = REPOSITORY / "tests" / "chart" / "values-everything.yaml"
EXAMPLES = ("demo", "monolithic", "gpu")
REPRODUCED = ("multimodal-nats",)
"""Images whose layers are the same when they are built twice."""
OF_OTHERS = {"CustomResourceDefinition", "LeaderWorkerSet", "HTTPRoute", "InferencePool"}
"""Kinds without a schema among Kubernetes' own, or, the first, with one that no validator of JSON schemas reads."""


def uv_run(package: tuple[str, str], *arguments: str | Path, seconds: float = 300) -> str:
    """A program of PyPI in an environment of its own."""
    uv = Path(sys.executable).with_name("uv")
    return run(uv, "tool", "run", "--from", package[0], package[1], *arguments, seconds=seconds)


def helm() -> Path:
    """The program.

    Raises:
        FailedError: it is not there.
    """
    built = REPOSITORY / ".cache" / "kubernetes" / "helm"
    found = built if built.exists() else shutil.which("helm")
    if found is None:
        raise FailedError("helm is not installed; install it, or run `make test`, which builds it")
    return Path(found)


def the_chart_is_valid(folder: Path) -> str:
    """Lint it and render it, with its defaults and with every value set, for each version of Kubernetes."""
    for version in KUBERNETES:
        run(helm(), "lint", CHART, "--strict", f"--kube-version={version}")
        rendered = [
            run(helm(), "template", "release", CHART, f"--kube-version={version}", *values)
            for values in ((), (f"--values={WITH_VALUES}",))
        ]
        _hold_against(folder, version, rendered)
    return f"chart: linted, rendered and valid for Kubernetes {', '.join(KUBERNETES)}"


def planned_objects_are_valid(folder: Path) -> str:
    """What the operator makes of examples, for each version of Kubernetes."""
    mmd = Path(sys.executable).with_name("mmd")
    rendered = [run(mmd, "render", "-f", REPOSITORY / "examples" / f"{name}.yaml") for name in EXAMPLES]
    for version in KUBERNETES:
        _hold_against(folder, version, rendered)
    return f"plan: objects of {', '.join(EXAMPLES)} valid for the same"


def _hold_against(folder: Path, version: str, rendered: list[str]) -> None:
    objects = [o for text in rendered for o in yaml.safe_load_all(text) if o and o["kind"] not in OF_OTHERS]
    file = folder / "objects.yaml"
    file.write_text(yaml.safe_dump_all(objects))
    uv_run(VALIDATE, "--strict", "--no-warn", "--quiet", "-k", version, file)


def the_software_is_listed(folder: Path) -> str:
    """Make an SBOM of this environment; every package that is pinned and installed is in it, at its version."""
    file = folder / "sbom.cdx.json"
    uv_run(SBOM, "environment", sys.executable, "--pyproject", REPOSITORY / "pyproject.toml", "-o", file)
    listed = {
        (_normal(c["name"]), c["version"])
        for c in json.loads(file.read_text())["components"]
        if c.get("purl", "").startswith("pkg:pypi/")
    }
    names = {name for name, _ in listed}
    pins = (
        line.partition(" ")[0].split("==")
        for line in (REPOSITORY / "constraints.txt").read_text().splitlines()
    )
    pinned = {(_normal(pin[0]), pin[1]) for pin in pins if len(pin) == 2}
    if other := sorted(f"{name}=={version}" for name, version in pinned - listed if name in names):
        raise FailedError(
            f"installed at another version than constraints.txt has: {', '.join(other)}; run make install"
        )
    if not listed & pinned:
        raise FailedError("the SBOM lists no package of constraints.txt; run make install")
    return f"SBOM: {len(listed)} packages, at the versions of constraints.txt"


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def base_images_are_pinned(_folder: Path) -> str:
    """Images are built on the base that an argument names, and the release names it by digest."""
    for image in IMAGES:
        for line in image.containerfile.read_text().splitlines():
            if line.startswith("FROM ") and re.search(r"[:/@]", line.split()[1]):
                raise FailedError(f"{image.containerfile.name}: `{line}` names an image; use ${{BASE}}")
    if "BASE=${{ needs.base.outputs.image }}" not in WORKFLOW.read_text():
        raise FailedError(f"{WORKFLOW.name} does not pass BASE with the digest that the job `base` finds")
    return "base image: one argument, which a release sets to a digest"


def the_changelog_is_made(_folder: Path) -> str:
    """From git, since the last tag."""
    lines = changelog("next", subjects_of("HEAD")).splitlines()
    return f"changelog: {sum(line.startswith('- ') for line in lines)} changes since the last release"


def layers_are_reproducible(folder: Path) -> str:
    """Build images twice without a cache, and compare their layers."""
    builder = Buildah(REPOSITORY / ".cache" / "release")
    builder.prepare()
    epoch = run("git", "-C", REPOSITORY, "log", "-1", "--format=%ct").strip()
    for image in (i for i in IMAGES if i.name in REPRODUCED):
        first, second = (builder.layers(image, epoch) for _ in range(2))
        if first != second:
            raise FailedError(f"{image.name}: layers differ between two builds: {first}, {second}")
    return f"layers: the same in two builds of {', '.join(REPRODUCED)}"


CHECKS: tuple[Callable[[Path], str], ...] = (
    base_images_are_pinned,
    the_changelog_is_made,
    the_chart_is_valid,
    planned_objects_are_valid,
    the_software_is_listed,
)


def main() -> None:
    """Run the checks; exits with 1 where one fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", action="store_true", help="build images twice and compare their layers")
    checks = [*CHECKS, *([layers_are_reproducible] if parser.parse_args().layers else [])]
    os.environ.setdefault("UV_CACHE_DIR", str(REPOSITORY / ".cache" / "uv"))
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        for check in checks:
            try:
                print(f"ok      {check(Path(folder))}", flush=True)
            except FailedError as error:
                failed = True
                print(f"FAILED  {check.__name__.replace('_', ' ')}: {error}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
