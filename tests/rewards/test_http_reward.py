"""examples/http_reward.py: an async reward of the user's that asks a service."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from made_samples import made_sample

from lightrl.records import Prompt, Sample
from lightrl.rewards import RewardError, load_reward
from lightrl.rewards.reward_set import make_runner
from lightrl.rewards.scoring import FailureBudget, ScoringLimits

FILE = Path(__file__).resolve().parents[2] / "examples/http_reward.py"


class Service(ThreadingHTTPServer):
    """Refuses the first request about each response, or every one about "bad"; scores by equality."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Service

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        is_refused = body["response"] not in self.server.asked or body["response"] == "bad"
        self.server.asked.append(body["response"])
        self.send_response(401 if body["response"] == "secret" else 503 if is_refused else 200)
        self.end_headers()
        if not is_refused:
            self.wfile.write(json.dumps({"score": float(body["response"] == body["answer"])}).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def service() -> Iterator[Service]:
    service = Service()
    threading.Thread(target=service.serve_forever, daemon=True).start()
    yield service
    service.shutdown()
    service.server_close()


def response(text: str) -> Sample:
    return made_sample(prompt=Prompt(index=0, text="6x7=", token_ids=(1,), answer="42"), text=text)


def test_a_refused_request_is_sent_again_and_one_client_serves_all_calls(service: Service) -> None:
    reward = load_reward(f"{FILE}:Verifier", {"url": service.url, "wait_s": 0.001})
    runner = make_runner(reward, ScoringLimits(timeout_s=20), name="verifier")
    try:
        first = runner.run([response("42"), response("41")], FailureBudget(0))
        second = runner.run([response("40")], FailureBudget(0))  # of the next step
        assert [*first, *second] == [1.0, 0.0, 0.0]
        assert sorted(service.asked) == ["40", "40", "41", "41", "42", "42"]
        with pytest.raises(RewardError, match="HTTPStatusError: .*503"):
            runner.run([response("bad")], FailureBudget(0))
        assert service.asked.count("bad") == 4
        with pytest.raises(RewardError, match="HTTPStatusError: .*401"):
            runner.run([response("secret")], FailureBudget(0))
        assert service.asked.count("secret") == 1  # the next answer would be the same
    finally:
        runner.close()
