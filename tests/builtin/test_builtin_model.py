import errno
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightrl.builtin import model as builtin
from lightrl.builtin.model import Recipe, builtin_model_path, builtin_tokenizer, tiny_model
from lightrl.builtin.task import heldout_problems

# Two steps of a very small model: the whole path from recipe to folder in a fraction of a second.
QUICK = Recipe(
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=1,
    batch_size=8,
    learn=replace(Recipe().learn, max_steps=2, steps_per_check=1),
    blur=replace(Recipe().blur, max_steps=2, steps_per_check=1, stop_accuracy=0.0),
)

# Two of these start together, first with locks and then on a file system that has none.
RACER = """
import sys, time
from dataclasses import replace
from pathlib import Path
from lightrl.builtin import model as builtin

name, root = sys.argv[1], Path(sys.argv[2])
recipe = builtin.Recipe()
builtin.task.RECIPE = replace(
    recipe, learn=replace(recipe.learn, max_steps=1), blur=replace(recipe.blur, max_steps=1)
)
train = builtin._train

def race(cache):
    def train_and_tell(*arguments):
        (cache / f"trained-{name}").touch()
        time.sleep(0.5)
        return train(*arguments)
    builtin._train = train_and_tell
    (cache / f"ready-{name}").touch()
    while len(list(cache.glob("ready-*"))) < 2:
        time.sleep(0.01)
    print(builtin.builtin_model_path(cache_dir=cache))

def no_locks(*_):
    raise OSError("no locks available")

race(root / "locks")
builtin.fcntl.flock = no_locks
race(root / "no_locks")
"""


@pytest.fixture
def quick_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtin.task, "RECIPE", QUICK)


def _snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.iterdir()}


# ---- The tokenizer


def test_tokenizer_has_one_token_a_character() -> None:
    tokenizer = builtin_tokenizer()
    # <pad> 0, <eos> 1, the digit d is 2 + d, + is 12, = is 13
    assert tokenizer("37+48=")["input_ids"] == [5, 9, 12, 6, 10, 13]
    assert tokenizer.decode([10, 7, 1], skip_special_tokens=True) == "85"
    assert tokenizer.decode([10, 7, 1]) == "85<eos>"
    assert tokenizer("85<eos>")["input_ids"] == [10, 7, 1]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, len(tokenizer)) == (0, 1, 14)


def test_tokenizer_pads_on_the_left() -> None:
    assert builtin_tokenizer()(["1+2=", "9"], padding=True)["input_ids"] == [[3, 12, 4, 13], [0, 0, 0, 11]]


def test_tokenizer_survives_save_and_load(tmp_path: Path) -> None:
    builtin_tokenizer().save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded("37+48=")["input_ids"] == [5, 9, 12, 6, 10, 13]
    assert loaded.decode([5, 9, 12, 6, 10, 13, 10, 7, 1]) == "37+48=85<eos>"
    assert (loaded.pad_token_id, loaded.eos_token_id, len(loaded)) == (0, 1, 14)
    assert loaded.padding_side == "left"
    assert loaded.chat_template is None


def test_tokenizer_refuses_text_outside_the_task() -> None:
    with pytest.raises(Exception, match="UNK"):
        builtin_tokenizer()("37 + 48")


# ---- The tiny model


def test_tiny_model_is_finite_and_tied() -> None:
    model, tokenizer = tiny_model()
    logits = model(input_ids=torch.tensor([tokenizer("37+48=")["input_ids"]])).logits
    assert logits.shape == (1, 6, 14)
    assert logits.isfinite().all()
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert not model.training


def test_tiny_model_depends_on_its_seed_alone() -> None:
    torch.manual_seed(1)
    first = tiny_model(seed=3)[0].state_dict()
    torch.manual_seed(2)
    again, other = tiny_model(seed=3)[0].state_dict(), tiny_model(seed=4)[0].state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_tiny_model_takes_overrides() -> None:
    model, _ = tiny_model(num_hidden_layers=1, hidden_size=48, tie_word_embeddings=False)
    assert len(model.model.layers) == 1
    assert model.get_input_embeddings().weight.shape == (14, 48)
    assert model.get_output_embeddings().weight is not model.get_input_embeddings().weight


def test_tiny_model_survives_save_and_load(tmp_path: Path) -> None:
    model, _ = tiny_model()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_close(loaded.state_dict(), model.state_dict(), atol=0, rtol=0)


def test_tiny_model_is_made_whatever_mode_the_caller_is_in() -> None:
    with torch.inference_mode(), torch.device("meta"):
        model, _ = tiny_model()
    assert model.device.type == "cpu"
    assert all(parameter.requires_grad and not parameter.is_inference() for parameter in model.parameters())


# ---- The lessons


def test_learning_rate_warms_up_and_falls_to_a_tenth() -> None:
    phase = replace(Recipe().learn, learning_rate=1.0, max_steps=100)
    assert builtin._learning_rate(phase, 20, 0) == pytest.approx(0.05)  # 1/20 * (1 - 0/100)
    assert builtin._learning_rate(phase, 20, 9) == pytest.approx(0.455)  # 10/20 * (1 - 9/100)
    assert builtin._learning_rate(phase, 20, 60) == pytest.approx(0.4)  # 1 - 60/100
    assert builtin._learning_rate(phase, 20, 99) == pytest.approx(0.1)  # not 0.01


