"""One identity: equal content and settings give equal names in every process, different ones never do."""

import pytest

from mmd_workers.media.identity import digest, feature_id


def test_the_digest_is_sha256():
    assert digest(b"") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


def test_the_order_of_settings_does_not_matter_but_each_part_does():
    base = feature_id("d", "r", {"frames": [1, 2], "rate": 16000})
    assert base == feature_id("d", "r", {"rate": 16000, "frames": [1, 2]})
    others = [feature_id("x", "r", {"frames": [1, 2], "rate": 16000}), feature_id("d", "x", {"frames": [1, 2], "rate": 16000}),
              feature_id("d", "r", {"frames": [2, 1], "rate": 16000}), feature_id("d", "r", {"frames": [1, 2]})]  # fmt: skip
    assert len({base, *others}) == 5


def test_settings_that_have_no_canonical_form_are_refused():
    with pytest.raises(ValueError, match="JSON"):
        feature_id("d", "r", {"fps": float("nan")})
