"""Pages of PDFs: as Poppler renders them, chosen by number, and whatever a hostile one does it ends with pages or an error and a remedy."""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from mmd_api.contract.errors import BadMediaError
from mmd_api.spec.media import MediaPolicy
from mmd_workers.media.document import selected
from mmd_workers.media.sandbox import DecodePool

pytestmark = pytest.mark.asyncio(loop_scope="module")
FOLDER = Path(__file__).with_name("documents")
EXPECTED: dict[str, list[dict[str, Any]]] = json.loads((FOLDER / "expected.json").read_text())
POLICY = MediaPolicy()
MIB = 2**20


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[DecodePool]:
    pool = DecodePool(processes=1, decode_timeout_seconds=8, memory_bytes=1024 * MIB)
    await pool.start()
    yield pool
    await pool.close()


def read(name: str) -> bytes:
    return (FOLDER / name).read_bytes()


def cells(pixels: np.ndarray) -> np.ndarray:
    rows = (np.array_split(row, 12, axis=1) for row in np.array_split(pixels, 8, axis=0))
    return np.array([cell.mean((0, 1)) for row in rows for cell in row])


async def rendered(pool: DecodePool, data: bytes, pages: str = "") -> list[np.ndarray]:
    """Pages as gateway and encoder get them, one after the other."""
    found = []
    for promised in await pool.probe_pages(data, pages, POLICY):
        info = await pool.probe(data, "image", POLICY, promised.page)
        assert info == promised
        found.append((await pool.decode_image(data, info)).pixels)
        assert found[-1].shape == (info.height, info.width, 3)
    return found


@pytest.mark.parametrize("name", sorted(EXPECTED))
async def test_pages_have_the_sizes_and_colours_that_poppler_gives_them(pool: DecodePool, name: str) -> None:
    pages = await rendered(pool, read(name))
    assert len(pages) == len(EXPECTED[name])
    for pixels, expected in zip(pages, EXPECTED[name], strict=True):
        assert [pixels.shape[1], pixels.shape[0]] == expected["size"]
        difference = np.abs(cells(pixels) - expected["cells"])
        assert difference.max() < 24, "text is drawn in another font, and edges are smoothed otherwise"
        assert difference.mean() < 2


async def test_pages_come_in_document_order_and_as_chosen(pool: DecodePool) -> None:
    first, second, third = await rendered(pool, read("reportlab.pdf"))
    chosen = await rendered(pool, read("reportlab.pdf"), "1,3")
    assert np.array_equal(chosen[0], first)
    assert np.array_equal(chosen[1], third)
    assert [int(page[300, 100].argmax()) for page in (first, second)] == [0, 1]
    assert third[100, 100].argmax() == 2, "the third page is turned"


async def test_pages_are_chosen_as_in_a_print_dialog() -> None:
    for text, expected in {
        "": [1, 2, 3, 4, 5],
        "2": [2],
        "1-2,5": [1, 2, 5],
        "4-": [4, 5],
        "1-5": [1, 2, 3, 4, 5],
    }.items():
        assert selected(text, 5, 16) == expected
    for text in ("0", "6", "2-6", "3-2", "2,2", "3,1", "1-3,2", "9-", "0-"):
        with pytest.raises(BadMediaError, match="; c"):
            selected(text, 5, 16)
    with pytest.raises(BadMediaError, match=r'more than 3 .* with pages, such as "1-3"'):
        selected("", 5, 3)


async def test_limits_of_documents_name_their_fields(pool: DecodePool) -> None:
    data = read("reportlab.pdf")
    limits: dict[str, dict[str, Any]] = {
        "maxPages": {"document": {"maxPages": 2}},
        "maxItemsPerRequest": {"maxItemsPerRequest": 2},
        r"document\.maxBytes": {"document": {"maxBytes": 1024}},
        r"dotsPerInch, or raise spec\.gateway\.media\.image\.maxPixels": {"image": {"maxPixels": 1024}},
    }
    for field, limit in limits.items():
        with pytest.raises(BadMediaError, match=field):
            await pool.probe_pages(data, "", MediaPolicy.model_validate(limit))


async def test_a_document_is_no_image_and_an_image_no_document(pool: DecodePool) -> None:
    with pytest.raises(BadMediaError, match="the bytes are pdf; use the content part of that type"):
        await pool.probe(read("reportlab.pdf"), "image", POLICY)
    with pytest.raises(BadMediaError, match="the bytes are gif; send a PDF"):
        await pool.probe_pages(b"GIF89a" + bytes(100), "", POLICY)
    with pytest.raises(BadMediaError, match="is empty"):
        await pool.probe_pages(b"", "", POLICY)


async def test_an_encrypted_document_is_refused_with_what_removes_its_password(pool: DecodePool) -> None:
    with pytest.raises(BadMediaError, match="needs a password; remove its encryption"):
        await pool.probe_pages(read("encrypted.pdf"), "", POLICY)


# --- hostile documents ----------------------------------------------------------------------------------------