def test_phase_is_over_on_its_side_of_the_accuracy() -> None:
    above, below = replace(QUICK.learn, stop_accuracy=0.5), replace(QUICK.blur, stop_accuracy=0.5)
    assert [above.is_over(accuracy) for accuracy in (0.4, 0.5, 0.6)] == [False, True, True]
    assert [below.is_over(accuracy) for accuracy in (0.4, 0.5, 0.6)] == [True, True, False]


def test_batches_shuffle_every_row_before_any_comes_again() -> None:
    batches = builtin._shuffled_batches(7, 3, torch.Generator().manual_seed(0))
    first, second, third = (next(batches) for _ in range(3))
    assert len(set(torch.cat([first, second]).tolist())) == 6  # the seventh row waits for another shuffle
    assert len(third) == 3


def test_errors_are_never_zero_nor_too_large() -> None:
    values = torch.full((20_000,), 50)
    error = builtin._with_errors(values, 0.9, 20, torch.Generator().manual_seed(0)) - 50
    assert set(error.tolist()) == set(range(-20, 21))
    # 0.9 of 20,000 are wrong, half of them to each side; the standard deviations are 42 and 71
    assert abs(int((error != 0).sum()) - 18_000) < 210
    assert abs(int((error > 0).sum()) - 9_000) < 355
    assert torch.equal(builtin._with_errors(values, 0.0, 20, torch.Generator()), values)
    assert builtin._with_errors(torch.zeros(100, dtype=torch.int64), 1.0, 20, torch.Generator()).min() == 0


def test_answer_table_holds_digits_then_the_end() -> None:
    table = builtin._answer_table(198)
    assert table[7].tolist() == [9, 1, 0, 0]
    assert table[85].tolist() == [10, 7, 1, 0]
    assert table[198].tolist() == [3, 11, 10, 1]


def test_sampled_accuracy_is_the_mean_probability_of_the_answer() -> None:
    model, _ = tiny_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()  # every logit is 0: each of the 14 tokens has probability 1/14
    sums = builtin._sums([{"prompt": "10+10=", "answer": "20"}, {"prompt": "50+50=", "answer": "100"}])
    accuracy = builtin._sampled_accuracy(model, sums, builtin._answer_table(100))
    # "20" and the end are 3 tokens, "100" and the end 4: (14^-3 + 14^-4) / 2 = (3.644315e-4 + 0.260308e-4) / 2
    assert accuracy == pytest.approx(1.952311e-4, rel=1e-5)


def test_answer_nll_scores_the_same_tokens_as_the_whole_sequence() -> None:
    model, tokenizer = tiny_model()
    ids = torch.tensor([tokenizer("37+48=85<eos>")["input_ids"]])
    nll, is_answer = builtin._answer_nll(model, ids[:, :6], torch.tensor([[10, 7, 1, 0]]))
    logprobs = model(input_ids=ids).logits.log_softmax(-1)
    # the token at place t is predicted at place t - 1; the answer 8, 5, <eos> stands at places 6, 7, 8
    expected = [-logprobs[0, 5, 10], -logprobs[0, 6, 7], -logprobs[0, 7, 1], torch.tensor(0.0)]
    assert_close(nll[0], torch.stack(expected), atol=1e-6, rtol=0)
    assert is_answer.tolist() == [[True, True, True, False]]


# ---- The cache


