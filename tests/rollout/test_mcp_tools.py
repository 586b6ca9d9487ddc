"""Tools of a real MCP server, over the pipes of its process."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
from test_tools import play

from lightrl.rollout.tool_calls import Tool, ToolBox
from lightrl.rollout.tool_parsers import ToolCall

pytest.importorskip("mcp")
SERVER = Path(__file__).parents[1] / "programs" / "mcp_server.py"


@pytest.fixture(scope="module")
def tools() -> list[Tool]:
    from lightrl.rollout.mcp_tools import mcp_tools

    return mcp_tools(f"{sys.executable} {SERVER}")


def test_its_tools_are_described_and_called(tools: list[Tool]) -> None:
    assert [tool.name for tool in tools] == ["multiply", "burn"]
    described: dict[str, Any] = dict(tools[0].schema["function"])
    assert described["description"] == "Multiplies two numbers."
    assert described["parameters"]["required"] == ["a", "b"]
    box = ToolBox(tools, timeout_s=30, max_result_chars=60)

    async def ask(name: str, **arguments: Any) -> Any:
        return await box.answer(ToolCall(name, arguments))

    for _ in range(2):  # each on a loop of its own, as phases of a run are
        assert asyncio.run(ask("multiply", a=6, b=7)).text == "42"
    failed = asyncio.run(ask("burn"))
    assert failed.is_error
    assert "McpToolError" in failed.text
    assert asyncio.run(ask("multiply", a=1)).is_error


def test_the_workflow_takes_them() -> None:
    written = '<tool_call>{"name": "multiply", "arguments": {"a": 6, "b": 7}}</tool_call>'
    text, _ = play(written, "42", tools=(), mcp=f"{sys.executable} {SERVER}")
    assert text.startswith("[multiply][burn]")
    assert "<tool>42<eos>" in text


def test_a_command_that_is_no_server_is_refused() -> None:
    from lightrl.rollout.mcp_tools import mcp_tools

    for command in (f"{sys.executable} -c pass", "no-such-program-at-all"):
        with pytest.raises(ValueError, match="The MCP server .* does not answer"):
            mcp_tools(command)
