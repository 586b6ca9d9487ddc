"""Turns the documentation's links to files of the repository into plain paths, since the site does not contain them."""

from __future__ import annotations

import re
from typing import Any

_LINK = re.compile(r"\[([^\]]*)\]\((?:\.\./)+([^)#\s]+)\)")


def outside_links_as_paths(text: str) -> str:
    """Returns Markdown whose links out of docs/ read as their text and path."""
    return _LINK.sub(_as_path, text)


def _as_path(match: re.Match[str]) -> str:
    text, path = match[1].strip("`"), match[2]
    return f"`{path}`" if text.rstrip("/") in path or path in text else f"{match[1]} (`{path}`)"


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Implements the MkDocs event: pages in docs/ link out of it by one `../`, those in folders by two."""
    depth = page.file.src_uri.count("/")
    return markdown if depth else outside_links_as_paths(markdown)
