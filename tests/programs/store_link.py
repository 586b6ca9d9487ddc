"""A link to rollout ranks whose values are in a dictionary, for tests of what a step takes."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from made_samples import made_sample

from lightrl.records import Prompt, ScoredGroup, Status
from lightrl.rollout.sample_messages import to_bytes
from lightrl.rollout.saved_groups import group_state

PROMPT = Prompt(index=0, text="", token_ids=(1,))


class StoreLink:
    """A link whose other end starts and finishes groups when it is told."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.posted: list[Any] = []
        self.num_claimed = self.num_finished = 0

    def start(self, version: int) -> None:
        self.values[f"start/{self.num_claimed}"] = str(version).encode()
        self.num_claimed += 1

    def finish(
        self,
        number: int,
        version: int,
        rewards: tuple[float, ...] = (1.0,),
        *,
        statuses: Sequence[Status] = (Status.COMPLETED,),
        statistics: Mapping[str, tuple[str, float, float]] | None = None,
        failure: str = "",
    ) -> None:
        """Finishes a group of one-token samples, which take turns in the statuses; failed episodes report `failure`."""
        samples = tuple(
            made_sample(
                prompt=PROMPT,
                sample_index=index,
                response_ids=(7,),
                sampler_logprobs=(-0.1,),
                versions=(version,),
                ticket=number,
                start_version=version,
                status=statuses[index % len(statuses)],
            )
            for index in range(len(rewards))
        )
        message = {
            "groups": [group_state(ScoredGroup(samples=samples, rewards=rewards, step=0))],
            "statistics": statistics or {},
            "calls": [[[[version, 1]]] for _ in rewards],
            "failure": failure,
        }
        self.values[f"group/{number}"] = to_bytes(message)
        self.values[f"finish/{self.num_finished}"] = str(number).encode()
        self.num_finished += 1

    def put(self, key: str, content: bytes) -> None:
        assert key in ("claims", "continued")  # where the run begins

    def claimed(self, key: str) -> int:
        return self.num_claimed

    def count(self, key: str, add: int = 0) -> int:
        return self.num_finished

    def has(self, key: str) -> bool:
        return key in self.values

    def peek(self, key: str) -> bytes:
        return self.values[key]

    def take(self, key: str) -> bytes:
        return self.values.pop(key)

    def post(self, command: Any) -> None:
        self.posted.append(command)

    def wait(self, is_done: Callable[[], bool], what: str) -> None:
        assert is_done()

    def require_others(self) -> None:
        pass


class EagerLink(StoreLink):
    """A link whose other end finishes a group as soon as it may start one: within `limit` and what was dropped."""

    def __init__(
        self, rewards: Sequence[tuple[float, ...]], limit: int, statuses: Sequence[Status] = (Status.COMPLETED,)
    ) -> None:
        super().__init__()
        self._rewards, self._limit, self._statuses = rewards, limit, statuses
        self.version = 0

    def allowed(self) -> int:
        """How many groups the other end may start."""
        return self._limit + sum(len(command["numbers"]) for command in self.posted if command["do"] == "drop")

    def go_on(self) -> None:
        while self.num_claimed < min(self.allowed(), len(self._rewards)):
            number, rewards = self.num_claimed, self._rewards[self.num_claimed]
            self.start(self.version)
            statistics = {"reward/mean": ("mean", sum(rewards), float(len(rewards)))}
            failure = {"statuses": self._statuses, "failure": "on fire"}
            self.finish(number, self.version, rewards, statistics=statistics, **failure)

    def wait(self, is_done: Callable[[], bool], what: str) -> None:
        for _ in range(100):
            self.go_on()
            if is_done():
                return
        raise AssertionError(f"waited for {what}")
