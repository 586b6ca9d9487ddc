"""Self-play in fifteen lines: an answer earns its reward minus that of an earlier adapter's answer.

    lightrl train grpo --lora.rank 8 --lr 1e-3 --lora.engine unmerged --max_steps 20
    lightrl train grpo --lora.rank 8 --lr 1e-3 --lora.engine unmerged --reward episode \
        --lora.others opponent=runs/grpo-1/final/adapter --rollout.workflow examples.self_play:BeatTheOpponent

One engine generates for both, and steps them together. Only the policy's tokens are trained.
"""

import asyncio

from lightrl import Episode, Workflow
from lightrl.records import Prompt
from lightrl.rollout.client import EngineClient


class BeatTheOpponent(Workflow):
    """The policy and its opponent answer the same prompt; adapter="base" is the model that both started from."""

    def __init__(self, opponent: str = "opponent") -> None:
        self.opponent = opponent

    async def arun_episode(self, engine: EngineClient, data: Prompt) -> Episode:
        """Plays one round."""
        episode = Episode(data.token_ids)
        own, other = await asyncio.gather(
            engine.generate(episode.ids), engine.generate(episode.ids, adapter=self.opponent)
        )
        episode.say(own)
        own_score, other_score = (float(turn.text.strip() == str(data.answer)) for turn in (own, other))
        episode.reward = own_score - other_score
        episode.count("opponent_right", other_score)
        return episode
