"""The page shows tool calls and reasoning of scripted answers, and sends back results, in a real browser."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Locator, Page, expect
from transformers import AutoTokenizer

from mmd_api.tenants import hash_of, new_key
from support.oracles.tokens import with_template, with_tokens
from tests.gateway.browser import visit
from tests.gateway.running import Launch
from tests.gateway.scripted import HalfFirst

pytestmark = pytest.mark.processes

WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}]
BERN = '<tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call>'
THUN = BERN.replace("Bern", "Thun")
HOSTILE = "<img src=x onerror=alert(1)>"
REASONING = (
    "{% for m in messages %}[{{ m.role }}]{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}{% endfor %}"
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}[assistant]<think>\n"
)


async def enter_tools(page: Page, text: str) -> None:
    field = page.get_by_label("Tools as JSON")
    if not await field.is_visible():
        await page.get_by_text("Tools", exact=True).click()
    await field.fill(text)


async def ask(page: Page, question: str = "How is the weather?") -> None:
    await page.get_by_label("Question").fill(question)
    await page.get_by_role("button", name="Ask").click()


def calls(page: Page) -> Locator:
    return page.get_by_role("list", name="Tool calls").get_by_role("listitem")


async def violations(page: Page) -> list[str]:
    found = (await Axe().run(page)).response["violations"]
    return [f"{one['id']}: {one['nodes'][0]['html'][:200]}" for one in found]


async def test_a_call_streams_into_view_and_its_result_continues_the_conversation(
    launch: Launch,
) -> None:
    gateway = await launch()
    half = HalfFirst(len(gateway.ids(BERN)) - len(gateway.ids('rn"}}</tool_call>')))
    worker = await gateway.worker(BERN, half)
    async with visit(gateway.url) as (page, faults):
        await enter_tools(page, json.dumps(TOOLS))
        await ask(page)
        await expect(page.get_by_text("Calling tools…")).to_be_visible()
        await expect(calls(page).locator("code")).to_have_text("weather")
        await expect(calls(page).locator(".arguments")).to_contain_text('{"city": "')
        await expect(calls(page).locator(".arguments")).not_to_contain_text("}")
        await expect(page.get_by_role("button", name="Send results")).to_have_count(0)
        half.seen.set()
        await expect(calls(page).locator(".arguments")).to_have_text('{"city": "Bern"}')
        await expect(page.get_by_text("The model calls a tool; enter what each call returns")).to_be_visible()
        assert await page.get_by_role("log").inner_text() == ""

        worker.answer = gateway.ids("It rains.")
        send = page.get_by_role("button", name="Send results")
        await send.click()
        field = page.get_by_label("Result of call 1, weather")
        await expect(field).to_be_focused()  # a result is required
        await field.fill("rain")
        await send.click()
        await expect(page.get_by_role("log").last).to_have_text("It rains.")
        await expect(page.get_by_text("Done.", exact=True)).to_be_visible()
        await expect(calls(page)).to_have_count(1)
        prompt = gateway.tokenizer.decode(worker.requests[1].token_ids)
        assert prompt.startswith(gateway.tokenizer.decode(worker.requests[0].token_ids))
        assert f"{BERN}<|im_end|>\n<|im_start|>tool\nrain<|im_end|>" in prompt

        await field.fill("sun")
        await field.press("Control+Enter")
        await worker.until(lambda: len(worker.requests) == 3)
        await expect(page.get_by_text("Done.", exact=True)).to_be_visible()
        await expect(page.get_by_role("log")).to_have_count(2)  # the answer to what was sent again
        again = gateway.tokenizer.decode(worker.requests[2].token_ids)
        assert again == prompt.replace("tool\nrain", "tool\nsun")

        await ask(page, "And now?")
        await expect(page.get_by_text("Done.", exact=True)).to_be_visible()
        await expect(calls(page)).to_have_count(0)
        assert "weather" not in gateway.tokenizer.decode(worker.requests[3].token_ids).split("<|im_end|>")[1]
        assert faults == []


async def test_parallel_calls_are_shown_one_by_one_with_separate_results(launch: Launch) -> None:
    gateway = await launch()
    worker = await gateway.worker(f"Two cities. {BERN}\n{THUN}")
    async with visit(gateway.url) as (page, faults):
        await enter_tools(page, json.dumps(TOOLS))
        await page.get_by_text("Settings").click()
        limit = page.get_by_label("Maximum tokens")
        await limit.fill("256")
        await ask(page)
        await expect(page.get_by_text("The model calls 2 tools")).to_be_visible()
        await expect(calls(page).locator(".arguments")).to_have_text(['{"city": "Bern"}', '{"city": "Thun"}'])
        await expect(page.get_by_role("log")).to_have_text("Two cities. ")
        assert await violations(page) == []
        await page.get_by_label("Result of call 2, weather").fill("sun")
        await page.get_by_label("Result of call 1, weather").fill("rain")
        await limit.fill("")
        await page.get_by_text("Settings").click()
        await page.get_by_role("button", name="Send results").click()
        await expect(limit).to_be_focused()
        await limit.fill("256")
        worker.answer = gateway.ids(BERN)
        await page.get_by_role("button", name="Send results").click()
        await expect(page.get_by_text("The model calls a tool")).to_be_visible()
        prompt = gateway.tokenizer.decode(worker.requests[1].token_ids)
        tool = "<|im_start|>tool\n{}<|im_end|>\n"
        assert f"Two cities. \n{BERN}\n{THUN}<|im_end|>\n{tool.format('rain')}{tool.format('sun')}" in prompt
        await expect(calls(page)).to_have_count(3)
        await expect(page.get_by_role("button", name="Send results again")).to_have_count(1)
        await expect(page.get_by_role("button", name="Send results", exact=True)).to_have_count(1)
        await expect(page.get_by_label("Result of call 3, weather")).to_be_visible()
        assert await violations(page) == []
        assert faults == []


async def test_a_rejected_result_can_be_changed_and_sent_again(launch: Launch) -> None:
    gateway = await launch(maxBodyMebibytes=1)
    worker = await gateway.worker(BERN)
    async with visit(gateway.url) as (page, _):
        await enter_tools(page, json.dumps(TOOLS))
        await ask(page)
        field = page.get_by_label("Result of call 1, weather")
        await field.fill("rain " * 300_000)
        await page.get_by_role("button", name="Send results").click()
        await expect(page.get_by_role("alert")).to_be_visible()
        assert len(worker.requests) == 1
        await field.fill("rain")
        worker.answer = gateway.ids("It rains.")
        await page.get_by_role("button", name="Send results").click()
        await expect(page.get_by_role("log").last).to_have_text("It rains.")
        await expect(page.get_by_role("alert")).to_be_hidden()


async def test_a_call_that_is_cut_off_asks_for_no_result(launch: Launch) -> None:
    gateway = await launch()
    await gateway.worker(BERN)
    async with visit(gateway.url) as (page, _):
        await enter_tools(page, json.dumps(TOOLS))
        await page.get_by_text("Settings").click()
        await page.get_by_label("Maximum tokens").fill(str(len(gateway.ids(BERN)) - 6))
        await ask(page)
        await expect(page.get_by_text("Stopped at the token limit")).to_be_visible()
        await expect(calls(page)).to_have_count(1)
        await expect(page.get_by_role("button", name="Send results")).to_have_count(0)


@pytest.mark.parametrize("kind", ["arguments", "text"])
async def test_what_a_model_writes_is_text_and_never_html(launch: Launch, kind: str) -> None:
    gateway = await launch()
    await gateway.worker(BERN.replace("Bern", HOSTILE) if kind == "arguments" else HOSTILE)
    async with visit(gateway.url) as (page, faults):
        await enter_tools(page, json.dumps(TOOLS))
        await ask(page)
        await expect(page.locator("#answer")).to_contain_text(HOSTILE)
        assert await page.locator("#answer img").count() == 0
        assert faults == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"type": "function",}]', "Tools are not valid JSON"),
        ("weather", "Tools are not valid JSON"),
        (json.dumps(TOOLS[0]), "Tools must be a JSON array; enclose them in [ and ]."),
    ],
)
async def test_invalid_tools_are_reported_at_their_field_and_nothing_is_sent(
    launch: Launch, text: str, message: str
) -> None:
    gateway = await launch()
    worker = await gateway.worker()
    async with visit(gateway.url) as (page, _):
        sent: list[str] = []
        page.on("request", lambda request: sent.append(request.url))
        await enter_tools(page, text)
        await page.get_by_text("Tools", exact=True).click()
        await ask(page)
        field = page.get_by_label("Tools as JSON")
        await expect(field).to_be_focused()
        await expect(page.locator("#tools-error")).to_contain_text(message)
        await expect(field).to_have_accessible_description(await described(page))
        await expect(field).to_have_attribute("aria-invalid", "true")
        assert await violations(page) == []
        assert [url for url in sent if url.endswith("completions")] == []
        await field.fill("")
        await expect(page.locator("#tools-error")).to_be_hidden()
        await ask(page)
        await expect(page.locator("#answer")).to_have_text("the red circle")
        assert len(worker.requests) == 1


async def described(page: Page) -> str:
    """The message and the hint of the field of tools."""
    return " ".join(
        [(await page.locator(f"#{name}").inner_text()).strip() for name in ("tools-error", "tools-hint")]
    )


async def test_tools_reach_the_gateway_as_they_were_written(launch: Launch) -> None:
    gateway = await launch()
    await gateway.worker()
    large = json.dumps(TOOLS).replace('{"type": "string"}', '{"const": 9007199254740993}')
    async with visit(gateway.url) as (page, _):
        await enter_tools(page, f"\n{large}\n")
        async with page.expect_request("**/v1/chat/completions") as sent:
            await ask(page)
        body = json.loads((await sent.value).post_data or "")
        assert body["tools"] == json.loads(large)
        await expect(page.get_by_text("Done.", exact=True)).to_be_visible()
        await enter_tools(page, "[1]")
        await ask(page)
        await expect(page.get_by_role("alert")).to_contain_text("tools[0]")


async def test_reasoning_is_shown_apart_from_the_answer_and_sent_back_with_it(
    launch: Launch, text_model: Path, tmp_path: Path
) -> None:
    folder = with_template(text_model, tmp_path / "model", REASONING)
    with_tokens(folder, "<think>", "</think>", special=True)
    gateway = await launch(model={"id": str(folder), "servedName": ["builtin/demo"]})
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def ids(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    half = HalfFirst(len(ids("it may")))
    reasoned = f"it may rain{HOSTILE}\n</think>\n\n"
    call = BERN.replace(">{", ">\n{").replace("}<", "}\n<")
    worker = await gateway.worker(ids(f"{reasoned}Well. {call}"), half)
    async with visit(gateway.url) as (page, faults):
        await enter_tools(page, json.dumps(TOOLS))
        await page.get_by_text("Settings").click()
        await page.get_by_label("Maximum tokens").fill("1000")
        await ask(page)
        await expect(page.get_by_text("Reasoning…")).to_be_visible()
        thoughts = page.locator(".reasoning")
        await expect(thoughts).to_be_hidden()
        await page.get_by_text("Reasoning", exact=True).click()
        await expect(thoughts).to_have_text("it may")
        half.seen.set()
        await expect(thoughts).to_have_text(f"it may rain{HOSTILE}")
        await expect(page.get_by_role("log")).to_have_text("Well. ")
        await expect(page.get_by_text("The model calls a tool")).to_be_visible()
        assert await violations(page) == []
        worker.answer = ids("so\n</think>\n\nIt rains.")
        await page.get_by_label("Result of call 1, weather").fill("rain")
        await page.get_by_role("button", name="Send results").click()
        await expect(page.get_by_role("log").last).to_have_text("It rains.")
        await expect(thoughts).to_have_text([f"it may rain{HOSTILE}", "so"])
        assert f"<think>it may rain{HOSTILE}</think>Well. " in tokenizer.decode(worker.requests[1].token_ids)
        assert await page.locator("#answer img").count() == 0
        assert faults == []


async def test_a_visitor_with_a_key_asks_with_tools_and_sends_results(launch: Launch, tmp_path: Path) -> None:
    key, file = new_key(), tmp_path / "keys.yaml"
    file.write_text(yaml.safe_dump({"tenants": [{"name": "search", "keys": [{"hash": hash_of(key)}]}]}))
    gateway = await launch(keys_file=str(file), auth={"keysSecret": "demo-keys"})
    worker = await gateway.worker(BERN)
    async with visit(gateway.url) as (page, faults):
        await page.get_by_label("API key").fill(key)
        await page.get_by_label("API key").press("Enter")
        await expect(page.locator("#served")).to_contain_text("builtin/demo accepts")
        await enter_tools(page, json.dumps(TOOLS))
        await ask(page)
        await page.get_by_label("Result of call 1, weather").fill("rain")
        worker.answer = gateway.ids("It rains.")
        await page.get_by_role("button", name="Send results").click()
        await expect(page.get_by_role("log").last).to_have_text("It rains.")
        assert faults == []
