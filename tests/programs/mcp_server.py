"""An MCP server with two tools, over stdin and stdout."""

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


if __name__ == "__main__":
    server.run("stdio")
