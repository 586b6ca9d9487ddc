"""Workflow: makes the episode of one sample, with any Python code between the policy's turns (--rollout.workflow)."""

from __future__ import annotations

import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from lightrl.config import WorkflowConfig, declared_type, fits, named_values
from lightrl.data.json_records import LocatedRecord
from lightrl.imports import load_object, require_call
from lightrl.models.chat_text import tools_of
from lightrl.records import Prompt
from lightrl.rewards.time_limit import time_limit
from lightrl.rollout.client import EngineClient
from lightrl.rollout.episode import Episode, shown
from lightrl.rollout.event_loop import awaited_in_time, run_to_its_end
from lightrl.rollout.observations import as_messages, content_of, parts_of

logger = logging.getLogger(__name__)

_CLOSING_S = 30.0  # time limit of an environment's close()

BUILTIN_WORKFLOWS = {
    "environment": "lightrl.rollout.workflow:EnvironmentWorkflow",
    "multi_turn": "lightrl.rollout.multi_turn:MultiTurnWorkflow",
    "remax": "lightrl.rollout.remax:ReMaxWorkflow",
    "tools": "lightrl.rollout.tools:ToolWorkflow",
    "agent": "lightrl.rollout.endpoint.agent:AgentWorkflow",
    "verifiers": "lightrl.rollout.endpoint.verifiers_environment:VerifiersWorkflow",
    "serve": "lightrl.rollout.endpoint.outside:ServeWorkflow",
}
BUILTIN_ENVIRONMENTS = {"openenv": "lightrl.rollout.openenv:OpenEnvEnvironment"}


class Workflow(ABC):
    """Makes the episodes of a run. One object serves all of them, so it must not store the state of an episode.

    No method may call a collective, because each rank runs its own episodes, in any order.
    """

    def check(self, tokenizer: Any) -> None:
        """Raises ValueError if the episodes cannot be made with this tokenizer; called before weights are loaded."""

    def with_tools(self, records: Sequence[LocatedRecord]) -> Sequence[LocatedRecord]:
        """Returns the data of a vision-language model with the tools that its prompts describe.

        Prompts with images are rendered once, when the run starts; an episode cannot render them again.
        """
        return records

    @abstractmethod
    async def arun_episode(
        self, engine: EngineClient, data: Prompt
    ) -> Episode | Sequence[Episode] | Mapping[str, Any] | None:
        """Makes one sample for a prompt.

        Returns an Episode; or a list of several, the conversations of one agent, whose first holds the reward of all;
        or a dict of tensors of shape [1, L] (input_ids, loss_mask and others) with rewards of shape [1]; or None to
        reject the sample, which is then counted and left out of its group. An exception makes the sample fail.
        """


@runtime_checkable
class Environment(Protocol):
    """What a policy acts on; each episode gets a new one. Its methods may be async. close(), if defined, ends it."""

    def reset(self, data: Prompt) -> Any:
        """Begins the episode; returns a text or image to add to the prompt, messages to add to its own, or nothing."""
        ...

    def step(self, action: str) -> Any:
        """Carries out the policy's action; returns (observation, reward, whether the episode is over).

        An observation is a text or an image, which becomes the message of a user, or a list of messages.
        """
        ...


