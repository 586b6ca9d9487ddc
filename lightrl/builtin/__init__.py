"""What a fresh installation trains with no download: a task of sums and a small model that half knows it."""

from lightrl.builtin.model import builtin_model_path, builtin_tokenizer, tiny_model
from lightrl.builtin.task import heldout_problems, train_problems

__all__ = ["builtin_model_path", "builtin_tokenizer", "heldout_problems", "tiny_model", "train_problems"]
