"""Forged results, and what honest tests may do, with the checker and the program in two real processes."""

from __future__ import annotations

import sys

import pytest

from lightrl.rewards.sandbox import SandboxLimits, hides_packages, run_tests

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")

EQUAL_TO_ALL = """
class Equal:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __lt__(self, other): return True
    __le__ = __gt__ = __ge__ = __contains__ = __lt__
    def __sub__(self, other): return 0
    __rsub__ = __add__ = __radd__ = __round__ = __sub__
    def __hash__(self): return hash(4)
    def __getattr__(self, name): return lambda *args: self
"""
FORGERIES = {
    "an object that is equal to all": EQUAL_TO_ALL + "double = lambda x: Equal()",
    "a class that is equal to all": EQUAL_TO_ALL + "double = lambda x: Equal",
    "a number that is equal to all": (
        "class Equal(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\n"
        "    def __getattr__(self, name): return True\ndouble = lambda x: Equal(0)"
    ),
    "a text and a list that are equal to all": (
        "class Text(str):\n    __eq__ = lambda self, other: True\n    __hash__ = str.__hash__\n"
        "class List(list):\n    __eq__ = lambda self, other: True\n"
        "double = lambda x: Text('no') if isinstance(x, str) else List()"
    ),
    "exec and compile replaced": (
        "import builtins\nbuiltins.exec = lambda *args: None\nbuiltins.compile = lambda *args, **named: 'pass'\n"
        "double = lambda x: None"
    ),
    "shadowed names": (
        "abs = sorted = len = isinstance = AssertionError = lambda *args: 0\nall = any = lambda *args: True\n"
        "double = lambda x: 0"
    ),
    "frames": (
        "import sys\ndef double(x):\n    frame = sys._getframe()\n    while frame:\n"
        "        for value in [*frame.f_locals.values(), *frame.f_globals.values()]:\n"
        "            if isinstance(value, (list, tuple, dict, str)) and 'assert' in str(value):\n"
        "                return eval(str(value).split('== ')[1].split(chr(10))[0].strip(chr(34) + '])'))\n"
        "        frame = frame.f_back"
    ),
    "garbage collector": (
        "import gc\ndef double(x):\n    for item in gc.get_objects():\n        text = repr(item)[:20000]\n"
        "        if 'assert double(' in text: return eval(text.split('== ')[1].split(chr(39))[0].split('\"')[0])"
    ),
    "write replaced, and the marker printed": (
        "import os\nwrite = os.write\nos.write = lambda fd, data: write(fd, b'1')\n"
        "print('1', 'True', 'passed', flush=True)\ndouble = lambda x: None"
    ),
    "the verdict written to all files": (
        "import os\nfor fd in range(3, 64):\n    try: os.write(fd, b'1' * 65536)\n    except OSError: pass\n"
        "double = lambda x: None"
    ),
    "the end before the test": "import sys\nsys.exit(0)",
    "the end in the test": "import os\ndef double(x): os._exit(0)",
    "the end by another way": "def double(x): raise SystemExit(0)",
    "an interrupt": "def double(x): raise KeyboardInterrupt",
    "loops that end quietly": (
        "class Stop(StopIteration): pass\ndef double(x): raise (Stop if isinstance(x, str) else StopIteration)"
    ),
    "a patched module": (
        "import unittest, math, operator\nunittest.TestCase.assertEqual = lambda *args: None\n"
        "math.isclose = operator.eq = lambda *args, **named: True\ndouble = lambda x: 0"
    ),
    "at the exit": "import atexit, os\natexit.register(os._exit, 0)\ndouble = lambda x: None",
    "a function of the checker's Python": "double = lambda x: exec",
    "replies of its own": (
        'import os, struct\nreply = b\'{"value": true, "changed": []}\'\n'
        "for fd in (3, 4):\n    try: os.write(fd, (struct.pack('<I', len(reply)) + reply) * 50)\n"
        "    except OSError: pass\ndouble = lambda x: None"
    ),
    "what the test gave it": (
        "def double(x):\n    found = []\n"
        "    for name in ('__globals__', 'gi_frame', '__code__', '__self__', '__class__'):\n"
        "        try: found.append(getattr(x, name))\n        except Exception: pass\n"
        "    raise SystemError(found) if found else ValueError"
    ),
    "a name asked by its text": "def __getattr__(name): return 4\n__all__ = ['double']",
}
TESTS = [
    "assert double(2) == 4",
    "assert 4 == double(2)",
    "assert not double(2) != 4",
    "assert abs(double(2) - 4) < 1e-6",
    "assert double('a') in ('aa', 'bb')",
    "assert sorted(double([2, 1])) == [1, 1, 2, 2]",
    "assert all(map(lambda pair: double(pair[0]) == pair[1], [(2, 4), (3, 6)]))",
    "assert all(map(lambda pair: double(pair[0]) == pair[1], [('a', 'aa')]))",
    "import unittest\ncase = unittest.TestCase()\ncase.assertEqual(double(2), 4)\n"
    "case.assertAlmostEqual(double(0.5), 1.0)",
    "import math\nassert math.isclose(double(0.25), 0.5)",
    "assert double(2) - 4 == 0 and double(2) >= 4",
    "assert 4 in [double(2)] and 4 in {double(2)}",
]
HONEST = "def double(x): return x + x"


