"""Keeps a tokenizer as its tokenizer.json describes it, where transformers builds another one for its class."""

from __future__ import annotations

import logging
import os
from functools import partial

from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast, __version__

from lightrl.models.hub import file_of

logger = logging.getLogger(__name__)

# Words, contractions, numbers, code, line breaks, runs of spaces, and letters beyond ASCII. It neither begins with a
# space nor names a special token: there, releases of transformers differ for models that were trained with either.
_PROBE = (
    "Hello world. I'm 27, isn't it?\n\nIn 2023: 650841823 + 1e-5 != x_1[3.14];\n"
    "\tif a:\n        b  # na\u00efve \u65e5\u672c"
)
# A response is read as the model wrote it: the files of some models ask to remove spaces before punctuation. And of a
# model of Mistral's, tokenizer.json is read although the package mistral-common, which comes with vLLM, would read
# tekken.json: it makes a tokenizer that has no chat template and cannot be saved.
read_tokenizer = partial(AutoTokenizer.from_pretrained, clean_up_tokenization_spaces=False, mistral_format=False)
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")


def as_in_file(tokenizer: PreTrainedTokenizerBase, path: str) -> PreTrainedTokenizerBase:
    """Returns the tokenizer, or the one of its tokenizer.json if that cuts text into other tokens.

    Classes such as LlamaTokenizer, Qwen2Tokenizer and GPT2Tokenizer take only vocabulary and merges from the file since
    transformers 5. Many models name one of them and have another way to split text, such as the distillations of
    DeepSeek-R1 into Llama, whose spaces are lost then: https://github.com/huggingface/transformers/issues/45488
    """
    is_rebuilt = isinstance(tokenizer, PreTrainedTokenizerFast) and type(tokenizer).__module__.startswith(
        "transformers."
    )
    file = file_of(path, "tokenizer.json") if is_rebuilt else None
    if file is None:
        return tokenizer
    in_file = Tokenizer.from_file(file)
    in_file.no_truncation()
    in_file.no_padding()
    if in_file.encode(_PROBE, add_special_tokens=False).ids == tokenizer(_PROBE, add_special_tokens=False)["input_ids"]:
        return tokenizer
    plain: PreTrainedTokenizerBase = PreTrainedTokenizerFast.from_pretrained(path, clean_up_tokenization_spaces=False)
    for name in _SPECIAL:  # a class may know some that no file names
        default = getattr(tokenizer, name)
        if getattr(plain, name) is None and default in plain.get_vocab():
            setattr(plain, name, default)
    if os.environ.get("RANK", "0") == "0":
        logger.warning(
            "%s: transformers %s loads its tokenizer as a %s, which cuts text into other tokens than its "
            "tokenizer.json. The tokens of the file are used, and final/ keeps them.",
            *(path, __version__, type(tokenizer).__name__),
        )
    return plain
