from __future__ import annotations

import json
import sys
import time
from typing import Any

import pytest
from reward_samples import answered

from lightrl.rewards import RewardError, load_reward, score
from lightrl.rewards.code_tests import extract_code

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")

ASSERTS = [
    "assert double(2) == 4",
    "assert double('a') == 'aa'",
    "assert double(0) == 1",
    "import math\nassert math.pi",
]
DOUBLE = "def double(x):\n    return x * 2\n"


def rewarded(code: str, tests: Any, **parameters: Any) -> float:
    (reward,) = score(load_reward("code", parameters), [answered(code, fields={"tests": tests})])
    return reward


def test_the_share_of_passed_tests_or_all_of_them() -> None:
    assert rewarded(f"Here:\n```python\n{DOUBLE}```\nDone.", ASSERTS) == 3 / 4
    assert rewarded(DOUBLE, json.dumps(ASSERTS), all_or_nothing=True) == 0.0
    assert rewarded(DOUBLE, ASSERTS[:2], all_or_nothing="true") == 1.0
    assert rewarded(DOUBLE, "assert double(3) == 6\nassert double(4) == 8") == 1.0


def test_programs_are_compared_by_their_output() -> None:
    tests = [{"stdin": "2\n", "stdout": "4"}, {"input": "5", "output": "10\n\n"}, {"stdin": "x", "stdout": ""}]
    assert rewarded("if __name__ == '__main__':\n    print(int(input()) * 2, ' ')", tests) == 2 / 3
    assert rewarded("import sys\nprint(4)\nsys.exit(1)", tests[:1]) == 0.0
    mixed = [*tests[:1], "assert value == 1"]
    assert rewarded("value = 1\nif __name__ == '__main__':\n    print(4)", mixed) == 1.0


@pytest.mark.parametrize(
    ("printed", "wanted", "reward"),
    [
        ("0.333333", "0.333333333333", 1.0),
        ("Case 1: 0.5", "Case 1: 0.50", 1.0),
        ("2", "2.0", 1.0),
        (".5", "0.5", 1.0),
        ("0.5", "-.5", 0.0),
        ("-.5 1.", "-0.5 1.0", 1.0),
        ("0.25", ".250", 1.0),
        (".", "0.0", 0.0),
        ("-1e-7 3", "0.0 3", 1.0),
        ("1e9", "1000000000.0", 1.0),
        ("0.3334", "0.333333", 0.0),
        ("2.0", "2", 0.0),
        ("0.5 1", "0.50 2", 0.0),
        ("0.5 1", "0.50", 0.0),
        ("0.5  1", "0.50 1", 0.0),
        ("nan", "0.5", 0.0),
        ("1.2.3", "1.2.30", 0.0),
        ("", "0.5", 0.0),
        ("0.5\n", "0.50\n0.5", 0.0),
    ],
)
def test_decimals_may_differ_in_the_last_digits(printed: str, wanted: str, reward: float) -> None:
    assert rewarded(f"print({printed!r})", [{"stdin": "", "stdout": wanted}]) == reward


def test_inputs_and_outputs_in_lists_or_in_json_are_tests_of_programs() -> None:
    several = {"inputs": ["1\n", "2\n"], "outputs": ["2\n", "5\n"]}
    for tests in (
        several,
        json.dumps(several),
        [json.dumps({"input": "1", "output": "2"}), {"stdin": "2", "stdout": ""}],
        {"input": several["inputs"], "output": several["outputs"]},
        [{"stdin": None, "stdout": None, "input": "1", "output": "2"}, {"stdin": "2", "stdout": "", "input": None}],
        {"inputs": [["1", "0"], ["2"]], "outputs": [["2"], ["5"]]},
    ):
        assert rewarded("print(int(input()) * 2)", tests) == 1 / 2
        assert rewarded("print('nonsense')", tests) == 0.0
    for refused in (
        {**several, "fn_name": "not a name"},
        {**several, "fn_name": "double", "outputs": ["2", "nonsense"]},
        {"inputs": [3], "outputs": [6], "fn_name": "double"},
        {"input": "1", "output": "2", "testtype": "functional"},
        {"inputs": ["1"], "outputs": []},
    ):
        with pytest.raises(RewardError, match="a test is .*: it must be a string"):
            rewarded(DOUBLE, json.dumps(refused))