class EnvironmentWorkflow(Workflow):
    """Lets the policy and an environment take turns. The reward of the episode is the sum of the steps' rewards."""

    def __init__(self, *, environment: str, **arguments: Any) -> None:
        """Takes openenv, package.module:Class or path/to/file.py:Class; other arguments go to the constructor."""
        self._make = load_object(environment, builtin=BUILTIN_ENVIRONMENTS, what="environment", example="MyEnvironment")
        check_arguments(f"environment {environment!r}", self._make, arguments)
        self._arguments = arguments
        self._has_shown_close_error = False
        trial = self._new_environment()  # a wrong argument shows here, before anything expensive
        kind = f"The environment's {type(trial).__name__}"
        require_call(f"{kind}.reset", trial.reset, "data")
        require_call(f"{kind}.step", trial.step, "action")
        try:
            run_to_its_end(_closed(trial))
        except Exception:  # it may not expect to be closed before reset()
            logger.warning("The environment that tried the arguments cannot be closed.", exc_info=True)

    def _new_environment(self) -> Any:
        made = self._make(**self._arguments)
        if not isinstance(made, Environment):
            raise ValueError(f"The environment {self._make!r} has no reset(data) and step(action).")
        return made

    async def arun_episode(self, engine: EngineClient, data: Prompt) -> Episode:
        """Alternates turns and observations until the environment, max_turns or the context ends the episode."""
        environment, episode = self._new_environment(), None
        try:
            opening = await _awaited(environment.reset(data))
            episode = _begun(engine, data, opening)
            await self._play(engine, environment, episode)
            return episode
        finally:
            await self._close(environment, episode)

    async def _close(self, environment: Any, episode: Episode | None) -> None:
        """Closes the environment. An error or time-out of close() is counted and logged, and changes no episode."""
        try:
            await _closed(environment)
        except Exception:
            if episode is not None:
                episode.count("close_errors")
            if not self._has_shown_close_error:
                self._has_shown_close_error = True
                logger.warning(
                    "The environment %s could not be closed within %g s, and may keep what it uses, such as memory or "
                    "processes. episode/close_errors counts such episodes.",
                    *(type(environment).__name__, _CLOSING_S),
                    exc_info=True,
                )

    async def _play(self, engine: EngineClient, environment: Any, episode: Episode) -> None:
        episode.reward = 0.0
        for num_turns in range(1, engine.limits.max_turns + 1):
            turn = await engine.generate(episode.ids)
            episode.say(turn)
            observation, reward, is_over = _step_of(await _awaited(environment.step(turn.text)))
            episode.earn(reward)
            if is_over:
                episode.finish_reason = "stop"  # even if the last turn was cut off, because nothing follows
                return
            heard = engine.encode_messages(_require_messages(observation, "step(action)"), after=turn)
            if num_turns == engine.limits.max_turns:
                episode.end_at_max_turns()
            elif engine.room(episode.ids, heard) < 1:
                episode.finish_reason = "context"
                return
            else:
                episode.hear(heard)


def _begun(engine: EngineClient, data: Prompt, opening: Any) -> Episode:
    """Returns an episode that has heard the first observation: a text, or messages after those of the prompt."""
    parts = parts_of(opening)
    if parts is None and _is_array(opening):
        raise _no_observation(opening, "reset(data)")
    if parts is not None and not isinstance(opening, Mapping):
        opening = content_of(parts)
        if not isinstance(opening, str):
            return Episode(engine.encode_prompt(_with_parts(data, parts), tools=tools_of(data.fields)))
    if opening and not isinstance(opening, str):
        _require_no_media(data)
        asked = [*data.messages, *_require_messages(opening, "reset(data)")]
        return Episode(engine.encode_prompt(asked, tools=tools_of(data.fields)))
    if opening and _is_rendered(data):
        *earlier, last = data.messages
        if last["role"] == "user":
            asked = [*earlier, {**last, "content": f"{last['content']}{opening}"}]
        else:  # instructions of the system, for example, which the environment's words are no part of
            asked = [*data.messages, {"role": "user", "content": opening}]
        return Episode(engine.encode_prompt(asked, tools=tools_of(data.fields)))
    episode = Episode(data.token_ids)
    if opening:
        episode.hear(engine.encode(opening))
    return episode


