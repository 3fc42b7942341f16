"""Writes what is generated from the models into the repository that they lie in: `python -m mmd_api.generate`."""

from __future__ import annotations

from pathlib import Path

from mmd_api.crd import crd_yaml
from mmd_api.reference import reference_page
from mmd_api.resource import PLURAL

_REPOSITORY = Path(__file__).resolve().parents[2]
CRD_FILE = _REPOSITORY / "crds" / f"{PLURAL}.yaml"
REFERENCE_FILE = _REPOSITORY / "docs" / "reference.md"


def main() -> None:
    """The CustomResourceDefinition and the reference page."""
    CRD_FILE.write_text(crd_yaml())
    REFERENCE_FILE.write_text(reference_page())


if __name__ == "__main__":
    main()
