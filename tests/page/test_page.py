"""The page at `/`, clicked by a real browser against a real deployment."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, Route, expect

from mmd_cli.samples import Sample, draw
from support.harness.waiting import wait_until
from support.serving.local_deployment import Deployment, content

from .browser import Seen

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("observed"), pytest.mark.timeout(600)]

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
ENDINGS = {"image": "png", "video": "mp4", "audio": "wav"}


def attach(page: Page, sample: Sample, name: str = "") -> None:
    name = name or f"sample.{ENDINGS[sample.kind]}"
    page.get_by_label("Images, videos and audio").set_input_files(
        {"name": name, "mimeType": sample.mime, "buffer": sample.bytes}
    )
    page.get_by_role("button", name=f"Remove {name}").wait_for()


def ask(page: Page, question: str | None = None) -> None:
    if question is not None:
        page.get_by_label("Question").fill(question)
    page.get_by_role("button", name="Ask").click()


def until_done(page: Page) -> str:
    expect(page.get_by_text("Done.", exact=True)).to_be_visible()
    return page.locator("#answer").inner_text().strip()


def stage(page: Page, name: str) -> Any:
    return page.locator(f"#stages [data-stage={name}]")


def ask_for_ever(page: Page) -> None:
    """Make the next question's answer a long one, and otherwise what the page asked."""

    def longer(route: Route) -> None:
        body = json.loads(route.request.post_data or "{}")
        body |= {"max_tokens": 3000, "temperature": 1.0, "ignore_eos": True}
        route.continue_(post_data=json.dumps(body))

    page.route("**/v1/chat/completions", longer)


def running(deployment: Deployment) -> int:
    pods = deployment.pods("prefill") + deployment.pods("decode")
    loads = [deployment.state(pod)["load"] for pod in pods]
    return sum(load["decode_running"] + load["prefill_waiting_requests"] for load in loads)


@pytest.mark.parametrize("kind", ["image", "video", "audio"])
def test_a_file_is_attached_and_the_path_of_its_request_is_shown(page: Page, seen: Seen, kind: Any) -> None:
    sample = draw(kind, 20)
    attach(page, sample)
    ask(page, sample.question)
    assert until_done(page) == sample.answer
    for name in ("encode", "prefill", "decode"):
        expect(stage(page, name)).to_have_attribute("data-state", "done")
        expect(stage(page, name).locator(".state")).to_have_text(re.compile(r"\d+(\.\d+)? ms"))
    expect(page.locator("#figures")).to_contain_text(f"{kind} ")
    phases = page.locator("#phases tr")
    expect(phases.filter(has_text="kv transfer")).to_have_count(1)
    expect(page.get_by_text(re.compile("Request chatcmpl-"))).to_be_visible()
    assert seen.faults == []
    assert all(url.startswith(("http://127.0.0.1:", "blob:http://127.0.0.1:")) for url in seen.requested)


def test_a_question_has_files_of_different_kinds_and_both_are_encoded(
    page: Page, observed: Deployment
) -> None:
    samples = [draw("image", 30), draw("audio", 31)]
    for sample in samples:
        attach(page, sample)
    ask(page, "What is this?")
    answer = until_done(page)
    expect(page.locator("#figures")).to_contain_text(re.compile(r"image [1-9]\d*, audio [1-9]\d*"))
    expect(page.locator("#phases tr").filter(has_text=re.compile("^encode"))).to_have_count(2)
    parts = [content(sample)[0] for sample in samples]
    made = observed.client().chat.completions.create(
        model="builtin/demo",
        messages=[{"role": "user", "content": [*parts, {"type": "text", "text": "What is this?"}]}],
        temperature=0,
        max_tokens=128,
    )
    assert answer == made.choices[0].message.content


def test_on_the_client_port_the_page_answers_and_reveals_no_internals(
    page: Page, seen: Seen, observed: Deployment
) -> None:
    url = observed.local.gateway_url
    with page.expect_request(f"{url}/v1/models"):
        page.goto(f"{url}/")
    page.get_by_text("builtin/demo accepts").wait_for()
    sample = draw("image", 21)
    attach(page, sample)
    ask(page, sample.question)
    assert until_done(page) == sample.answer
    expect(page.locator("#figures")).to_contain_text("Time to first token")
    expect(page.get_by_role("heading", name="Pods and queues now")).to_be_hidden()
    expect(page.locator("#stages")).to_be_hidden()
    assert not [asked for asked in seen.requested if asked.startswith(f"{url}/debug")]
    assert seen.faults == []


