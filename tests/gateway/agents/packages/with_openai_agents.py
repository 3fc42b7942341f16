"""OpenAI's Agents SDK with two tools, on the API of the first argument, for the task of the second."""

import asyncio
import base64
import pathlib
import sys

import agents
import openai

API, TASK, URL, KEY, MODEL = sys.argv[1:]


@agents.function_tool
def read_text(path: str) -> str:
    """Return the text of a file."""
    return pathlib.Path(path).read_text()


@agents.function_tool
def read_png(path: str) -> agents.ToolOutputImage:
    """Return a picture."""
    data = base64.b64encode(pathlib.Path(path).read_bytes()).decode()
    return agents.ToolOutputImage(image_url=f"data:image/png;base64,{data}")


agents.set_tracing_disabled(True)
agents.set_default_openai_client(openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY), use_for_tracing=False)
agents.set_default_openai_api(API)
agent = agents.Agent("reader", instructions="Read files.", model=MODEL, tools=[read_text, read_png])


async def run() -> None:
    result = agents.Runner.run_streamed(agent, TASK)
    async for _ in result.stream_events():
        pass
    sys.stdout.write(f"{result.final_output}\n")


asyncio.run(run())
