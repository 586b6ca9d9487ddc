"""An MCP server with four tools, over stdin and stdout."""

import io
import os

import PIL.Image

try:
    from mcp.server.fastmcp import FastMCP, Image
except ImportError:  # since version 2
    from mcp.server.mcpserver import Image
    from mcp.server.mcpserver import MCPServer as FastMCP

server = FastMCP("test")


@server.tool()
def multiply(a: int, b: int) -> str:
    """Multiplies two numbers."""
    return str(a * b)


@server.tool()
def burn() -> str:
    """Fails."""
    raise RuntimeError("the tool is on fire")


@server.tool()
def draw(color: str):
    """Shows a color."""
    content = io.BytesIO()
    PIL.Image.new("RGB", (8, 6), color).save(content, "PNG")
    return [f"This is {color}:", Image(data=content.getvalue(), format="png")]


@server.tool()
def leave() -> str:
    """Ends the server."""
    os._exit(1)


if __name__ == "__main__":
    server.run("stdio")