SWAP = "class Solution:\n    def swap(self, a: List[int], b: int) -> Tuple[int, List[int]]:\n        return b, a\n"


@pytest.mark.parametrize(
    "tests",
    [
        {"fn_name": "swap", "inputs": [[[1, 2], 3], [[], 1]], "outputs": [[3, [1, 2]], [2, []]]},
        {"fn_name": "swap", "inputs": [[[1, 2], 3], [[], 1]], "outputs": [[[3, [1, 2]]], [[2, []]]]},
        {"fn_name": "swap", "inputs": ["[1, 2]\n3", "[]\n1"], "outputs": ["[3, [1, 2]]", "[2, []]"]},
        [
            {"input": "[1]\n3", "output": "[3, [1]]", "testtype": "functional", "metadata": {"func_name": "swap"}},
            {"input": "[]\n1", "output": "[2, []]", "testtype": "functional", "metadata": '{"func_name": "swap"}'},
        ],
    ],
)
def test_calls_of_a_function_are_tests(tests: Any) -> None:
    assert rewarded(SWAP, tests) == 1 / 2
    assert rewarded("def swap(a, b):\n    return [b, a]", json.dumps(tests)) == 1 / 2
    assert rewarded("def swap(a, b):\n    return [a, b]", tests) == 0.0
    assert rewarded("class Solution:\n    pass", tests) == 0.0


@pytest.mark.parametrize(
    ("code", "inputs", "outputs"),
    [
        ("def f(n):\n    return [(n, (n, n))] * 2", "3", "[[3, [3, 3]], [3, [3, 3]]]"),
        ("def f(n):\n    return {n: (1, 2)}", "3", '{"3": [1, 2]}'),
        ("def f(n):\n    return [n, -n, n - n]", "Infinity", "[Infinity, -Infinity, NaN]"),
    ],
)
def test_results_that_json_writes_in_another_way_are_right(code: str, inputs: str, outputs: str) -> None:
    tests = {"fn_name": "f", "inputs": [inputs], "outputs": [outputs]}
    assert rewarded(code, json.dumps(tests)) == 1.0
    assert rewarded(code, {**tests, "inputs": [[json.loads(inputs)]], "outputs": [json.loads(outputs)]}) == 1.0
    assert rewarded("def f(n):\n    return [n]", tests) == 0.0


def test_a_part_of_the_result_is_wrong() -> None:
    tests = {"fn_name": "two", "inputs": [[[1, 2]]], "outputs": [[0, 1]]}
    assert rewarded("def two(values):\n    return 0", tests) == 0.0
    assert rewarded("def two(values):\n    return [0, 1]", tests) == 1.0


@pytest.mark.parametrize(
    "test",
    [
        "import math\n\nMETADATA = {'author': 'jt'}\n\ndef check(candidate):\n    assert candidate(2) == 4",
        "class Cases:\n    def test(self):\n        assert double(2) == 5",
        "class TestIt:\n    def __init__(self):\n        pass\n\n    def test(self):\n        assert double(2) == 5",
        "('double(2)', 4)",
        "# assert double(2) == 5",
    ],
)
def test_statements_that_no_program_fails_are_no_tests(test: str) -> None:
    with pytest.raises(RewardError, match="no tests in the field 'tests' .statements that no program can fail"):
        rewarded(DOUBLE, test)
    assert rewarded(DOUBLE, [test, "assert double(2) == 5"]) == 1 / 2  # it may prepare the tests after it


