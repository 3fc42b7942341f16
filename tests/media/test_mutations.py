"""No damaged file crashes or hangs its decoder, gets an answer other than promised, or leaves anything behind; `bench.mutations` sends many more."""

from __future__ import annotations

from mmd_workers.media.sandbox import DecodePool
from support.serving import mutations

FILES = 1500


async def test_damaged_files_are_answered_or_refused_and_leave_nothing_behind() -> None:
    pool = DecodePool(processes=1, decode_timeout_seconds=60)
    await pool.start()
    report = await mutations.run(mutations.originals(), FILES, 7, pool)
    assert report.failures == []
    kinds = report.decoded | report.refused
    assert {kind.split()[1] for kind in kinds} == {*mutations.SENT_AS}
    assert report.decoded.total() + report.refused.total() == FILES
    assert min(report.decoded.total(), report.refused.total()) > FILES / 10


def test_equal_numbers_make_the_same_mutant_and_others_another() -> None:
    files = mutations.originals()
    name = "corners.heic"
    again = [mutations.mutant(files, name, 1, number) for number in (5, 5, 6)]
    assert again[0] == again[1] != again[2]
    assert again[0] != files[name]
