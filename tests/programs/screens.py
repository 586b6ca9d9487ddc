"""An environment and tools that show images, which depend on what the policy says alone."""

import random

from PIL import Image

from lightrl.rollout.tool_calls import Tool, ToolBox
from lightrl.rollout.tool_parsers import Parser
from lightrl.rollout.tools import ToolWorkflow
from lightrl.rollout.written_calls import Found, ToolCall

SIZES = ((60, 90), (30, 30), (90, 60), (84, 56))


def screen(text):
    place = sum(map(ord, text))
    width, height = SIZES[place % 4]
    return Image.frombytes("RGB", (width, height), random.Random(place).randbytes(3 * width * height))


class Screens:
    """Shows an image at the beginning and after each turn, after every second one two of them; over after 3 turns."""

    def __init__(self) -> None:
        self._num_turns = 0

    def reset(self, data):
        return "" if data.images or data.videos else screen(data.text)

    def step(self, action):
        self._num_turns += 1
        image = {"type": "image", "image": screen(action)}
        parts = [image, {"type": "text", "text": "now?"}, image]
        shown = screen(action) if self._num_turns % 2 else [{"role": "user", "content": parts}]
        return shown, sum(character.isalpha() for character in action) / 24, self._num_turns == 3


def look(expression):
    return [{"type": "text", "text": f"see {expression}"}, {"type": "image", "image": screen(expression)}]


class Looking(ToolWorkflow):
    """Takes every turn for a call of a tool that shows an image, whatever the policy writes."""

    def __init__(self):
        super().__init__(tools="calculator")
        call = ToolCall("calculator", {"expression": "6*7"})
        self._parser = Parser(lambda text: [Found(0, len(text), [call])])
        tool = Tool(name="calculator", schema=self._box.schemas[0], function=look)
        self._box = ToolBox([tool], timeout_s=30.0, max_result_chars=100)
