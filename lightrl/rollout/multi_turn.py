"""A conversation with a simulated user: the built-in one asks for another try until the answer is right."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightrl.data.prompts import tokenize
from lightrl.imports import load_object, place_of
from lightrl.records import Prompt
from lightrl.rollout.client import EngineClient
from lightrl.rollout.episode import Episode, Turn, shown
from lightrl.rollout.observations import as_messages
from lightrl.rollout.workflow import Workflow, check_arguments


class MultiTurnWorkflow(Workflow):
    """Answers each turn of the policy until the user has nothing to say or a limit ends the episode.

    Without a user of your own, a wrong answer is answered with `feedback`. The reward is --reward for the last turn, or
    with a user of your own for everything that was said, times `discount` for each turn after the first.
    """

    def __init__(
        self,
        *,
        user: str = "",
        feedback: str = "That is not right. Try again.",
        solved_at: float = 1.0,
        discount: float = 1.0,
        **arguments: Any,
    ) -> None:
        """Loads the user.

        Args:
            user: Your own user, a class or function as package.module:NAME or path/to/file.py:NAME.
            feedback: The reply to a wrong answer, without a user of your own.
            solved_at: The smallest reward of an answer that counts as right.
            discount: The factor by which each further turn multiplies the reward.
            arguments: Arguments of the user's constructor.
        """
        if not 0 < discount <= 1:
            raise ValueError(f"discount is {discount}: it must be above 0 and at most 1.")
        if arguments and not user:
            raise ValueError(f"{', '.join(sorted(arguments))}: arguments of a user, and there is no user=... .")
        self._user = load_object(user, builtin={}, what="user", example="MyUser") if user else None
        if inspect.isclass(self._user):
            check_arguments(f"user {user!r}", self._user, arguments)
        elif user and arguments:
            raise ValueError(
                f"{', '.join(sorted(arguments))}: the user {user!r} takes no arguments, as it is no class."
            )
        self._arguments = arguments
        self._feedback, self._solved_at, self._discount = feedback, solved_at, discount
        self._new_user()  # a wrong argument shows here, before anything expensive

    def check(self, tokenizer: Any) -> None:
        """Raises ValueError for feedback that the tokenizer has no tokens for."""
        if self._user is None:
            tokenize(self._feedback, tokenizer, "--rollout.workflow_args feedback", is_raw=False)

    async def arun_episode(self, engine: EngineClient, data: Prompt) -> Episode:
        """Alternates turns of the policy and the user; see the class for the reward."""
        user, episode = self._new_user(), Episode(data.token_ids)
        reward = 0.0
        for num_turns in range(1, engine.limits.max_turns + 1):
            turn = await engine.generate(episode.ids)
            episode.say(turn)
            reply: Sequence[Mapping[str, Any]] | None = as_messages(self._feedback)
            if user is not None:
                reply = await _asked(user, turn.text, data)
            else:
                reward = await engine.reward(_last_turn(data, episode, turn), alone=True)
            if reply is None or (user is None and reward >= self._solved_at):
                break
            heard = engine.encode_messages(reply, after=turn)
            if num_turns == engine.limits.max_turns:
                episode.end_at_max_turns()
            elif engine.room(episode.ids, heard) < 1:
                episode.finish_reason = "context"
                break
            else:
                episode.hear(heard)
        if user is not None:
            reward = await engine.reward(episode)
        episode.reward = reward * self._discount ** (len(episode.turns) - 1)
        return episode

    def _new_user(self) -> Callable[..., Any] | None:
        """Returns the user of one episode; None for the built-in feedback."""
        if self._user is None:
            return None
        made = self._user(**self._arguments) if inspect.isclass(self._user) else self._user
        if not callable(made):
            raise ValueError(
                f"The user {self._user!r} cannot be called: it takes (answer, data) and returns a text, or None when "
                "the conversation is over. It may be async."
            )
        return made  # type: ignore[no-any-return]


async def _asked(user: Callable[..., Any], answer: str, data: Prompt) -> Sequence[Mapping[str, Any]] | None:
    """Returns the user's reply as messages; raises ValueError for a reply that is no text, image or message."""
    reply = user(answer, data)
    said = await reply if inspect.isawaitable(reply) else reply
    if said is None:
        return None
    if not (messages := as_messages(said)):
        raise ValueError(
            f"The user replied {shown(said)}{place_of(user)}. A reply must be a text, an image or messages, or None "
            "when the conversation is over."
        )
    return messages


def _last_turn(data: Prompt, episode: Episode, turn: Turn) -> Episode:
    """Returns the last turn as an episode of its own, so that a reward reads no earlier answer."""
    before = len(data.token_ids) + episode.turns[-1]
    alone = Episode(episode.ids[:before])
    alone.say(turn)
    return alone
