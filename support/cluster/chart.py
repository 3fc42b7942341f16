"""The Helm chart as helm renders it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import yaml

from support.cluster.control_plane import REPOSITORY, binaries
from support.harness.needed import lacking

CHART = REPOSITORY / "charts" / "multimodal-operator"
RELEASE, RELEASE_NAMESPACE = "multimodal-operator", "multimodal-system"


def helm_folder() -> Path:
    """A folder with helm and kubectl. Without helm, skips the test, or fails it under CI."""
    folder = binaries()
    if not (folder / "helm").exists() and (on_path := shutil.which("helm")):
        folder = Path(on_path).parent
    if not (folder / "helm").exists():
        lacking(f"no helm in {folder}: install it, or leave KUBEBUILDER_ASSETS unset so that it is built")
    return folder


def helm(folder: Path, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [folder / "helm", command, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "HOME": "/nonexistent", "KUBECONFIG": "/nonexistent"},
        check=False,
    )


def render(folder: Path, *arguments: str) -> str:
    """The objects of a release as `helm template` writes them."""
    result = helm(folder, "template", RELEASE, str(CHART), f"--namespace={RELEASE_NAMESPACE}", *arguments)
    assert result.returncode == 0, result.stderr
    return result.stdout


def objects(folder: Path, *arguments: str) -> dict[str, dict[str, Any]]:
    """The rendered objects by `Kind/name`, or `Kind/namespace/name` outside the release's namespace."""
    by_name = {}
    for item in filter(None, yaml.safe_load_all(render(folder, *arguments))):
        metadata = item["metadata"]
        other = metadata.get("namespace", RELEASE_NAMESPACE)
        place = "" if other == RELEASE_NAMESPACE else f"{other}/"
        by_name[f"{item['kind']}/{place}{metadata['name']}"] = item
    return by_name