def _with_parts(data: Prompt, parts: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns the prompt's messages with the parts at the end of the last one, or after it if it is not the user's."""
    _require_no_media(data)
    *earlier, last = data.messages
    if data.text == last["content"]:
        raise ValueError("The environment's reset(data) shows an image: let a chat template render the prompts.")
    if last["role"] != "user":
        return [*data.messages, {"role": "user", "content": parts}]
    said = last["content"]
    before = [{"type": "text", "text": said}] if isinstance(said, str) else said
    return [*earlier, {**last, "content": [*before, *parts]}]


def _require_no_media(data: Prompt) -> None:
    """Raises ValueError for a prompt that cannot be rendered again with an environment's first observation."""
    if data.images or data.videos:
        raise ValueError(
            "The prompt has images or videos of its own, so that reset(data) can only add a text to it. Show other "
            "images by step(action), or leave those of the data out and let reset(data) show all."
        )


def _is_rendered(data: Prompt) -> bool:
    """Returns whether a chat template wrote the prompt and its end, after which the policy's answer begins."""
    last = data.messages[-1]["content"] if data.messages else None
    return isinstance(last, str) and data.text != last and not (data.images or data.videos)


def _step_of(result: Any) -> tuple[Any, float, Any]:
    try:
        observation, reward, is_over = result
        if isinstance(reward, str | bytes) or isinstance(is_over, str | bytes | Mapping | None):  # None or an info dict
            raise TypeError
        return observation, float(reward), is_over
    except (TypeError, ValueError, RuntimeError):  # the last of a tensor of several numbers
        raise ValueError(
            f"The environment's step(action) returned {shown(result)}. It must return (observation, reward, whether "
            "the episode is over): what the policy reads, a number and a bool."
        ) from None


def _require_messages(observation: Any, source: str) -> Sequence[Mapping[str, Any]]:
    """Returns the messages; raises ValueError for anything else, such as the (observation, info) of gymnasium."""
    if (messages := as_messages(observation)) is not None:
        return messages
    raise _no_observation(observation, source)


def _no_observation(given: Any, source: str) -> ValueError:
    what = f"an array, {list(given.shape)} {given.dtype}" if _is_array(given) else shown(given)
    return ValueError(
        f"The environment's {source} gave the observation {what}. It must be a text, an image of PIL or as an array, "
        "[height, width, 3] uint8, or a list of messages."
    )


def _is_array(value: Any) -> bool:
    return hasattr(value, "dtype") and hasattr(value, "shape") and not isinstance(value, str)  # also a tensor


async def _closed(environment: Any) -> None:
    if hasattr(environment, "close"):
        with time_limit(_CLOSING_S):
            closing = environment.close()
        with awaited_in_time(_CLOSING_S):
            await _awaited(closing)


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def load_workflow(config: WorkflowConfig) -> Workflow:
    """Builds the workflow that the options name; a wrong name or argument raises ValueError."""
    found = load_object(config.workflow, builtin=BUILTIN_WORKFLOWS, what="workflow", example="MyWorkflow")
    if not inspect.isclass(found) or not issubclass(found, Workflow):
        raise ValueError(
            f"The workflow {config.workflow!r} is no subclass of lightrl.Workflow: write a class with "
            "`async def arun_episode(self, engine, data)`."
        )
    if inspect.isabstract(found):
        raise ValueError(f"The workflow {config.workflow!r} does not implement arun_episode(engine, data).")
    if not inspect.iscoroutinefunction(inspect.unwrap(found.arun_episode)):
        raise ValueError(
            f"arun_episode of the workflow {config.workflow!r} is not async: write `async def arun_episode`."
        )
    arguments = named_values(config.workflow_args, "rollout.workflow_args")
    check_arguments(f"workflow {config.workflow!r}", found, arguments)
    workflow = found(**arguments)
    require_call(f"The workflow's {found.__name__}.arun_episode", workflow.arun_episode, "engine", "data")
    return workflow


def check_arguments(what: str, made: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Raises ValueError if --rollout.workflow_args do not fit the parameters of what they are for."""
    if not callable(made):
        raise ValueError(f"The {what} is a {type(made).__name__}: name a class, or a function that makes its object.")
    try:
        signature = inspect.signature(made)
    except ValueError:  # classes of compiled modules may have none
        return
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise ValueError(f"--rollout.workflow_args: the {what} cannot be built: {error}.") from error
    check_types(signature, arguments)
    if getattr(made, "__module__", "").startswith("lightrl."):  # others may take a number for a text
        _check_texts(signature, arguments)


def check_types(signature: inspect.Signature, arguments: Mapping[str, Any]) -> None:
    """Raises ValueError if one of --rollout.workflow_args does not have the type that its parameter declares."""
    for key, value in arguments.items():
        declared = declared_type(signature.parameters[key].annotation) if key in signature.parameters else ""
        if not fits(declared, value) and value is not None:
            raise ValueError(f"--rollout.workflow_args: {key} is {value!r}, and it must be {declared}.")


def _check_texts(signature: inspect.Signature, arguments: Mapping[str, Any]) -> None:
    """Raises ValueError for a value that YAML does not read as a text where one is needed, or where nothing stands."""
    for key, value in arguments.items():
        parameter = signature.parameters.get(key)
        if parameter is None or (value is None and parameter.default in ("", (), None)):
            continue
        wanted = _TEXTS.get(parameter.annotation, "")
        texts = value if isinstance(value, list) and "list" in wanted else [value]
        if wanted and not all(isinstance(text, str) for text in texts):
            hint = "; quotes keep it one, as in " + f"{key}='\"...\"'" if isinstance(value, int | float) else ""
            raise ValueError(f"--rollout.workflow_args: {key} is {value!r}, and it must be {wanted}{hint}.")
        if value is None:
            raise ValueError(f"--rollout.workflow_args: {key} has no value.")


_TEXTS = {"str": "a text", "str | Sequence[str]": "a text or a list of texts"}  # by annotation
