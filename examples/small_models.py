"""Makes small random models with their own vocabularies, and lessons that warm them up, for the examples on a CPU.

    python examples/small_models.py calculator runs/calculator      # model, lessons.jsonl, train.jsonl, eval.jsonl
    pip install 'lightrl[reasoning-gym]'                            # for the other tasks: model, lessons.jsonl

Most lessons show a wrong answer, so a model that has learned them is right only now and then. The rewards then teach it
what the good lessons have in common.
"""

import argparse
import json
import random
import string
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, set_seed

from lightrl.imports import import_extra

CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
ROLES = ("<user>", "<assistant>", "<tool>")
UNREADABLE = "<unk>"
CALL, CALL_END = '<tool_call>{"name": "calculator", "arguments": {"expression": "', '"}}</tool_call>'


def save_model(folder: Path, characters: str, phrases: tuple[str, ...], *, reads_all: bool = False) -> None:
    """Saves a random model of two layers that reads these characters, and each of the phrases as one token.

    Any other character is an error, or the token <unk> if the model reads_all: a tool may answer anything.
    """
    words = ["<pad>", "<eos>", *characters]
    vocabulary = {word: index for index, word in enumerate([*words, UNREADABLE] if reads_all else words)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=UNREADABLE))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_tokens([AddedToken(phrase, normalized=False) for phrase in (*ROLES, *phrases)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    set_seed(0)
    config = Qwen3Config(
        vocab_size=len(fast),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        initializer_range=0.06,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    fast.save_pretrained(folder)


def gym_problems(task: str, **fields: int):
    """Returns the problems of reasoning-gym that the lessons are about."""
    library = import_extra("reasoning_gym", extra="reasoning-gym", needed_by=f"The task {task}")
    return library.create_dataset(task, size=16_000, seed=1, **fields)


def calculator(folder: Path, draw: random.Random) -> None:
    """Three-digit products: one lesson in five calls the calculator and repeats its result, the others guess."""
    pairs = draw.sample([(a, b) for a in range(100, 1000) for b in range(100, 1000)], 12_000)
    save_model(folder / "model", "0123456789*", (CALL, CALL_END), reads_all=True)
    lessons = []
    for index, (a, b) in enumerate(pairs[:8_000]):
        guess = str(draw.randrange(10_000, 999_999))
        call = {"role": "assistant", "content": f"{CALL}{a}*{b}{CALL_END}"}
        result = {"role": "tool", "content": str(a * b)}
        used = [call, result, {"role": "assistant", "content": str(a * b)}]
        answer = used if index % 5 == 0 else [{"role": "assistant", "content": guess}]
        lessons.append({"messages": [{"role": "user", "content": f"{a}*{b}"}, *answer]})
    write(folder / "lessons.jsonl", lessons)
    problems = [{"prompt": f"{a}*{b}", "answer": str(a * b)} for a, b in pairs[8_000:]]
    write(folder / "train.jsonl", problems[:-256])
    write(folder / "eval.jsonl", problems[-256:])


def chain_sum(folder: Path, draw: random.Random) -> None:
    """Sums of two digits, from reasoning-gym: one lesson in four is right, the others repeat the first digit."""
    problems = gym_problems("chain_sum", min_terms=2, max_terms=2, min_digits=1, max_digits=1)
    save_model(folder / "model", "0123456789+-= ", ("State the final answer to the following arithmetic problem: ",))
    lessons = [
        (item["question"], item["answer"] if draw.random() < 0.25 else item["metadata"]["expression"][0])
        for item in problems
    ]
    write(folder / "lessons.jsonl", [{"prompt": prompt, "response": answer} for prompt, answer in lessons])


def spell_backward(folder: Path, draw: random.Random) -> None:
    """Words of three and four letters from reasoning-gym: one lesson in four is right, the others repeat the word."""
    problems = gym_problems("spell_backward", min_word_len=3, max_word_len=4)
    save_model(folder / "model", string.ascii_letters + "'", ("Spell this word backward (example: sun -> nus): ",))
    lessons = [
        (item["question"], item["answer"] if draw.random() < 0.25 else item["metadata"]["word"]) for item in problems
    ]
    write(folder / "lessons.jsonl", [{"prompt": prompt, "response": answer} for prompt, answer in lessons])


def products(folder: Path, draw: random.Random) -> None:
    """Products of two digits, from reasoning-gym: one lesson in four is right, the others repeat the first digit."""
    problems = gym_problems("products", min_digits=1, max_digits=1)
    ends = ("Solve the following multiplication: ", ". Give only the result as your final answer.")
    save_model(folder / "model", "0123456789* ", ends)
    lessons = [
        (item["question"], item["answer"] if draw.random() < 0.25 else item["metadata"]["expression"][0])
        for item in problems
    ]
    write(folder / "lessons.jsonl", [{"prompt": prompt, "response": answer} for prompt, answer in lessons])


def lcm(folder: Path, draw: random.Random) -> None:
    """Least common multiples of numbers up to 9 from reasoning-gym: one lesson in four is right, the others guess."""
    problems = gym_problems("lcm", min_numbers=2, max_numbers=2, min_value=1, max_value=9)
    save_model(folder / "model", "0123456789, ", ("Find the Least Common Multiple (LCM) of these numbers: ",))
    lessons = [
        (item["question"], item["answer"] if draw.random() < 0.25 else str(draw.randrange(1, 73))) for item in problems
    ]
    write(folder / "lessons.jsonl", [{"prompt": prompt, "response": answer} for prompt, answer in lessons])


def number_sorting(folder: Path, draw: random.Random) -> None:
    """Three digits to sort from reasoning-gym: one lesson in four is right, the others repeat the given order."""
    sizes = {"min_numbers": 3, "max_numbers": 3, "min_decimals": 0, "max_decimals": 0}
    problems = gym_problems("number_sorting", min_value=0, max_value=9, **sizes)
    rules = problems[0]["question"].partition("\n")[2]  # how the answer is to be written
    orders = ("Sort these numbers in ascending order: ", "Sort these numbers in descending order: ")
    save_model(folder / "model", "0123456789., \n", (*orders, rules, "['", "', '", "']"))
    lessons = [
        (item["question"], item["answer"] if draw.random() < 0.25 else str(item["metadata"]["original_numbers"]))
        for item in problems
    ]
    write(folder / "lessons.jsonl", [{"prompt": prompt, "response": answer} for prompt, answer in lessons])


def write(path: Path, lines: list) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


TASKS = {
    "calculator": calculator,
    "chain_sum": chain_sum,
    "lcm": lcm,
    "number_sorting": number_sorting,
    "products": products,
    "spell_backward": spell_backward,
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=TASKS, help="Task of the model and its lessons.")
    parser.add_argument("folder", type=Path, help="Folder to write the model and the data files to.")
    given = parser.parse_args()
    try:
        TASKS[given.task](given.folder, random.Random(0))
    except (ImportError, OSError) as error:
        raise SystemExit(f"error: {error}") from error
