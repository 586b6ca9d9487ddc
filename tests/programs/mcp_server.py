"""An MCP server with three tools, over stdin and stdout."""

import os

try:
    from mcp.server.fastmcp import FastMCP
except ImportError:  # since version 2
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
def leave() -> str:
    """Ends the server."""
    os._exit(1)


if __name__ == "__main__":
    server.run("stdio")
