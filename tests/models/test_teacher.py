"""Teachers: which are refused; test_wrong_inputs.py has damaged folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightrl.builtin.model import builtin_tokenizer, tiny_model
from lightrl.models.teacher import load_teacher


def test_a_teacher_that_lacks_tokens_of_the_tokenizer_is_refused(tmp_path: Path) -> None:
    tokenizer, folder = builtin_tokenizer(), str(tmp_path / "model")
    needed = max(tokenizer.get_vocab().values()) + 1
    model = tiny_model()[0]
    model.resize_token_embeddings(needed - 1)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    with pytest.raises(
        ValueError, match=f"^--teacher_model {folder} has {needed - 1} tokens .vocab_size.*may write {needed}:"
    ):
        load_teacher(folder, tokenizer, vocab_size=needed + 8, materialize=True)
    load_teacher(folder, tokenizer, vocab_size=needed - 1, materialize=True)  # tokens that the policy cannot write
