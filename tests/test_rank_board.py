"""RankBoard over a dict: what a rank reads of the others."""

import pytest
from torch.distributed import HashStore

from lightrl.rank_board import RankBoard


class DictStore:
    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.is_gone = False

    def set(self, key: str, value: str) -> None:
        self._require_there()
        self.values[key] = value

    def get(self, key: str) -> bytes:
        return self.values[key].encode()

    def check(self, keys: list[str]) -> bool:
        self._require_there()
        return all(key in self.values for key in keys)

    def _require_there(self) -> None:
        if self.is_gone:
            raise RuntimeError("Connection reset by peer")


def test_ranks_see_the_phases_and_errors_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 100.0)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    store = DictStore()
    first, second = RankBoard(store, 0, 2), RankBoard(store, 1, 2)
    second.enter("step")
    second.enter("generate")
    first.enter("learn")
    phases = first.describe_phases()
    assert phases.splitlines() == [
        "rank 0 was in phase 'learn'. Last word of the others:",
        "rank 1 is in phase 'generate' since 0 s",
    ]
    second.leave()
    assert second.phase == "step"
    assert first.errors_of_others() == {}
    second.post_error(ZeroDivisionError("the loss"))
    errors = first.errors_of_others()
    assert errors[1].endswith("ZeroDivisionError: the loss\n")
    assert second.errors_of_others() == {}
    assert first.describe_errors(errors).startswith("rank 1 failed in phase 'step':\n--- rank 1 ---\n")
    assert second.describe_errors({0: "not posted"}).startswith("rank 0 failed in phase 'step':\n")


def test_an_error_is_of_the_innermost_phase_that_it_left() -> None:
    store = DictStore()
    first, second, third = (RankBoard(store, rank, 3) for rank in range(3))
    error = ZeroDivisionError("the loss")
    second.enter("learn")
    second.post_error(error)
    second.leave()
    second.post_error(error)  # once more on the way out
    assert first.describe_errors(first.errors_now()).startswith("rank 1 failed in phase 'learn':\n")
    second.go_on()
    third.enter("reward")
    third.leave()
    third.post_error(KeyError("between"))
    assert first.describe_errors(first.errors_now()).startswith("rank 2 failed between two phases:\n")
    second.enter("learn")
    second.post_error(error)
    assert first.describe_errors(first.errors_now()).startswith("rank 1, 2 failed in phase 'learn' and between two")


def test_an_error_that_a_program_catches_is_withdrawn_when_it_goes_on() -> None:
    store = DictStore()
    first, second = RankBoard(store, 0, 2), RankBoard(store, 1, 2)

    def fail() -> None:
        try:
            raise ZeroDivisionError("the loss")
        except ZeroDivisionError as error:
            second.post_error(error)
            raise

    def leave() -> None:
        try:
            fail()
        except ZeroDivisionError as error:
            second.enter("clean-up on the way out")
            assert list(first.errors_now()) == [1]
            raise KeyError from error
        finally:
            second.enter("more of it")
            assert list(first.errors_now()) == [1]

    with pytest.raises(KeyError):
        leave()
    second.enter("the next step")
    assert first.errors_now() == {}
    with pytest.raises(ZeroDivisionError):
        fail()
    assert list(first.errors_now()) == [1]


class Several(Exception):  # noqa: N818  (as ExceptionGroup of Python 3.11)
    exceptions: tuple[Exception, ...] = ()


def test_an_error_stays_while_others_follow_it_in_any_way() -> None:
    store = DictStore()
    first, second = RankBoard(store, 0, 2), RankBoard(store, 1, 2)
    posted, several, circle = ZeroDivisionError("the loss"), Several(), KeyError()
    several.exceptions = (ValueError(), posted)

    def behind(error: Exception, cause: Exception | None) -> None:
        try:
            raise posted
        except ZeroDivisionError:
            raise error from cause

    def beside() -> None:
        raise several

    for follow in (lambda: behind(KeyError(), OSError()), lambda: behind(circle, circle), beside):
        second.post_error(posted)
        try:
            follow()
        except (KeyError, Several):
            second.go_on()
            assert list(first.errors_now()) == [1]
        second.go_on()
        assert first.errors_now() == {}


def test_ranks_tell_how_their_part_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    store = DictStore()
    first, second = RankBoard(store, 0, 2), RankBoard(store, 1, 2)
    first.post_result("save/3", "written")
    second.post_result("save/2", "written")
    assert first.results("save/3", limit_s=0.01) == ["written", None]
    second.post_result("save/3", "failed: full")
    assert first.results("save/3", limit_s=60) == ["written", "failed: full"]
    store.is_gone = True
    assert first.results("save/3", limit_s=60) == [None, None]


def test_a_store_that_is_gone_hides_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    store = DictStore()
    board = RankBoard(store, 0, 2)
    store.is_gone = True
    board.enter("learn")
    board.post_error(ValueError("mine"))
    assert board.errors_of_others() == {}
    assert board.describe_phases().splitlines() == ["rank 0 was in phase 'learn'. Last word of the others:"]


def test_an_error_that_is_no_utf_8_is_posted() -> None:
    """Such as one about a file whose name has other bytes; torch's store takes only UTF-8."""
    store = HashStore()
    RankBoard(store, 1, 2).post_error(FileNotFoundError("a\udcff.jsonl"))
    assert RankBoard(store, 0, 2).errors_now()[1].endswith("FileNotFoundError: a\\udcff.jsonl\n")


def test_the_middle_of_a_very_long_error_is_left_out() -> None:
    store = DictStore()
    RankBoard(store, 0, 2).post_error(ValueError(f"begins {'x' * 10_000_000} ends"))
    text = RankBoard(store, 1, 2).errors_now()[0]
    assert "ValueError: begins xxx" in text
    assert text.rstrip().endswith("xxx ends")
    assert "\n... (9,800," in text
    assert len(text) < 210_000
