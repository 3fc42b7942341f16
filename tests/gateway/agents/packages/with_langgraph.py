"""LangGraph's ReAct agent with two tools over LangChain's client for OpenAI's APIs, for the task of the first argument."""

import base64
import pathlib
import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent

TASK, URL, KEY, MODEL = sys.argv[1:]


@tool
def read_text(path: str) -> str:
    """Return the text of a file."""
    return pathlib.Path(path).read_text()


@tool
def read_png(path: str) -> list:
    """Return a picture."""
    data = base64.b64encode(pathlib.Path(path).read_bytes()).decode()
    return [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}]


model = ChatOpenAI(base_url=f"{URL}/v1", api_key=KEY, model=MODEL, streaming=True)
agent = create_react_agent(model, [read_text, read_png])
for state in agent.stream({"messages": [("user", TASK)]}, stream_mode="values"):
    last = state["messages"][-1]
sys.stdout.write(f"{last.content}\n")