def test_without_a_file_at_hand_a_circle_is_drawn_and_recognised(page: Page) -> None:
    page.get_by_role("button", name="Draw a circle").click()
    name = page.locator("#attached .name").inner_text()
    color = name.split("-")[0]
    ask(page)
    assert color in until_done(page)


def test_the_answer_streams_and_stop_frees_the_request_everywhere(page: Page, observed: Deployment) -> None:
    ask_for_ever(page)
    stop = page.get_by_role("button", name="Stop")
    expect(stop).to_be_disabled()
    ask(page, "Tell a long story.")
    expect(page.get_by_text("Answering…")).to_be_visible()
    expect(page.get_by_role("log")).to_have_attribute("aria-busy", "true")
    expect(stage(page, "encode")).to_contain_text("not needed")
    expect(stage(page, "decode")).to_have_attribute("data-state", "working")
    expect(page.locator("#pods")).to_contain_text(re.compile("1 of 32"))
    early = len(page.locator("#answer").inner_text())
    wait_until(lambda: len(page.locator("#answer").inner_text()) > early + 40, "the answer grows")
    stop.click()
    expect(page.get_by_text("Stopped.")).to_be_visible()
    expect(page.get_by_role("log")).to_have_attribute("aria-busy", "false")
    # Much sooner than a lease would end.
    wait_until(lambda: running(observed) == 0, "a stopped request holds nothing", seconds=30)
    page.unroute("**/v1/chat/completions")
    ask(page, "What is 2?")
    until_done(page)


def test_settings_reach_the_request(page: Page) -> None:
    page.get_by_text("Settings").click()
    page.get_by_label("Maximum tokens").fill("2")
    page.get_by_label("Seed").fill("7")
    with page.expect_request("**/v1/chat/completions") as sent:
        page.get_by_role("button", name="Draw a circle").click()
        page.locator("#attached li").wait_for()
        ask(page)
    body = json.loads(sent.value.post_data or "{}")
    assert (body["max_tokens"], body["seed"], body["temperature"]) == (2, 7, 0)
    expect(page.get_by_text("Stopped at the token limit")).to_be_visible()


def test_a_setting_out_of_range_is_rejected_at_its_field(page: Page) -> None:
    page.get_by_text("Settings").click()
    page.get_by_label("Temperature").fill("9")
    page.get_by_text("Settings").click()
    ask(page)
    expect(page.get_by_label("Temperature")).to_be_focused()
    assert page.locator("#answer").inner_text() == ""


def test_the_layout_can_be_switched_and_is_remembered(page: Page) -> None:
    def place(name: str) -> Any:
        return page.locator(f"[aria-labelledby={name}-heading]").bounding_box()

    page.set_viewport_size({"width": 1280, "height": 900})
    assert place("journey")["x"] > place("ask")["x"] + place("ask")["width"]
    page.get_by_text("Settings").click()
    page.get_by_label("Layout").select_option("one below the other")
    for side in ("x", "width"):
        assert place("journey")[side] == place("ask")[side]
    page.get_by_label("Layout").select_option("answer only")
    expect(page.get_by_role("heading", name="Pods and queues now")).to_be_hidden()
    page.reload()
    expect(page.get_by_role("heading", name="Answer")).to_be_visible()
    expect(page.get_by_role("heading", name="Pods and queues now")).to_be_hidden()
    assert page.get_by_label("Layout").input_value() == "answer"


def test_errors_say_what_is_wrong_and_leave_the_page_usable(page: Page, seen: Seen) -> None:
    alert = page.get_by_role("alert")
    files = page.get_by_label("Images, videos and audio")
    files.set_input_files({"name": "notes.txt", "mimeType": "text/plain", "buffer": b"hello"})
    expect(alert).to_contain_text("notes.txt is not an image, video or audio file")
    broken = draw("image", 3)
    files.set_input_files({"name": "broken.png", "mimeType": "image/png", "buffer": broken.bytes[:120]})
    ask(page, "What is in this image?")
    expect(alert).to_contain_text("messages[0].content[0]")
    page.get_by_role("button", name="Remove broken.png").click()
    expect(files).to_be_focused()
    attach(page, broken, "whole.png")
    ask(page, broken.question)
    assert until_done(page) == broken.answer
    expect(alert).to_be_hidden()
    assert all("400" in fault or "blob:" in fault for fault in seen.faults)


