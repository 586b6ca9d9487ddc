"""A hub on this machine that takes what huggingface_hub uploads, and keeps it."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest


class FakeHub(ThreadingHTTPServer):
    """Keeps commits: (repository, message, files by path), and whether each request came with the token."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.commits: list[tuple[str, str, dict[str, bytes]]] = []
        self.tokens: set[str] = set()
        self.refuses = False
        self.stored: dict[str, bytes] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub

    def log_message(self, *args: Any) -> None:
        """Says nothing."""

    def do_GET(self) -> None:
        self._answer({"id": "me/model", "siblings": [], "sha": "0" * 40}, 401 if self.server.refuses else 200)

    def do_PUT(self) -> None:
        self.server.stored[self.path.rpartition("/")[2]] = self._body()
        self._answer({})

    def do_POST(self) -> None:
        self.server.tokens.add(self.headers.get("Authorization", ""))
        body = self._body()
        if self.server.refuses:
            self._answer({"error": "no"}, 401)
        elif self.path == "/api/repos/create":
            self._answer({"url": f"{self.server.url}/me/model", "name": "me/model", "id": "me/model"})
        elif "/preupload/" in self.path:
            files = [{**item, "uploadMode": "regular", "shouldIgnore": False} for item in json.loads(body)["files"]]
            self._answer({"files": files})
        elif "/commit/" in self.path:
            self.server.commits.append(_read_commit(self.path, body))
            self._answer(
                {"commitUrl": f"{self.server.url}/me/model/commit/{0:040}", "commitOid": "0" * 40, "success": True}
            )
        else:
            self._answer({"errors": [], "warnings": []})

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = b""
            while size := int(self.rfile.readline(), 16):
                parts += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return parts
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _answer(self, content: Any, code: int = 200) -> None:
        body = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _read_commit(path: str, body: bytes) -> tuple[str, str, dict[str, bytes]]:
    lines = [json.loads(line) for line in body.splitlines()]
    files = {
        item["value"]["path"]: base64.b64decode(item["value"]["content"]) for item in lines if item["key"] == "file"
    }
    message = next(item["value"]["summary"] for item in lines if item["key"] == "header")
    return path.removeprefix("/api/models/").partition("/commit/")[0], message, files


@contextmanager
def running_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """Lets huggingface_hub upload to a hub on this machine, with a token."""
    server = FakeHub()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_hunter2")
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