@pytest.mark.parametrize("test", ['[{"input": "1", "outp', "eJxrYJ+zAA/BPfLR1Uq==", "assert double(2 == 4"])
def test_statements_that_are_no_python_are_no_tests(test: str) -> None:
    with pytest.raises(RewardError, match="no tests in the field 'tests' .statements that are no Python: "):
        rewarded(DOUBLE, test)
    assert rewarded(DOUBLE, [test, "assert double(2) == 4"]) == 1 / 2


@pytest.mark.parametrize(
    "code",
    [
        "import sys\nsys.exit(0)",
        "import os\nos._exit(0)",
        "raise SystemExit",
        "exit()",
        "def double(x):\n    quit()",
        "print('0 1 2 3 passed')",
        "def double(x):\n    import os\n    os._exit(0)",
        "def double(x):\n    raise KeyboardInterrupt",
        "import os\nos.kill(os.getpid(), 9)",
        "def double(",
        "",
        "no code at all",
    ],
)
def test_ending_early_or_printing_passes_nothing(code: str) -> None:
    assert rewarded(code, ASSERTS[:3]) == 0.0


def test_a_loop_costs_the_tests_that_it_keeps_from_running() -> None:
    started = time.monotonic()
    code = "def double(x):\n    while x == 'a': pass\n    return x * 2"
    assert rewarded(code, ASSERTS, timeout_s=2) == 1 / 4
    endless = [{"stdin": "", "stdout": ""}] * 20
    assert rewarded("while True: pass", endless, timeout_s=1) == 0.0
    assert time.monotonic() - started < 60


@pytest.mark.parametrize("name", ["info.tests", "info.tests.v1"])
def test_the_tests_may_be_in_a_field_inside_a_field(name: str) -> None:
    reward = load_reward("code", {"field": name})
    fields = {"info": {"tests": ASSERTS[:2]}, "info.tests.v1": ASSERTS[:2]}  # a name with dots may be that of a field
    assert score(reward, [answered(DOUBLE, fields=fields)]) == [1.0]


def test_the_last_block_counts_or_all_there_is() -> None:
    assert extract_code("```python\na\n```\n```py\nb\n``` c") == "b\n"
    assert extract_code("```\na\n") == "a\n"
    assert extract_code("a = 1") == "a = 1"


@pytest.mark.parametrize("language", ["python", "Python", "py", "python3", ""])
def test_blocks_of_other_languages_are_passed_over(language: str) -> None:
    before, after = "```bash\npip install x\n```\nThen:\n", "\nIt prints:\n```text\n4\n```\n"
    for text in (before + f"```{language}\ncode\n```\n" + after, f"```c++\nint x;\n```\n```{language}\ncode\n"):
        assert extract_code(text) == "code\n"


@pytest.mark.parametrize(
    "test",
    [
        "from solution import double\nassert double(2) == 4",
        "from solution import double as twice\nassert twice(2) == 4",
        "from solution import *\nassert double(2) == 4 and abs(-1) == 1",
        "import solution\nassert solution.double(2) == 4 and not hasattr(solution, 'other')",
        "from solution import double\n\ndef test_it():\n    assert double(2) == 4",
    ],
)
def test_a_test_may_import_the_program_as_solution(test: str) -> None:
    redefined = f"{DOUBLE}def abs(x):\n    return 1 if x == -1 else 7\n"
    assert rewarded(redefined, test) == 1.0
    assert rewarded("def double(x):\n    return 0\n", test) == 0.0
    assert rewarded("def other(x):\n    return x\n", test) == 0.0


def test_functions_that_pytest_would_call_are_called() -> None:
    test = "import math\n\ndef test_a():\n    assert double(2) == 4\n\ndef test_b():\n    assert double(0) == 1\n"
    assert rewarded(DOUBLE, test) == 1 / 2
    assert rewarded(DOUBLE, [test, "assert double(3) == 6"]) == 2 / 3
    assert rewarded(DOUBLE, f"{test}\ntest_a()") == 1.0  # calls of its own
    with pytest.raises(
        RewardError, match=r"that no program can fail: test_a\(\) takes case: neither cases nor a fixture"
    ):
        rewarded(DOUBLE, "def test_a(case):\n    assert double(case) == 4")


