"""A reward that a service computes: --reward examples/http_reward.py:Verifier"""

from __future__ import annotations

import asyncio

import httpx

from lightrl import Sample


class Verifier:
    """Asks the service for the score of a response, and again if a request fails."""

    def __init__(self, *, url: str = "http://127.0.0.1:8000/score", tries: int = 4, wait_s: float = 0.5) -> None:
        self.url, self.tries, self.wait_s = url, tries, wait_s
        self.client = httpx.AsyncClient(timeout=20)  # for the whole run, whose calls share one event loop

    async def __call__(self, sample: Sample) -> float:
        """Returns the score; raises the error of the last request, which --max_reward_failures may tolerate."""
        question = {"response": sample.text, "answer": sample.prompt.answer}
        attempt = 1
        while True:
            try:
                reply = await self.client.post(self.url, json=question)
                return float(reply.raise_for_status().json()["score"])
            except httpx.HTTPError as error:
                status = error.response.status_code if isinstance(error, httpx.HTTPStatusError) else 503
                if attempt >= self.tries or (status < 500 and status != 429):  # such as 401, which stays
                    raise
            await asyncio.sleep(self.wait_s * 2**attempt)
            attempt += 1
