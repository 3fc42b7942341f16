"""Which pods run an image other than the one their revision is pinned to: state in, problems out."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, cast

import pytest

from mmd_operator.observed.observed import Observed
from mmd_operator.rollout.pinning import Pins

from .bodies import NEW, OLD, pod

FIRST, SECOND = "registry.example/worker@sha256:aa", "registry.example/worker@sha256:bb"


def moved(
    image: str | None,
    *,
    pinned: str | None = FIRST,
    revision: str = NEW,
    gateway: bool = False,
    sidecar: str | None = None,
    group_rank: int | None = None,
) -> list[str]:
    """What is reported about one pod with this image."""
    pins = Pins(cast(Any, None))  # nobody is asked
    pins.remember({"pinned": [{"revision": NEW, "identity": "0123456789", "image": pinned}]})
    component, container = ("gateway", "gateway") if gateway else ("decode", "worker")
    statuses = [running(container, image)]
    if sidecar is not None:
        statuses.insert(0, running("istio-proxy", sidecar))
    seen = pod(component, revision, name=f"demo-{component}-0", containers=statuses)
    seen = replace(seen, group_rank=group_rank)
    return [f"{p.reason}: {p.seen}; {p.remedy}" for p in pins.moved(Observed({}, (seen,)))]


def running(name: str, image: str | None) -> dict[str, Any]:
    return {"name": name, "restartCount": 0, "imageID": image, "state": {}}


def test_a_pod_of_another_image_is_reported_with_both_and_the_remedy() -> None:
    (problem,) = moved(SECOND)
    for part in (
        "ImageMoved",
        "demo-decode-0",
        FIRST,
        SECOND,
        NEW,
        f"set it to a digest ({FIRST} keeps what is running)",
    ):
        assert part in problem


@pytest.mark.parametrize(
    ("image", "why"),
    [
        (FIRST, "the same"),
        ("mirror.example/worker@sha256:aa", "the same digest from another registry"),
        ("sha256:cc", "loaded by hand, which cannot be compared"),
        (None, "not pulled yet"),
    ],
)
def test_what_may_be_the_same_image_is_not_reported(image: str | None, why: str) -> None:
    assert moved(image) == [], why


def test_images_loaded_by_hand_are_compared_with_each_other() -> None:
    assert moved("sha256:aa", pinned="sha256:aa") == []
    assert len(moved("sha256:bb", pinned="sha256:aa")) == 1


def test_pods_of_other_revisions_have_images_of_their_own() -> None:
    assert moved(SECOND, revision=OLD) == []


def test_the_image_of_an_injected_container_does_not_count() -> None:
    assert moved(FIRST, sidecar="registry.example/proxy@sha256:ee") == []
    (problem,) = moved(SECOND, sidecar="registry.example/proxy@sha256:ee")
    assert SECOND in problem
    assert moved(None, sidecar="registry.example/proxy@sha256:ee") == []


def test_a_gateway_of_another_image_is_reported_too() -> None:
    assert moved(FIRST, gateway=True) == []
    (problem,) = moved(SECOND, gateway=True)
    assert "demo-gateway-0" in problem


def test_a_follower_of_another_image_is_reported_too() -> None:
    assert moved(FIRST, group_rank=1) == []
    assert len(moved(SECOND, group_rank=1)) == 1


async def test_adapter_commits_are_pinned_with_the_first_pod_and_survive_restarts() -> None:
    report = {
        "pod": "demo-decode-0",
        "revision": NEW,
        "state": "ready",
        "load": {},
        "identity": "0123456789",
        "commit": "a" * 40,
        "adapter_commits": {"sql": "c" * 40, "poems": "b" * 40},
    }

    class Fetcher:
        async def get(self, *_: object) -> bytes:
            return json.dumps(report).encode()

    seen = replace(pod("decode", NEW, ready=True), address="10.0.0.1")
    pin = await Pins(cast(Any, Fetcher())).look(Observed({}, (seen,)), NEW)
    assert pin is not None
    assert [(one.name, one.commit) for one in pin.adapters] == [("poems", "b" * 40), ("sql", "c" * 40)]
    later = Pins(cast(Any, None))
    later.remember({"pinned": [pin.model_dump(mode="json", by_alias=True, exclude_none=True)]})
    assert later.of(NEW) == pin
