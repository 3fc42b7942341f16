"""Which tower a prefill pod that has one asks for a feature: its own, or those of encoder pods."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mmd_workers.features.source import EitherSource
from mmd_workers.wire.messages.message_parts import FeatureRef
from mmd_workers.wire.messages.prefill import GenerateRequest

from .media_model import request_of


class Asked:
    """A source of features that only notes what it is asked for. `kept`: in its cache."""

    def __init__(self, *kept: str) -> None:
        self.kept = kept
        self.features: list[str] = []

    def request(self, ref: FeatureRef, request: GenerateRequest) -> None:
        self.features.append(ref.feature_id)

    def has(self, feature_id: str) -> bool:
        return feature_id in self.kept

    def times(self, feature_id: str) -> dict[str, float]:
        return {"encoded": 1.0} if feature_id in self.features else {}


@pytest.mark.parametrize(
    ("encode_here", "cached", "own"),
    [(True, False, True), (False, False, False), (False, True, True)],
    ids=["the router says so", "the router does not say so", "it has the feature"],
)
def test_its_own_tower_makes_a_feature_if(encode_here: bool, cached: bool, own: bool) -> None:
    request = replace(request_of("r"), encode_here=encode_here)
    ref = request.features[0]
    here, encoders = Asked(*[ref.feature_id] * cached), Asked()
    source = EitherSource(here, encoders)
    source.request(ref, request)
    assert here.features == [ref.feature_id] * own
    assert encoders.features == [ref.feature_id] * (not own)
    assert source.times(ref.feature_id) == {"encoded": 1.0}
