"""An agent that knows nothing of lightrl: it plays the game of guessing_game.py with OpenAI's own client.

pip install 'lightrl[serve]' openai
torchrun --nproc_per_node 2 scripts/train_grpo.py --config configs/openai_agent.yaml
"""

from typing import Any

from openai import AsyncOpenAI

CLIENT = AsyncOpenAI(api_key="none")  # one for all episodes: a client takes longer to build than a turn


async def play(data: Any, base_url: str, api_key: str, model: str) -> float:
    """Guesses the secret number of `data`, a line of the data set, within four turns; returns the reward."""
    secret = int(data.answer)
    messages: list[Any] = [{"role": "user", "content": "="}]
    client = CLIENT.with_options(base_url=base_url, api_key=api_key)
    for _ in range(4):
        answer = await client.chat.completions.create(model=model, messages=messages)
        guess = answer.choices[0].message.content or ""
        if guess == str(secret):
            return 1.0
        hint = "+" if guess.isdigit() and int(guess) < secret else "="
        messages += [{"role": "assistant", "content": guess}, {"role": "user", "content": hint}]
    return 0.0