def pdf(*objects: bytes) -> bytes:
    """A PDF of these objects, the first of which is its catalog."""
    out, at = bytearray(b"%PDF-1.7\n"), []
    for number, body in enumerate(objects, 1):
        at.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    table = b"".join(b"%010d 00000 n \n" % one for one in at)
    end = b"xref\n0 %d\n0000000000 65535 f \n%strailer\n<</Size %d/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF\n"
    return bytes(out) + end % (len(at) + 1, table, len(at) + 1, len(out))


def stream(data: bytes, entries: bytes = b"") -> bytes:
    packed = zlib.compress(data, 1)
    return b"<</Length %d/Filter/FlateDecode%s>>\nstream\n%s\nendstream" % (len(packed), entries, packed)


def page(
    contents: bytes = b"",
    *more: bytes,
    box: bytes = b"0 0 200 100",
    resources: bytes = b"",
    catalog: bytes = b"",
) -> bytes:
    return pdf(
        b"<</Type/Catalog/Pages 2 0 R%s>>" % catalog,
        b"<</Type/Pages/Kids[3 0 R]/Count 1>>",
        b"<</Type/Page/Parent 2 0 R/MediaBox[%s]/Contents 4 0 R/Resources<<%s>>>>" % (box, resources),
        stream(contents),
        *more,
    )


def pages(kids: bytes, count: int) -> bytes:
    return pdf(
        b"<</Type/Catalog/Pages 2 0 R>>",
        b"<</Type/Pages/Kids[%s]/Count %d>>" % (kids, count),
        b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 9 9]>>",
    )


IMAGE, FORM = b"/XObject<</I 5 0 R>>", b"/XObject<</F 5 0 R>>"
DRAWN = b"q 100 0 0 100 0 0 cm /I Do Q"
GREY = b"/Type/XObject/Subtype/Image/BitsPerComponent 8/ColorSpace/DeviceGray/Width %d/Height %d"
RECURSIVE = b"/Type/XObject/Subtype/Form/BBox[0 0 9 9]/Resources<</XObject<</F %d 0 R>>>>"
REFUSED = {
    "a page as large as a city": (page(box=b"0 0 1000000000 1000000000"), "maxPixels"),
    "a page of large units": (
        page(box=b"0 0 14400 14400").replace(b"/Parent", b"/UserUnit 75000/Parent"), "maxPixels",
    ),
    "a million pages that it only claims": (pages(b"3 0 R", 1_000_000), "1000000 pages"),
    "a million pages": (pages(b"3 0 R " * 1_000_000, 1_000_000), "1000000 pages"),
    "a page that is its own parent": (pages(b"2 0 R 2 0 R", 5), "damaged"),
    "no page": (pages(b"", 0), "damaged|no pages"),
    "a gibibyte of spaces": (page(b" " * (1 << 30)), "crashed|took longer|needs more"),
    "a form that draws itself twice": (page(b"/F Do", stream(b"/F Do /F Do", RECURSIVE % 5), resources=FORM), "took longer|crashed"),
    "forms that draw ten others each": (
        page(b"/F Do", *(stream(b"/F Do " * 10, RECURSIVE % (n + 1)) for n in range(5, 18)), stream(b"0 0 9 9 re f", RECURSIVE % 5), resources=FORM),
        "took longer|crashed",
    ),
    "nothing but a header": (b"%PDF-1.7", "damaged"),
    "bytes without an object": (b"%PDF-1.7\n" + bytes(range(256)) * 100, "damaged"),
}  # fmt: skip
SHOWN = {
    "a script that never ends": page(b"1 0 0 rg 0 0 200 100 re f", catalog=b"/OpenAction<</S/JavaScript/JS(while(true){})>>"),
    "an action that starts a program": page(b"1 0 0 rg 0 0 200 100 re f", catalog=b"/OpenAction<</S/Launch/F(/bin/sh)>>"),
    "an image of a tebibyte that it only claims": page(DRAWN, stream(bytes(99), GREY % (1 << 20, 1 << 20)), resources=IMAGE),
    "brackets that nest": page(b"[" * 200_000),
    "a box without an area": page(box=b"0 0 0 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
async def test_a_hostile_document_is_refused_and_the_next_is_served(pool: DecodePool, name: str) -> None:
    data, reason = REFUSED[name]
    with pytest.raises(BadMediaError, match=reason) as caught:
        await rendered(pool, data)
    assert "; " in caught.value.message
    assert len(await rendered(pool, read("ghostscript.pdf"))) == 1


@pytest.mark.parametrize("name", SHOWN)
async def test_what_a_document_may_not_do_does_not_happen(pool: DecodePool, name: str) -> None:
    before = pool.process_ids
    (pixels,) = await rendered(pool, SHOWN[name])
    assert pixels.size
    assert pool.process_ids == before


async def test_a_document_that_is_cut_off_anywhere_is_refused_or_gives_pages(pool: DecodePool) -> None:
    data = read("object-streams.pdf")
    for end in range(0, len(data), max(1, len(data) // 24)):
        with contextlib.suppress(BadMediaError):
            await rendered(pool, data[:end])
    assert len(await rendered(pool, data)) == 3