CASE = """import unittest
from solution import double

class Cases(unittest.TestCase):
    def setUp(self):
        self.x = 2

    def test_a(self):
        self.assertEqual(double(self.x), 4)

    def test_b(self):
        self.assertEqual(double(self.x), 5)
"""
GUARD = "if __name__ == '__main__':\n    "


CASES = """import pytest
from solution import double

KNOWN = [(1, 2), ("a", "aa"), pytest.param(3, 7)]

@pytest.fixture
def two():
    return 2

@pytest.mark.parametrize("x, y", KNOWN)
def test_cases(x, y):
    assert double(x) == y

class TestDouble:
    def setup_method(self):
        self.four = 4

    def test_fixture(self, two):
        assert double(two) == self.four

    def test_error(self):
        with pytest.raises(TypeError):
            double(None)
        assert [double(0.15)] == pytest.approx([0.3])
"""


def test_cases_fixtures_and_classes_of_pytest_are_tests() -> None:
    """Of six tests, the program fails the case (3, 7)."""
    assert rewarded(DOUBLE, [CASES, "assert double(5) == 10"]) == 5 / 6
    assert rewarded("def double(x):\n    return 0\n", CASES) == 0.0


def test_a_capture_shows_what_the_program_prints() -> None:
    test = "def test_a(capsys):\n    show()\n    assert capsys.readouterr().out == 'hi\\n'"
    assert rewarded("def show():\n    print('hi')\n", test) == 1.0
    assert rewarded("def show():\n    print('ho')\n", test) == 0.0


SUITE = "suite = unittest.TestLoader().loadTestsFromTestCase(Cases)\nunittest.TextTestRunner().run(suite)"


@pytest.mark.parametrize(
    "end",
    [
        "",
        "\nunittest.main()\n",
        "\nfrom unittest import main\nmain()\n",
        f"\n{GUARD}unittest.main(verbosity=2)\n",
        f"\n{SUITE}\n",
    ],
)
def test_methods_of_a_test_case_are_tests(end: str) -> None:
    assert rewarded(DOUBLE, CASE + end) == 1 / 2
    assert rewarded("def double(x):\n    return 0\n", CASE + end) == 0.0


@pytest.mark.parametrize(
    "test",
    [
        f"def check(f):\n    assert f(2) == 4\n\n{GUARD}check(double)\n    print('passed')\n",
        f"{GUARD}assert double(2) == 4",
        f"import pytest\n\ndef test_a():\n    assert double(2) == 4\n\n{GUARD}pytest.main()",
        f"import pytest, sys\n\ndef test_a():\n    assert double(2) == 4\n\n{GUARD}sys.exit(pytest.main([__file__]))",
        f"import random\n\nrandom.seed(0)\n\ndef test_a():\n    assert double(2) == 4\n\n{GUARD}test_a()",
        "import random\n\nrandom.seed(0)\n\ndef test_a():\n    assert double(2) == 4\n",
        "def case():\n    return 2\n\nCASE = case()\n\ndef test_a():\n    assert double(CASE) == 4\n",
        "assert double(0) == 0\n\ndef test_a():\n    assert double(2) == 4\n",
        "import unittest\n\nclass A(unittest.TestCase):\n    @classmethod\n    def setUpClass(cls):\n"
        "        cls.x = 2\n\n"
        "    def test_a(self):\n        self.assertEqual(double(self.x), 4)\n",
    ],
)
def test_what_a_test_does_as_main_program_is_done(test: str) -> None:
    assert rewarded(DOUBLE, test) == 1.0
    assert rewarded("def double(x):\n    return 0\n", test) == 0.0


