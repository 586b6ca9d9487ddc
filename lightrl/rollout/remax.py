"""ReMax as a workflow (arXiv:2310.10505): subtracts the reward of the likeliest response from that of each sample."""

from __future__ import annotations

from lightrl.records import Prompt
from lightrl.rollout.client import EngineClient
from lightrl.rollout.episode import Episode
from lightrl.rollout.workflow import Workflow


class ReMaxWorkflow(Workflow):
    """Samples one turn for each sample, and generates the likeliest turn once for all samples of a prompt.

    The reward of a sample is its --reward minus that of the likeliest turn. Use it with `--algorithm.advantage
    reinforce`.
    """

    async def arun_episode(self, engine: EngineClient, data: Prompt) -> Episode:
        """Samples a turn, and subtracts the baseline of the prompt from its reward."""
        episode = Episode(data.token_ids)
        episode.say(await engine.generate(episode.ids))
        reward = await engine.reward(episode)
        baseline = await engine.once("baseline", lambda shared: _greedy_reward(shared, data))
        episode.reward = reward - baseline
        episode.count("sampled_reward", reward)
        episode.count("greedy_reward", baseline)
        return episode


async def _greedy_reward(engine: EngineClient, data: Prompt) -> float:
    likeliest = Episode(data.token_ids)
    likeliest.say(await engine.generate(likeliest.ids, temperature=0.0), trained=False)
    return await engine.reward(likeliest, alone=True)
