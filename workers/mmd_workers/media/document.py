"""Pages of a PDF as images. PDFium opens it, only in the sandbox: no script runs, no link is followed, no embedded file is opened.

A page is an image like any other. Its size follows from its box and the policy's dots per inch, and is known before it is
rendered. Independent of the model and the network.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pypdfium2
import pypdfium2.raw as pdfium

from mmd_api.contract.errors import BadMediaError

if TYPE_CHECKING:
    from mmd_api.spec.media import MediaPolicy

POINTS_PER_INCH = 72
MAX_DOCUMENT_PAGES = 100_000  # limit of pages to choose from
_WHITE = 0xFFFFFFFF
_FLAGS = pdfium.FPDF_ANNOT | pdfium.FPDF_REVERSE_BYTE_ORDER
_FIELD = "spec.gateway.media"


def page_sizes(data: bytes, pages: str, most: int, policy: MediaPolicy) -> list[tuple[int, int, int]]:
    """Number, width and height in pixels of the chosen pages (see `selected`), at most `most`.

    Raises:
        BadMediaError: the PDF cannot be read, a page does not exist or is too large, or too many are chosen.
    """
    with _opened(data) as document:
        numbers = selected(pages, len(document), min(most, policy.document.max_pages))
        return [(number, *_size(document, number, policy)) for number in numbers]


def page_size(data: bytes, number: int, policy: MediaPolicy) -> tuple[int, int]:
    """Width and height in pixels of a page, counted from 1. Raises as `page_sizes`."""
    with _opened(data) as document:
        if not 1 <= number <= len(document):
            raise _missing(number, len(document))
        return _size(document, number, policy)


def render(data: bytes, number: int, out: npt.NDArray[np.uint8]) -> None:
    """Render a page on white to `out`, as RGB, uint8 [height, width, 3].

    Raises:
        BadMediaError: the page cannot be read.
    """
    height, width, _ = out.shape
    with _opened(data) as document:
        try:
            page = document[number - 1]
        except (pypdfium2.PdfiumError, IndexError) as error:
            raise _damaged(number) from error
        memory = out.ctypes.data_as(ctypes.c_void_p)
        bitmap = pdfium.FPDFBitmap_CreateEx(width, height, pdfium.FPDFBitmap_BGR, memory, 3 * width)
        if not bitmap:
            raise _damaged(number)
        try:
            pdfium.FPDFBitmap_FillRect(bitmap, 0, 0, width, height, _WHITE)
            pdfium.FPDF_RenderPageBitmap(bitmap, page.raw, 0, 0, width, height, 0, _FLAGS)
        finally:
            pdfium.FPDFBitmap_Destroy(bitmap)
            page.close()


def selected(pages: str, count: int, most: int) -> list[int]:
    """The pages named by a text such as `1-3,7,10-`, in a document with `count` pages; empty: all.

    Raises:
        BadMediaError: the pages are not in ascending order, do not exist, or are more than `most`.
    """
    numbers: list[int] = []
    last = 0
    for part in (pages or "1-").split(","):
        begin, dash, end = part.partition("-")
        first = int(begin)
        until = count if dash and not end else int(end or begin)
        if not dash or end:
            if until > count:
                raise _missing(until, count)
        elif first > count:
            raise _missing(first, count)
        if not last < first <= until:
            raise BadMediaError(
                f"pages: {part[:32]} is not after page {last}; count pages from 1, and name each once in ascending order"
            )
        if len(numbers) + until - first + 1 > most:
            raise BadMediaError(
                f'more than {most} of the document\'s {count} pages are chosen; choose fewer with pages, such as "1-{most}", or raise '
                f"{_FIELD}.document.maxPages and {_FIELD}.maxItemsPerRequest"
            )
        numbers += range(first, until + 1)
        last = until
    return numbers


@contextmanager
def _opened(data: bytes) -> Iterator[pypdfium2.PdfDocument]:
    try:
        document = pypdfium2.PdfDocument(data)
    except pypdfium2.PdfiumError as error:
        # The code may come from another document.
        if error.err_code == pdfium.FPDF_ERR_PASSWORD and b"/Encrypt" in data:
            raise BadMediaError(
                "the document needs a password; remove its encryption (qpdf --decrypt) and send it again"
            ) from error
        raise BadMediaError("the document is damaged or cut off; send a complete, valid PDF") from error
    try:
        count = len(document)
        if count < 1:
            raise BadMediaError("the document has no pages; send a complete, valid PDF")
        if count > MAX_DOCUMENT_PAGES:
            raise BadMediaError(
                f"the document has {count} pages, more than the {MAX_DOCUMENT_PAGES} that are served; split it"
            )
        yield document
    finally:
        document.close()


def _size(document: pypdfium2.PdfDocument, number: int, policy: MediaPolicy) -> tuple[int, int]:
    try:
        width_points, height_points = document.get_page_size(number - 1)
    except pypdfium2.PdfiumError as error:
        raise _damaged(number) from error
    scale = policy.document.dots_per_inch / POINTS_PER_INCH
    sides = width_points * scale, height_points * scale
    if not all(math.isfinite(side) and side > 0 for side in sides):
        raise BadMediaError(f"page {number} of the document has no size; send a valid PDF")
    width, height = (max(1, math.ceil(side)) for side in sides)
    if width * height > policy.image.max_pixels:
        raise BadMediaError(
            f"page {number} of the document has {width}x{height} pixels at {policy.document.dots_per_inch} dots per inch, more than the limit "
            f"of {policy.image.max_pixels}; choose other pages, lower {_FIELD}.document.dotsPerInch, or raise {_FIELD}.image.maxPixels"
        )
    return width, height


def _missing(number: int, count: int) -> BadMediaError:
    return BadMediaError(
        f"pages: the document has {count} pages, and no page {number}; choose from 1 to {count}"
    )


def _damaged(number: int) -> BadMediaError:
    return BadMediaError(
        f"page {number} of the document is damaged; send a complete, valid PDF, or choose other pages"
    )
