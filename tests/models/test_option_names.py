"""tests/trainers/test_wrong_inputs.py has a table of damaged models."""

import pytest

from lightrl.models.option_names import naming


def test_only_what_blames_the_model_is_told_of_another_option() -> None:
    with pytest.raises(FileNotFoundError, match=r"^--critic_model ./a is not --model ./b$"), naming("--critic_model"):
        raise FileNotFoundError("--model ./a is not --model ./b")
    with pytest.raises(ValueError, match=r"^about --model$"), naming("--critic_model"):
        raise ValueError("about --model")
    with pytest.raises(UnicodeDecodeError), naming("--critic_model"):
        b"\xff".decode()
    with pytest.raises(TypeError, match=r"^--model "), naming("--critic_model"):
        raise TypeError("--model is of a wrong type")