IN_TWO_COLUMNS = 'def f():\n  """Example.\n\n  ```python\n  >>> f()\n  ```\n  """\n  return 1\n'
IN_NONE = '"""Example:\n\n```\n>>> f()\n```\n"""\n\ndef f():\n    return \'"""\'  # """\n'
IN_DOCSTRING = 'def f():\n    """Example.\n\n    ```\n    >>> f()\n    ```\n    """\n'


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\ncode\n```\nOutput:\n```\n4\n```\n", "code\n"),
        ("```\ndraft\n```\n```python\ncode\n```\n", "code\n"),
        ("1. First:\n\n   ```python\n   def f():\n       pass\n   ```\n", "def f():\n    pass\n"),
        ("- ```python\n  code\n  ```\n  It prints 4.", "code\n"),
        (f"```python\n{IN_DOCSTRING}```\nDone.", IN_DOCSTRING),
        (f"```python\n{IN_TWO_COLUMNS}```\nIt prints:\n```\n4\n```", IN_TWO_COLUMNS),
        (f"```python\n{IN_NONE}```\nDone.", IN_NONE),
        (f"```python\n{IN_NONE}{IN_NONE}\n```\n```python\ncode\n```", "code\n"),
        (f"```python\nx = '''draft\n```\nThen:\n```python\n{IN_TWO_COLUMNS}```", IN_TWO_COLUMNS),
        ('```python\nx = """draft\n```\n\n```python\ncode\n```', "code\n"),
        ('```python\n# don\'t\nx = \'"""\'\n```\n```text\n"""\n```', "# don't\nx = '\"\"\"'\n"),
        ('```python\nx = """\n  \n"""\n```', 'x = """\n  \n"""\n'),
        ("```python\nprint('```')\n```", "print('```')\n"),
        ('```python title="a.py"\ncode\n```', "code\n"),
        ("```py3\ncode\n```", "code\n"),
        ("```{.python}\ncode\n```", "code\n"),
        ("~~~python\ncode\n~~~", "code\n"),
        ("Then **Code:** ```python\ncode```\nDone.", "code"),
        ("```python\ncode\n  ```", "code\n"),
        ("```python\r\ncode\r\n```\r\n", "code\r\n"),
        ("```python\ndraft\n``` and ```python\ncode\n```", "code\n"),
        ("```python\ndraft\n```python\ncode\n```", "code\n"),
        ("Call ```f()```:\n```\ncode\n```", "code\n"),
        ("<think>```python\ndraft\n</think>```python\ncode\n```", "code\n"),
        ("<think>\n```python\ncode\n```\n</think>\nSee above.", "code\n"),
    ],
)
def test_a_block_is_found_however_it_is_written(text: str, code: str) -> None:
    assert extract_code(text) == code


def test_fences_without_end_take_no_time() -> None:
    started = time.monotonic()
    for text in ("```" * 20_000, "```python\n" * 5_000, "`" * 100_000, "```a b `" * 10_000, '```python\n"""\n' * 2_000):
        extract_code(text)
    for text in ('```python\n"""\n' + "```\n" * 2_000, "```python\n" + '"""\n```\n' * 2_000):
        extract_code(text)
    assert time.monotonic() - started < 10


def test_what_a_prompt_or_a_parameter_has_wrong_is_an_error() -> None:
    with pytest.raises(RewardError, match=r"the prompt has no tests in the field 'tests'.*code.field="):
        rewarded("a = 1", [])
    with pytest.raises(RewardError, match="a test is 3: it must be a string, or"):
        rewarded("a = 1", [3])
    with pytest.raises(ValueError, match="memory_mb 1, which must be at least 64"):
        load_reward("code", {"memory_mb": "1"})


def test_a_test_that_is_left_out_beside_others_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    file = "def test_a():\n    assert double(2) == 4\n\ndef test_b(tmp_path):\n    assert double(str(tmp_path))"
    reward = load_reward("code")
    assert score(reward, [answered(DOUBLE, fields={"tests": [file]})] * 2) == [1.0, 1.0]
    told = "leaves out tests of 'tests': test_b() takes tmp_path: neither cases nor a fixture. A response is judged by"
    assert [told in record.message for record in caplog.records] == [True]
