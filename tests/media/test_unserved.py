"""Formats that are not served are named, with what to do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mmd_api.contract.errors import BadMediaError
from mmd_api.contract.pools import MODALITIES
from mmd_api.spec.media import MediaPolicy
from mmd_workers.gateway.intake.file_kind import kind_of
from mmd_workers.media.containers import sniff
from mmd_workers.media.formats.unserved import FORMATS
from mmd_workers.media.probe import probe

PAGE = Path(__file__).parents[2] / "docs" / "media.md"


@pytest.mark.parametrize("row", FORMATS, ids=[f"{name} {magic.hex()}" for _, magic, name, _ in FORMATS])
def test_an_unserved_format_is_named_with_its_remedy(row: tuple[int, bytes, str, str]) -> None:
    at, magic, name, remedy = row
    data = b"FORM"[:at].ljust(at, b"\0") + magic + bytes(400)
    assert sniff(data) is None
    for modality in MODALITIES:
        with pytest.raises(BadMediaError) as error:
            probe(data, modality, MediaPolicy())
        assert error.value.message == f"the {modality} is {name}, which is not served; {remedy}"
    with pytest.raises(BadMediaError, match=re.escape(f"{name}, which is not served; ")):
        kind_of(data, "", "")


def test_an_svg_is_recognised_behind_its_declaration() -> None:
    with pytest.raises(BadMediaError, match="the image is SVG, which is not served; render it"):
        probe(b'<?xml version="1.0"?>\n<svg xmlns="http://www.w3.org/2000/svg"/>', "image", MediaPolicy())


def test_the_page_names_every_unserved_format() -> None:
    table = PAGE.read_text().partition("## Formats that are not served")[2]
    for _, _, name, _ in FORMATS:
        for word in name.removeprefix("an ").split():
            assert word in table, name
