"""Tools of a real MCP server, over the pipes of its process."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_tools import play

from lightrl.data.media import read_image
from lightrl.rollout.tool_calls import Tool, ToolBox
from lightrl.rollout.written_calls import ToolCall

pytest.importorskip("mcp")
SERVER = Path(__file__).parents[1] / "programs" / "mcp_server.py"


@pytest.fixture(scope="module")
def tools() -> list[Tool]:
    from lightrl.rollout.mcp_tools import mcp_tools

    return mcp_tools(f"{sys.executable} {SERVER}")


def test_its_tools_are_described_and_called(tools: list[Tool]) -> None:
    assert [tool.name for tool in tools] == ["multiply", "burn", "draw", "leave"]
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
    drawn = asyncio.run(ask("draw", color="red"))
    text, image = drawn.parts
    assert text == {"type": "text", "text": "This is red:"}
    assert read_image(image["image"]).getpixel((3, 3)) == (255, 0, 0)


def test_a_server_that_has_ended_is_started_again(tools: list[Tool], caplog: pytest.LogCaptureFixture) -> None:
    box = ToolBox(tools, timeout_s=30, max_result_chars=60)

    async def ask(*names: str) -> Any:
        return await asyncio.gather(
            *(box.answer(ToolCall(name, {"a": 6, "b": 7} if name != "leave" else {})) for name in names)
        )

    for _ in range(2):
        assert all(answer.is_error for answer in asyncio.run(ask("leave", "leave")))
        assert [answer.text for answer in asyncio.run(ask("multiply", "multiply"))] == ["42", "42"]
    assert caplog.text.count("has ended. It is started again.") == 2


def test_a_server_that_cannot_be_started_again_is_reported_and_tried_again_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lightrl.rollout.mcp_tools import mcp_tools

    now = [0.0]
    monkeypatch.setattr("lightrl.rollout.mcp_tools.time", SimpleNamespace(monotonic=lambda: now[0]))
    program = tmp_path / "server.py"
    program.write_text(SERVER.read_text())
    box = ToolBox(mcp_tools(f"{sys.executable} {program}"), timeout_s=30, max_result_chars=400)
    program.unlink()

    def ask(name: str, **arguments: int) -> str:
        return asyncio.run(box.answer(ToolCall(name, arguments))).text

    for passed_s, num_tries in ((0.0, 1), (4.0, 1), (2.0, 2), (9.0, 2), (2.0, 3)):  # pauses of 5 and 10 s
        now[0] += passed_s
        assert "does not answer" in ask("burn" if num_tries > 1 else "leave")
        assert caplog.text.count("has ended. It is started again.") == num_tries
    program.write_text(SERVER.read_text())
    now[0] += 20
    assert ask("multiply", a=6, b=7) == "42"
    assert "does not answer" not in ask("leave")  # the server is there again, and its next end is like its first
    assert ask("multiply", a=6, b=7) == "42"


def test_a_silent_server_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightrl.rollout.mcp_tools import mcp_tools

    monkeypatch.setattr("lightrl.rollout.mcp_tools._START_S", 5.0)
    program, started = tmp_path / "silent.py", tmp_path / "pid"
    program.write_text(f"import os, time\nopen({str(started)!r}, 'w').write(str(os.getpid()))\ntime.sleep(300)")
    with pytest.raises(ValueError, match="does not answer .TimeoutError"):
        mcp_tools(f"{sys.executable} {program}")
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)


PAGED = """
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    answer = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": {"name": "", "version": ""}}
    if asked["method"] == "tools/list":
        page = int((asked.get("params") or {}).get("cursor") or 0)
        answer = {"tools": [{"name": f"tool{page}", "inputSchema": {"type": "object"}}] if page else []}
        answer |= {"nextCursor": str(page + 1)} if page != LAST else {}
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": answer}), flush=True)
"""


def test_every_page_of_tools_is_read_and_an_endless_list_is_refused(tmp_path: Path) -> None:
    from lightrl.rollout.mcp_tools import mcp_tools

    for last in (2, -1):
        (tmp_path / f"server{last}.py").write_text(PAGED.replace("LAST", str(last)))
    assert [tool.name for tool in mcp_tools(f"{sys.executable} {tmp_path}/server2.py")] == ["tool1", "tool2"]
    with pytest.raises(ValueError, match="its list of tools does not end; it has given 1000"):
        mcp_tools(f"{sys.executable} {tmp_path}/server-1.py")


def test_the_workflow_takes_them() -> None:
    written = '<tool_call>{"name": "multiply", "arguments": {"a": 6, "b": 7}}</tool_call>'
    text, _ = play(written, "42", tools=(), mcp=f"{sys.executable} {SERVER}")
    assert text.startswith("[multiply][burn][draw][leave]")
    assert "<tool>42<eos>" in text


def test_a_command_that_is_no_server_is_refused() -> None:
    from lightrl.rollout.mcp_tools import mcp_tools

    for command in (f"{sys.executable} -c pass", "no-such-program-at-all"):
        with pytest.raises(ValueError, match="The MCP server .* does not answer"):
            mcp_tools(command)