def test_an_honest_program_passes() -> None:
    assert run_tests(HONEST, TESTS, limits=SandboxLimits(timeout_s=240)) == [True] * len(TESTS)


@pytest.mark.parametrize("name", FORGERIES)
def test_no_forged_result_passes(name: str) -> None:
    assert run_tests(FORGERIES[name], TESTS) == [False] * len(TESTS)


def test_the_program_never_holds_the_tests() -> None:
    spy = (
        "import gc\ndef double(x):\n"
        "    return 'forty' + 'two' in repr([item for item in gc.get_objects() if type(item) in (list, dict)])"
    )
    assert run_tests(spy, ["assert not double(2), 'fortytwo'", "assert double(2) == 'fortytwo'"]) == [True, False]


def test_a_program_cannot_replace_what_a_test_asks_later() -> None:
    box = "class Box:\n    count = 0\n    def is_full(self): return self.count > 3\n"
    box += "b = Box()\nfill(b)\nassert b.is_full()"
    assert run_tests("def fill(b): b.is_full = lambda: True", [box]) == [False]
    assert run_tests("def fill(b):\n    b.count, b.other = 4, [1]", [f"{box} and b.other == [1]"]) == [True]


OBJECTS = """
from collections import Counter, deque, namedtuple, OrderedDict
from decimal import Decimal
from enum import Enum, IntEnum
import asyncio, datetime
class Empty(Exception): pass
class Stack:
    size = 0
    def __init__(self, *items): self.items = list(items)
    def push(self, item):
        self.items.append(item)
        return self
    def pop(self):
        if not self.items: raise Empty('nothing', 3)
        return self.items.pop()
    def __len__(self): return len(self.items)
    def __iter__(self): return iter(self.items)
    def __eq__(self, other): return self.items == other.items
    def __add__(self, other): return Stack(*self.items, *other.items)
    def __repr__(self): return f'Stack({self.items})'
    def __getitem__(self, index): return self.items[index]
    def __enter__(self): return self
    def __exit__(self, *error): self.items.clear()
class Color(Enum):
    RED = 1
class Level(IntEnum):
    LOW = 1
Point = namedtuple('Point', 'x y')
TOTAL = 7
count = 0
def inc():
    global count
    count += 1
def reverse(items): items.reverse()
def fill(d, s): d['k'] = [1]; s.add(2)
def rotate(q, a): q.rotate(1); a += 1
def apply(f, *args, **named): return f(*args, **named)
def gen(n): yield from range(n)
def memo(f):
    seen = {}
    def wrapped(x):
        if x not in seen: seen[x] = f(x)
        return seen[x]
    return wrapped
async def later(x):
    await asyncio.sleep(0)
    return x
def depth(node): return 0 if node is None else 1 + max(depth(node.left), depth(node.right))
def flip(node):
    if node: node.left, node.right = flip(node.right), flip(node.left)
    return node
def kinds(): return [(1, 2), {1, 2}, frozenset([3]), b'x', 1j, Decimal('1.5'), deque([1]), Counter('aab'), range(3)]
def day(): return datetime.date(2020, 1, 2)
def greet(): print('hello', input())
def big(): return 10 ** 5000
def power(x): return Level.LOW, Color.RED
def first(items): return next(iter(items))
def area(pair): return pair[0] * pair.y + pair.x * 0 + len(pair)
"""
HONEST_TESTS = [
    "s = Stack(1)\nassert len(s.push(2)) == 2 and s.pop() == 2 and s.items == [1]\n"
    "assert list(s) == [1] and 1 in s and s[0] == 1",
    "assert Stack(1) == Stack(1) and not Stack(1) == Stack(2) and (Stack(1) + Stack(2)).items == [1, 2]",
    "try:\n    Stack().pop()\n    assert False\nexcept Empty as error:\n    assert error.args == ('nothing', 3)",
    "try:\n    Stack(1)[4]\n    assert False\nexcept IndexError: pass\n"
    "assert isinstance(Stack(), Stack) and repr(Stack(1)) == 'Stack([1])'",
    "with Stack(1) as s: pass\nassert not s and not hasattr(s, 'absent') and Stack.size == 0\n"
    "s.size = 3\nassert s.size == 3",
    "p = Point(1, 2)\nassert p == (1, 2) and p.x == 1 and p[1] == 2 and p < (2, 0)",
    "assert power(1)[0] == 1 and power(1)[1] == Color.RED and Color.RED.value == 1 and Level.LOW + 1 == 2",
    "inc()\ninc()\nassert count == 2 and TOTAL == 7",
    "items = [1, 2]\nd, s = {}, set()\nreverse(items)\nfill(d, s)\n"
    "assert items == [2, 1] and d == {'k': [1]} and s == {2}",
    "import numpy as np\nfrom collections import deque\nq, a = deque([1, 2]), np.zeros(2)\n"
    "rotate(q, a)\nassert list(q) == [2, 1] and a.sum() == 2",
    "assert apply(lambda a, *, b: a + b, 1, b=2) == 3 and apply(len, [1]) == 1 and apply(int, '3') == 3",
    "assert list(gen(3)) == [0, 1, 2] and next(gen(2)) == 0 and first(x for x in [5]) == 5",
    "calls = []\n@memo\ndef f(x):\n    calls.append(x)\n    return x + 1\n"
    "assert f(1) == 2 and f(1) == 2 and calls == [1]",
    "import asyncio\nassert asyncio.run(later(3)) == 3",
    "class Node:\n    def __init__(self, value, left=None, right=None):\n"
    "        self.value, self.left, self.right = value, left, right\n"
    "root = Node(1, Node(2, Node(3)))\nassert depth(root) == 3 and flip(root) is root and root.right.value == 2",
    "from collections import Counter, deque\nfrom decimal import Decimal\nassert kinds() == "
    "[(1, 2), {1, 2}, frozenset([3]), b'x', 1j, Decimal('1.5'), deque([1]), Counter('aab'), range(3)]",
    "from collections import namedtuple\nPair = namedtuple('Pair', 'x y')\nassert area(Pair(2, 3)) == 8",
    "import datetime\nassert day() == datetime.date(2020, 1, 2) and big() == 10 ** 5000",
    "import contextlib, io, unittest.mock\nout = io.StringIO()\nwith contextlib.redirect_stdout(out), "
    "unittest.mock.patch('builtins.input', return_value='you'):\n    greet()\nassert out.getvalue() == 'hello you\\n'",
]


