from __future__ import annotations

import pytest

from lightrl.rewards import called_tests
from lightrl.rewards.called_tests import left_out, with_calls

HEAD = "import pytest\n\n"


def calls_in(test: str) -> list[str]:
    return [text.rpartition("\n")[2].rpartition(".")[2] for text in with_calls(test)]


@pytest.mark.parametrize(
    ("body", "calls"),
    [
        ("def test_a():\n    pass", ["test_a()"]),
        ("def test_a(x=1, *, y=2, **more):\n    pass", ["test_a()"]),
        ("@pytest.mark.parametrize('x', [1, 2])\ndef test_a(x):\n    pass", 2),
        ("C = [1, 2, 3]\n@pytest.mark.parametrize(('x', 'y'), C)\ndef test_a(x, y):\n    pass", 3),
        ("@pytest.mark.parametrize('x', [1, 2])\n@pytest.mark.parametrize('y', (1,))\ndef test_a(x, y):\n    pass", 2),
        ("@pytest.mark.parametrize('x', range(9))\ndef test_a(x):\n    pass", ["call(globals(), 'test_a')"]),
        ("@pytest.mark.parametrize('x', [*range(9)])\ndef test_a(x):\n    pass", ["call(globals(), 'test_a')"]),
        (f"@pytest.mark.parametrize('x', {list(range(101))})\ndef test_a(x):\n    pass", ["call(globals(), 'test_a')"]),
        ("class TestA:\n    def test_b(self):\n        pass", ["call(globals(), 'TestA', 'test_b')"]),
        ("class TestA(object):\n    @staticmethod\n    def test_b():\n        pass", 1),
        ("@pytest.mark.parametrize('x', [1, 2])\nclass TestA:\n    def test_b(self, x):\n        pass", 2),
        ("class Base:\n    def test_b(self):\n        pass\nclass TestA(Base):\n    pass", 1),
        ("@pytest.fixture\ndef x():\n    pass\ndef test_a(x, capsys):\n    pass", ["call(globals(), 'test_a')"]),
        ("def setup_function():\n    pass\ndef test_a():\n    pass", ["call(globals(), 'test_a')"]),
        ("async def test_a():\n    pass", ["call(globals(), 'test_a')"]),
        ("@pytest.mark.skip\ndef test_a():\n    pass\ndef test_b():\n    pass", ["test_b()"]),
        ("import unittest as u\nclass A(u.TestCase):\n    def test_b(self):\n        pass\nclass B(A):\n    pass", 2),
        ("import unittest\nclass A(unittest.IsolatedAsyncioTestCase):\n    async def test_b(self):\n        pass", 1),
    ],
)
def test_each_test_is_called(body: str, calls: list[str] | int) -> None:
    found = calls_in(HEAD + body)
    assert (found if isinstance(calls, list) else len(found)) == calls
    assert all(text.startswith(HEAD + body) for text in with_calls(HEAD + body))


@pytest.mark.parametrize(
    "end",
    ["from unittest import main\nmain()", "import unittest as u\nu.main()", "from pytest import main as run\nrun()"],
)
def test_a_call_of_all_tests_is_taken_out_by_whatever_name(end: str) -> None:
    (text,) = with_calls(f"def test_a():\n    assert f(1) == 2\n{end}\n")
    assert "()" in text
    assert not any(line in text for line in ("main()", "run()"))


@pytest.mark.parametrize(
    "body",
    [
        "def test_a(x):\n    pass",
        "def test_a(tmp_path):\n    pass",
        "class TestA:\n    def test_a(self, tmp_path):\n        pass",
        "@pytest.mark.parametrize('x', [1], indirect=True)\ndef test_a(x):\n    pass",
        "@pytest.fixture(params=[1])\ndef x(request):\n    pass\ndef test_a(x):\n    pass",
        "@pytest.fixture\ndef x(x):\n    pass\ndef test_a(x):\n    pass",
    ],
)
def test_what_has_no_value_for_an_argument_is_left_out_with_its_name(body: str) -> None:
    assert with_calls(HEAD + body) == (HEAD + body,)
    assert left_out(HEAD + body).startswith("test_a() takes ")


def test_names_that_only_pytest_has_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    test = HEAD + "def test_a():\n    with pytest.warns(UserWarning):\n        f()"
    with_calls.cache_clear()
    monkeypatch.setattr(called_tests, "find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match=r"tests use pytest\.warns, which needs pytest: pip install pytest.*approx, fail"
    ):
        with_calls(test)
    assert len(with_calls(HEAD + "def test_a():\n    pytest.raises(KeyError, f)\npytest.main()")) == 1
    monkeypatch.undo()
    assert len(with_calls(test)) == 1