def test_too_large_a_request_and_an_unreachable_gateway_are_distinguished(page: Page) -> None:
    alert = page.get_by_role("alert")

    def small(route: Route) -> None:
        state = route.fetch().json()
        state["limits"]["max_body_bytes"] = 1000
        route.fulfill(json=state)

    page.route("**/debug/state", small)
    attach(page, draw("image", 5))
    for _ in range(
        3
    ):  # one that was in flight, one with the small limit, and one that is asked for when that was read
        with page.expect_request("**/debug/state"):
            pass
    ask(page)
    expect(alert).to_contain_text("the limit of 1 KiB; remove a file")
    page.unroute("**/debug/state")
    page.get_by_role("button", name="Remove sample.png").click()
    page.route("**/v1/chat/completions", lambda route: route.abort())
    ask(page, "Anyone there?")
    expect(alert).to_contain_text("The gateway cannot be reached")


def test_the_keyboard_alone_is_enough(page: Page) -> None:
    def focused() -> str:
        return str(page.evaluate("document.activeElement.id"))

    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert focused() == "question"
    order = []
    for _ in range(4):
        page.keyboard.press("Shift+Tab")
        order.append(focused())
    assert order[:3] == ["tone", "draw", "files"]
    page.keyboard.press("Tab")
    while focused() != "draw":
        page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.locator("#attached li").wait_for()
    while focused() != "question":
        page.keyboard.press("Tab")
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none", "the focus cannot be seen"
    page.keyboard.press("Control+Enter")
    assert "circle" in until_done(page)
    ask_for_ever(page)
    page.keyboard.press("Control+Enter")
    expect(page.get_by_text("Answering…")).to_be_visible()
    while focused() != "stop":
        page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.get_by_text("Stopped.")).to_be_visible()
    assert focused() == "ask"


def test_files_dropped_onto_the_page_are_attached(page: Page) -> None:
    page.evaluate(
        """() => {
          const data = new DataTransfer();
          data.items.add(new File([new Uint8Array(8)], "dropped.mp3", { type: "audio/mpeg" }));
          document.body.dispatchEvent(new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true }));
        }"""
    )
    expect(page.get_by_role("button", name="Remove dropped.mp3")).to_be_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_before_with_an_answer_and_with_an_error(page: Page, scheme: Any) -> None:
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")

    def violations() -> list[str]:
        found = Axe().run(page).response["violations"]
        return [f"{one['id']}: {one['nodes'][0]['html'][:200]}" for one in found]

    assert violations() == []
    page.get_by_text("Settings").click()
    page.get_by_text("Tools", exact=True).click()
    attach(page, draw("image", 8))
    ask(page)
    until_done(page)
    page.locator("#files").set_input_files({"name": "a.txt", "mimeType": "text/plain", "buffer": b"a"})
    page.get_by_role("alert").wait_for()
    assert violations() == []


def test_a_phone_360_pixels_wide_shows_everything_without_scrolling_sideways(page: Page) -> None:
    page.set_viewport_size({"width": 360, "height": 740})
    sample = draw("video", 12)
    attach(page, sample, f"{'a-rather-long-name-' * 6}.mp4")
    ask(page, sample.question)
    until_done(page)
    expect(stage(page, "decode")).to_have_attribute("data-state", "done")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    for button in page.get_by_role("button").all():
        if button.is_visible():
            box = button.bounding_box()
            assert box is not None
            assert box["height"] >= 40
            assert box["x"] + box["width"] <= 360


def test_the_pictures_in_the_docs_show_the_page_as_it_is(page: Page, tmp_path: Path) -> None:
    """MMD_WRITE_PICTURES=1 writes them anew; otherwise they must only be there and be made alike."""
    page.get_by_role("button", name="Draw a circle").click()
    page.locator("#attached li").wait_for()
    ask(page)
    until_done(page)
    expect(stage(page, "decode")).to_have_attribute("data-state", "done")
    folder = IMAGES if os.environ.get("MMD_WRITE_PICTURES") else tmp_path
    page.screenshot(path=folder / "page.png")
    page.set_viewport_size({"width": 360, "height": 740})
    page.screenshot(path=folder / "page-phone.png")
    for name in ("page.png", "page-phone.png"):
        assert (IMAGES / name).stat().st_size > 10_000, f"docs/images/{name}: run with MMD_WRITE_PICTURES=1"
