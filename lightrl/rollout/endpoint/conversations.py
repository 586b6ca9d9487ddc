"""Arranges the calls of one agent as a forest: which call continues which, and the episodes that they form.

A call continues another one if its prompt begins with the other's prompt and answer, token by token and with the same
images. If several calls continue the same one, the call with the most turns after it continues the sample. The others
are forks: separate samples, whose prompt is everything before them. So each token that the engine produced is trained
on exactly once.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from lightrl.records import FinishReason
from lightrl.rollout.episode import Episode, Turn
from lightrl.rollout.observations import SeenIds, images_of, joined, rest


@dataclass(slots=True, eq=False)
class Call:
    """A prompt, and the policy's answer to it."""

    prompt_ids: tuple[int, ...]  # SeenIds if it has images besides those of the run's own prompt
    turn: Turn
    parent: Call | None = None
    limit: FinishReason | None = None  # that a request which continues this call was refused for
    depth: int = 1  # number of the policy's turns up to and including this one
    children: list[Call] = field(default_factory=list)

    @property
    def ids(self) -> SeenIds:
        """The tokens with which a call that continues this one begins."""
        return joined(self.prompt_ids, self.turn.token_ids)


class Conversations:
    """Records the calls of one agent, and recognises calls that continue an earlier one."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._by_history: dict[Hashable, Call] = {}  # the newest call that ended with these messages

    def record(self, prompt_ids: Sequence[int], turn: Turn, *, parent: Call | None = None) -> Call:
        """Adds a call; `parent` is the call that it continues, if the caller knows it."""
        prompt = joined(prompt_ids)
        if parent is None or not _begins_with(prompt, parent):
            parent = self.extended_by(prompt)
        call = Call(prompt, turn, parent, depth=1 if parent is None else parent.depth + 1)
        if parent is not None:
            parent.children.append(call)
        self.calls.append(call)
        return call

    def remember(self, call: Call, histories: Sequence[Hashable]) -> None:
        """Registers a call under the messages up to and including its answer."""
        for history in histories:
            self._by_history[history] = call

    def recall(self, history: Hashable) -> Call | None:
        """Returns the newest call whose answer ended these messages."""
        return self._by_history.get(history)

    def extended_by(self, prompt_ids: tuple[int, ...]) -> Call | None:
        """Returns the longest call that the prompt continues; if several are equal, the newest without a successor."""
        found = [call for call in self.calls if _begins_with(prompt_ids, call)]
        if not found:
            return None
        longest = max(len(call.ids) for call in found)
        found = [call for call in found if len(call.ids) == longest]
        return next((call for call in reversed(found) if not call.children), found[-1])

    def episodes(self) -> list[Episode]:
        """Returns the samples, beginning with the one that has the most turns (the newest of several equal ones)."""
        lengths = self._turns_below()
        continued = {
            id(max(reversed(call.children), key=lambda child: lengths[id(child)]))
            for call in self.calls
            if call.children
        }
        starts = [call for call in self.calls if id(call) not in continued]
        if not starts:
            return []
        main = max(reversed([call for call in starts if call.parent is None]), key=lambda call: lengths[id(call)])
        ordered = [main, *(call for call in starts if call is not main)]
        return [_episode(_line(call, continued)) for call in ordered]

    def _turns_below(self) -> dict[int, int]:
        """Returns for each call the largest number of turns of a conversation that begins with it."""
        lengths: dict[int, int] = {}
        for call in reversed(self.calls):  # a call is recorded after the one that it continues
            lengths[id(call)] = 1 + max((lengths[id(child)] for child in call.children), default=0)
        return lengths


def _begins_with(prompt_ids: tuple[int, ...], call: Call) -> bool:
    length, num_prompt = len(call.prompt_ids) + len(call.turn.token_ids), len(call.prompt_ids)
    return (
        len(prompt_ids) >= length
        and prompt_ids[num_prompt:length] == call.turn.token_ids
        and prompt_ids[:num_prompt] == call.prompt_ids
        and _shows_the_same(prompt_ids, call)
    )


def _shows_the_same(prompt_ids: tuple[int, ...], call: Call) -> bool:
    """Returns whether a prompt that begins with the tokens of a call also has its images, and new ones only behind."""
    seen = images_of(call.prompt_ids)
    added = rest(prompt_ids, len(call.ids), len(seen))
    is_behind = not added.images or added.count(added.images[0].token_id) == len(added.images)
    return is_behind and images_of(prompt_ids)[: len(seen)] == seen


def _line(first: Call, continued: set[int]) -> list[Call]:
    """Returns the call and the calls that continue its sample."""
    line = [first]
    while following := [child for child in line[-1].children if id(child) in continued]:
        line += following
    return line


def _episode(line: Sequence[Call]) -> Episode:
    episode = Episode(line[0].prompt_ids)
    for call in line:
        num_before = len(episode.prompt_ids) + len(episode.response_ids)
        episode.hear(rest(call.prompt_ids, num_before, len(episode.images)))
        episode.say(call.turn)
    if line[-1].limit == "turns":
        episode.end_at_max_turns()
    elif line[-1].limit:
        episode.finish_reason = line[-1].limit
    return episode
