"""Loads the teacher of a distillation, a frozen policy that scores another policy's tokens."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from lightrl.models.option_names import naming
from lightrl.models.policy import Policy, check_model_folder, load_config, load_policy, load_tokenizer


def load_teacher(
    path: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    vocab_size: int,
    materialize: bool,
    trust_remote_code: bool = False,
) -> Policy:
    """Loads a frozen model that scores another model's tokens, and therefore must have the same tokenizer.

    Args:
        tokenizer: the tokenizer of the model whose tokens are scored.
        vocab_size: the number of tokens that the scored model can write; it may differ from the tokenizer's.
        materialize: as for load_policy().
    """
    check_model_folder(path, "--teacher_model")
    with naming("--teacher_model"):
        theirs = load_tokenizer(path, trust_remote_code=trust_remote_code).get_vocab()
    ours = tokenizer.get_vocab()
    if theirs != ours:
        different = sorted(set(theirs.items()) ^ set(ours.items()))
        raise ValueError(
            f"--teacher_model {path} has another tokenizer than --model: {len(different)} entries differ, such as "
            f"{different[0]}. It judges the policy's tokens by their ids: choose a teacher of the same family."
        )
    with naming("--teacher_model"):
        known = load_config(path, trust_remote_code=trust_remote_code).get_text_config().vocab_size
        if known < (needed := min(vocab_size, max(ours.values()) + 1)):
            raise ValueError(
                f"--teacher_model {path} has {known} tokens (vocab_size), but --model may write {needed}: the teacher "
                f"cannot score the rest. Choose a teacher with at least {needed}."
            )
        return load_policy(path, materialize=materialize, trust_remote_code=trust_remote_code, is_reference=True)