@pytest.mark.skipif(hides_packages(), reason="the environment is in /tmp: programs have no numpy")
def test_what_honest_tests_do() -> None:
    passed = run_tests(OBJECTS, HONEST_TESTS, limits=SandboxLimits(timeout_s=100))
    assert [test for test, is_passed in zip(HONEST_TESTS, passed, strict=True) if not is_passed] == []
    wrong = ["assert Point(1, 2) == (1, 3)", "assert Stack(1) == [1]", "assert Color.RED == 1"]
    assert run_tests(OBJECTS, wrong) == [False] * len(wrong)


def test_a_name_of_pythons_is_the_programs_only_where_it_is_what_is_tested() -> None:
    tests = ["assert sum(2, 5) == 10", "assert sum([2, 5]) == area(7)", "assert abs(sum(2, 5)) == 10"]
    assert run_tests("def sum(a, b): return a * b\ndef area(x): return x", tests) == [True, True, True]
    both = "def sum(a, b): return a * b\ndef abs(x): return 10"
    assert run_tests(both, tests) == [True, False, False]


def test_imports_and_definitions_hold_for_the_tests_behind_them() -> None:
    tests = [
        "import math",
        "def twice(x): return 2 * x",
        "assert double(math.pi) == twice(math.pi)",
        "x = (",
        "value = 1",
    ]
    assert run_tests(HONEST, [*tests, "assert value"]) == [True, True, True, False, True, False]


def test_each_test_has_a_fresh_program_and_a_slow_one_costs_those_behind_it() -> None:
    program = (
        "count = 0\ndef inc():\n    global count\n    count += 1\n    return count\ndef stuck():\n    while True: pass"
    )
    tests = ["assert inc() == 1", "assert inc() == 1 and inc() == 2", "stuck()", "assert inc() == 1"]
    assert run_tests(program, tests, limits=SandboxLimits(timeout_s=4)) == [True, True, False, False]
    assert run_tests("raise KeyError", ["pass"]) == [False]
    assert run_tests("def deep():\n    a = []\n    for _ in range(10**5): a = [a]\n    return a", ["deep()"]) == [False]
    assert run_tests("def much(): return 'x' * (1 << 26)", ["much()"]) == [False]
