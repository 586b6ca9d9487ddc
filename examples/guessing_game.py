"""An environment in thirty lines: guess a number from 1 to 7 within four turns.

    torchrun --nproc_per_node 2 scripts/train_grpo.py --config configs/guessing_game.yaml

The environment answers "+" if the number is larger and "=" if it is smaller.
"""

from lightrl.records import Prompt


class GuessingGame:
    """One game; `data` is the line of the data set, whose answer is the secret number."""

    def reset(self, data: Prompt) -> str:
        """Begins a game. There is no observation before the first guess."""
        self.secret = int(data.answer)
        return ""

    def step(self, action: str) -> tuple[str, float, bool]:
        """Takes a guess; returns (observation, reward, whether the game is over)."""
        if action == str(self.secret):
            return "", 1.0, True
        is_too_small = action.isdigit() and int(action) < self.secret
        return "+" if is_too_small else "=", 0.0, False
