"""Writes the files that are generated from the models into their repository: `python -m mmd_api.generate`."""

from __future__ import annotations

from pathlib import Path

from mmd_api.crd import crd_yaml
from mmd_api.errors_page import errors_page
from mmd_api.pool_resource import POOL_PLURAL, pool_crd_yaml
from mmd_api.reference import reference_page
from mmd_api.resource import PLURAL

_REPOSITORY = Path(__file__).resolve().parents[2]
CRD_FILE = _REPOSITORY / "crds" / f"{PLURAL}.yaml"
POOL_CRD_FILE = _REPOSITORY / "crds" / f"{POOL_PLURAL}.yaml"
REFERENCE_FILE = _REPOSITORY / "docs" / "reference.md"
ERRORS_FILE = _REPOSITORY / "docs" / "errors.md"


def main() -> None:
    """Write the CustomResourceDefinitions, the reference page and the page of errors."""
    CRD_FILE.write_text(crd_yaml())
    POOL_CRD_FILE.write_text(pool_crd_yaml())
    REFERENCE_FILE.write_text(reference_page())
    ERRORS_FILE.write_text(errors_page())


if __name__ == "__main__":
    main()