def test_model_folder_is_made_once(quick_recipe: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    folder = builtin_model_path(cache_dir=tmp_path, on_progress=told.append)
    assert told[0].startswith("making the built-in model: learning sums, step 1 of at most 2, accuracy 0.")
    assert folder.name == f"addition-{QUICK.fingerprint()}"
    before = _snapshot(folder)
    monkeypatch.setattr(builtin, "_train", None)  # a second training would be a TypeError
    assert builtin_model_path(cache_dir=tmp_path) == folder
    assert _snapshot(folder) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == [folder.name, f"{folder.name}.lock"]
    assert {oct(path.stat().st_mode & 0o777) for path in folder.iterdir()} == {"0o644"}


def test_model_folder_loads_by_the_auto_classes(quick_recipe: None, tmp_path: Path) -> None:
    folder = builtin_model_path(cache_dir=tmp_path)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.config.model_type == "qwen3"
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (1, 0)
    assert tokenizer("1+2=")["input_ids"] == [3, 12, 4, 13]
    assert model(input_ids=torch.tensor([[3, 12, 4, 13]])).logits.isfinite().all()


def test_model_folder_is_whole_on_whatever_rank_it_is_made(quick_recipe: None, tmp_path: Path) -> None:
    alone = builtin_model_path(cache_dir=tmp_path / "alone")
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        folder = builtin_model_path(cache_dir=tmp_path / "rank-1")
    finally:
        dist.destroy_process_group()
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert files == {path.name: path.read_bytes() for path in alone.iterdir()}


def test_model_folder_lies_under_the_environment_variable(
    quick_recipe: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGHTRL_CACHE", str(tmp_path / "deep" / "cache"))
    assert builtin_model_path().parent == tmp_path / "deep" / "cache"
    monkeypatch.delenv("LIGHTRL_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert builtin_model_path().parent == tmp_path / ".cache" / "lightrl"


def test_model_folder_is_made_on_a_file_system_without_modes(
    quick_recipe: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_modes(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "chmod", no_modes)
    assert (builtin_model_path(cache_dir=tmp_path) / "model.safetensors").is_file()


def test_changed_recipe_is_another_folder(quick_recipe: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = builtin_model_path(cache_dir=tmp_path)
    monkeypatch.setattr(builtin.task, "RECIPE", replace(QUICK, seed=1))
    second = builtin_model_path(cache_dir=tmp_path)
    assert first != second
    assert (first / "model.safetensors").read_bytes() != (second / "model.safetensors").read_bytes()


def test_half_written_folder_is_not_used(quick_recipe: None, tmp_path: Path) -> None:
    folder = tmp_path / f"addition-{QUICK.fingerprint()}"
    folder.mkdir()
    (folder / "config.json").write_text("{")
    (folder / "left_over").touch()
    unfinished = tmp_path / f".{folder.name}-abcd"
    unfinished.mkdir()
    assert builtin_model_path(cache_dir=tmp_path) == folder
    assert not (folder / "left_over").exists()
    assert AutoModelForCausalLM.from_pretrained(folder).config.model_type == "qwen3"
    assert list(unfinished.iterdir()) == []


def test_failed_writing_leaves_nothing_behind(
    quick_recipe: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(_: Path) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(builtin, "_flush_to_disk", full_disk)
    with pytest.raises(OSError, match="No space left on device"):
        builtin_model_path(cache_dir=tmp_path)
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]


def test_later_of_two_publishers_gives_way(quick_recipe: None, tmp_path: Path) -> None:
    folder = builtin_model_path(cache_dir=tmp_path)
    before = _snapshot(folder)
    late = builtin._write_unpublished(folder, QUICK, builtin._ignore)
    builtin._publish(late, folder)
    assert _snapshot(folder) == before
    assert not late.exists()


@pytest.mark.long
def test_two_processes_agree_on_one_folder(tmp_path: Path) -> None:
    caches = [tmp_path / "locks", tmp_path / "no_locks"]
    for cache in caches:
        cache.mkdir()
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, name, str(tmp_path)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for name in ("one", "two")
    ]
    # Paths only: where deepspeed is installed, transformers imports it, and it says something of its own on stdout.
    words = [racer.communicate(timeout=240)[0].split() for racer in racers]
    printed = [[word for word in said if word.startswith(str(tmp_path))] for said in words]
    assert [racer.returncode for racer in racers] == [0, 0]
    assert printed[0] == printed[1]
    assert [Path(folder).parent for folder in printed[0]] == caches
    assert all(builtin.is_made(Path(folder)) for folder in printed[0])
    assert [len(list(cache.glob("trained-*"))) for cache in caches] == [1, 2]
    assert not list(tmp_path.glob("*/.addition-*"))


def test_global_torch_state_is_left_as_it_was(quick_recipe: None, tmp_path: Path) -> None:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.set_default_dtype(torch.float64)
    try:
        before = torch.get_rng_state()
        builtin_model_path(cache_dir=tmp_path)
        tiny_model()
        assert torch.equal(torch.get_rng_state(), before)
        assert torch.get_num_threads() == 2
        assert torch.get_default_dtype() is torch.float64
    finally:
        torch.set_num_threads(num_threads)
        torch.set_default_dtype(torch.float32)


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_read_only_cache_names_the_remedy(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    with pytest.raises(PermissionError, match="Set LIGHTRL_CACHE"):
        builtin_model_path(cache_dir=tmp_path / "cache")


def test_a_cache_that_cannot_be_made_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(PermissionError, match="Set LIGHTRL_CACHE"):
            builtin_model_path(cache_dir=folder)

    def refuse(path: Path, **_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(PermissionError, match="Set LIGHTRL_CACHE"):
        builtin_model_path(cache_dir=tmp_path / "cache")


# ---- The real thing


@pytest.mark.slow
def test_builtin_model_half_knows_the_sums() -> None:
    folder = builtin_model_path()
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    problems = heldout_problems()
    prompts = tokenizer([problem["prompt"] for problem in problems], return_tensors="pt")["input_ids"]
    torch.manual_seed(0)
    output = model.generate(prompts, do_sample=True, max_new_tokens=8)
    texts = tokenizer.batch_decode(output[:, prompts.shape[1] :], skip_special_tokens=True)
    accuracy = sum(text == problem["answer"] for text, problem in zip(texts, problems, strict=True)) / len(problems)
    assert 0.1 < accuracy < 0.3
    assert (output[:, -1] <= 1).all()  # every answer came to its end
