"""Finds the tool calls in a policy's text. Each parser knows one notation."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import zip_longest
from typing import Any, NamedTuple

from lightrl.rollout.episode import Turn
from lightrl.rollout.pythonic_calls import PYTHONIC_MARKS, pythonic_calls
from lightrl.rollout.written_calls import THOUGHT, Found, ToolCall, bad_call, marked_calls, without_drafts

_HERMES = ("<tool_call>", "</tool_call>")
_KIMI = ("<|tool_call_begin|>", "<|tool_call_end|>")
_DEEPSEEK = ("<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>")
_KIMI_SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
_DEEPSEEK_SECTION = ("<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>")
_LLAMA = ("<function=", "</function>")
_GEMMA, _GEMMA_THOUGHT, _GEMMA_QUOTE = ("<|tool_call>", "<tool_call|>"), ("<|channel>", "<channel|>"), '<|"|>'
_GEMMA_NAME = re.compile(r"\s*(?:call:)?([\w./-]+)")
_GEMMA_KEY = re.compile(r"(?<=[{,])\s*([^\s\[\]{},:\"][^\[\]{},:\"]*)(?=:)")
_GEMMA_LITERAL = re.compile(r"\b(?:True|False|None)\b")
_HARMONY_END, _HARMONY_BEGIN, _HARMONY_TEXT = "<|call|>", "<|start|>", "<|message|>"
_HARMONY_NAME = re.compile(r"to=functions\.([\w./-]+)")
_MOST_MESSAGES = 8  # of a turn, in whose arguments a mark is looked for
_MISTRAL_BEGIN = "[TOOL_CALLS]"  # has no end
_MISTRAL_THOUGHT = ("[THINK]", "[/THINK]")
_TAGS = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER_END = "</parameter>"
_PARAMETER = re.compile(rf"<parameter=([^<>\n]+)>\n?(.*?)\n?{_PARAMETER_END}", re.DOTALL)
_ARGUMENT_END = "</arg_value>"
_ARGUMENT = re.compile(rf"<arg_key>([^<>]+)</arg_key>\s*<arg_value>(.*?){_ARGUMENT_END}", re.DOTALL)
_KIMI_ID, _KIMI_ARGUMENTS = re.compile(r"(?:functions\.)?([\w./-]+):\d+", re.ASCII), "<|tool_call_argument_begin|>"
_DEEPSEEK_SEPARATOR, _DEEPSEEK_FENCE = "<\uff5ctool\u2581sep\uff5c>", "\n```json\n"
_MISTRAL_HEAD = re.compile(r"\s*(?:([^\s\[{]+)\s*(?:\[CALL_ID\](\w+)\s*)?(?:\[ARGS\]\s*)?)?")
_MISTRAL_ID = re.compile(r"[a-zA-Z0-9]{9}")
_LITERALS = {"True": True, "False": False, "None": None}  # as some policies write them
_PYTHON_FENCE = r"```(?:python|py)[ \t]*\n"
_PYTHON = re.compile(rf"{_PYTHON_FENCE}([^`]*(?:`(?!``)[^`]*)*)(?!{_PYTHON_FENCE})```")  # a new block is no end
_OPENING = re.compile(r'\{\s*["}]|\[')  # nothing else begins JSON, and every failure to read it searches for its line
_DECODER = json.JSONDecoder()
_MAX_COUNTED = 4096  # characters before an opening; an error counts their lines, of all the text for each opening


def hermes_calls(text: str) -> list[Found]:
    """Finds calls like `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, the notation of Hermes and Qwen.

    What stands inside may also be `<function=add><parameter=a>1</parameter></function>`, as newer models of Qwen write.
    """
    return marked_calls(text, _HERMES, _from_tags_or_json)


def _from_tags_or_json(written: str) -> ToolCall:
    return _from_tags(written) if written.lstrip().startswith("<function=") else _from_json(written)


def json_calls(text: str) -> list[Found]:
    """Finds JSON objects with a name and arguments or parameters, as Llama writes them; other JSON is plain text.

    One with arguments may stand in `{"type": "function", "function": ...}`; with parameters that describes a tool.
    """
    values = [Found(start, stop, _calls_of(value)) for start, stop, value in _json_values(text)]
    return without_drafts(text, [item for item in values if item.calls])


def _calls_of(value: Any) -> list[ToolCall]:
    items = value if isinstance(value, list) else [value]
    functions = [_function_in(item) for item in items if isinstance(item, dict)]
    return [_from_object(call, str(call)) for call in functions if _is_call(call)]


def _function_in(found: dict[str, Any]) -> dict[str, Any]:
    function = found.get("function")
    return function if isinstance(function, dict) and "arguments" in function else found


def _is_call(found: Mapping[str, Any]) -> bool:
    return "name" in found and ("arguments" in found or "parameters" in found)


def llama_calls(text: str) -> list[Found]:
    """Finds calls like `<function=add>{"a": 1}</function>`; a turn without one may write them as JSON objects."""
    return marked_calls(text, _LLAMA, _from_function_tag) or json_calls(text)


def glm_calls(text: str) -> list[Found]:
    """Finds calls like `<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>`."""
    return marked_calls(text, _HERMES, _from_argument_tags)


def kimi_calls(text: str) -> list[Found]:
    """Finds calls like `functions.add:0` and `{"a": 1}` between the special tokens of Kimi K2."""
    return marked_calls(text, _KIMI, _from_kimi)


def deepseek_calls(text: str) -> list[Found]:
    """Finds calls between the tokens of DeepSeek, in the notation of V3 or of V3.1."""
    return marked_calls(text, _DEEPSEEK, _from_deepseek)


def mistral_calls(text: str) -> list[Found]:
    """Finds calls like `[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, or `[TOOL_CALLS]add[ARGS]{"a": 1}`."""
    found, skipped, stop = [], 0, 0
    thought = _MISTRAL_THOUGHT if _MISTRAL_THOUGHT[1] in text else THOUGHT
    whole = text
    while (start := text.find(_MISTRAL_BEGIN, stop)) >= 0:
        if start > _MAX_COUNTED:
            text, skipped, start = text[start:], skipped + start, 0
        calls, stop = _from_mistral(text, start + len(_MISTRAL_BEGIN))
        found.append(Found(skipped + start, skipped + stop, calls))
    return without_drafts(whole, [item for item in found if item.calls], thought)


def gemma_calls(text: str) -> list[Found]:
    """Finds calls like `<|tool_call>call:add{a:1,b:<|"|>two<|"|>}<tool_call|>`, the notation of Gemma 4."""
    return marked_calls(text, _GEMMA, _from_gemma, _GEMMA_THOUGHT)


def harmony_calls(text: str) -> list[Found]:
    """Finds calls like `<|channel|>commentary to=functions.add<|message|>{"a": 1}<|call|>`, the notation of gpt-oss."""
    found, skipped, begin = [], 0, 0
    while (first := text.find(_HARMONY_END, begin)) >= 0:
        if begin > _MAX_COUNTED:
            text, skipped, first, begin = text[begin:], skipped + begin, first - begin, 0
        start, end = _message(text, begin, first)
        head, mark, arguments = text[start:end].partition(_HARMONY_TEXT)
        name, begin = _HARMONY_NAME.search(head), end + len(_HARMONY_END)
        if mark and name:  # else it goes to a tool of OpenAI's own
            call = _from_named(name[1], arguments, text[start:end])
            found.append(Found(skipped + start, skipped + begin, [call]))
    return found


def _message(text: str, begin: int, end: int) -> tuple[int, int]:
    """Returns the offsets where gpt-oss's message ends, at or after the next end mark, and where it begins.

    It begins at the last mark of a beginning, unless whole arguments of a call hold that, or the mark of the end.
    """
    place = begin
    for _ in range(_MOST_MESSAGES):
        if (mark := text.find(_HARMONY_TEXT, place, end)) < 0:
            break
        start, place = max(text.rfind(_HARMONY_BEGIN, begin, mark), begin), mark + len(_HARMONY_TEXT)
        if _HARMONY_NAME.search(text, start, mark) and (stop := _end_of_arguments(text, place)) >= 0:
            return start, stop
    return max(text.rfind(_HARMONY_BEGIN, begin, end), begin), end


def _end_of_arguments(text: str, start: int) -> int:
    """Returns the offset of gpt-oss's end mark after whole arguments; -1 if they are not whole."""
    opening = text.find("{", start)
    if opening < 0 or text[start:opening].strip():
        return -1
    try:
        stop = _DECODER.raw_decode(text, opening)[1]
    except (ValueError, RecursionError):
        return -1
    end = text.find(_HARMONY_END, stop)
    return end if end >= 0 and not text[stop:end].strip() else -1


def python_calls(text: str) -> list[Found]:
    """Finds ```python blocks, each of which is a call of the tool `python` with that code."""
    blocks = [Found(*match.span(), [ToolCall("python", {"code": match[1]})]) for match in _PYTHON.finditer(text)]
    return without_drafts(text, blocks)


class Parser(NamedTuple):
    """Finds the calls of one notation."""

    find: Callable[[str], list[Found]]
    has_special_tokens: bool = False  # whether special tokens mark the calls, so that they must stay in the text
    section: tuple[str, ...] = ()  # marks around all calls of a turn

    def text_of(self, turn: Turn, tokenizer: Any) -> str:
        """Returns the text of a turn in which the calls can be found."""
        if not self.has_special_tokens:
            return turn.text
        return str(tokenizer.decode(list(turn.token_ids), skip_special_tokens=False))

    def calls_in(self, text: str) -> list[ToolCall]:
        """Returns the calls in a text."""
        return self.split(text)[0]

    def split(self, text: str) -> tuple[list[ToolCall], str]:
        """Returns the calls in a text, and the text without them."""
        places = self.find(text)
        ends = [0, *(found.stop for found in places)]
        starts = [*(found.start for found in places), len(text)]
        rest = "".join(text[end:start] for end, start in zip(ends, starts, strict=True))
        for mark in self.section:
            rest = rest.replace(mark, "")
        return [call for found in places for call in found.calls], rest


PARSERS: dict[str, Parser] = {
    "hermes": Parser(hermes_calls),
    "json": Parser(json_calls),
    "python": Parser(python_calls),
    "llama": Parser(llama_calls),
    "mistral": Parser(mistral_calls, has_special_tokens=True),
    "deepseek": Parser(deepseek_calls, has_special_tokens=True, section=_DEEPSEEK_SECTION),
    "kimi": Parser(kimi_calls, has_special_tokens=True, section=_KIMI_SECTION),
    "glm": Parser(glm_calls, has_special_tokens=True),
    "gemma": Parser(gemma_calls, has_special_tokens=True, section=("<|tool_response>",)),  # at which such a turn stops
    "harmony": Parser(harmony_calls, has_special_tokens=True),
    "pythonic": Parser(pythonic_calls, has_special_tokens=True, section=PYTHONIC_MARKS),
}


def parser_named(name: str) -> Parser:
    """Returns the parser of a notation; raises ValueError for an unknown one."""
    if name not in PARSERS:
        raise ValueError(f"Unknown parser {name!r}. Choose one of {', '.join(PARSERS)}.")
    return PARSERS[name]


def typed_arguments(call: ToolCall, description: Any) -> dict[str, Any]:
    """Returns a call's arguments; those that are texts get the types that the description of the tool gives them."""
    if not call.has_texts:
        return call.arguments
    properties = description
    for key in ("function", "parameters", "properties"):
        properties = properties.get(key) if isinstance(properties, Mapping) else None
    known = properties if isinstance(properties, Mapping) else {}
    return {name: _typed(text, known.get(name)) for name, text in call.arguments.items()}


def _typed(text: str, description: Any) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = _LITERALS.get(text.strip(), text)
    kinds = set(_kinds(description))
    own = {type(None): "null", list: "array", dict: "object"}.get(type(value))
    # 123 may be a text, but where null, a list or an object may stand too, nobody means a text by one.
    return text if "string" in kinds and own not in kinds else value


def _kinds(description: Any) -> Iterator[str]:
    """Yields the types that a description allows; pydantic, and so many MCP servers, write alternatives as anyOf."""
    if isinstance(description, Mapping):
        kinds = description.get("type")
        yield from (kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(kind, str))
        for key in ("anyOf", "oneOf"):
            options = description.get(key)
            for option in options if isinstance(options, list) else ():
                yield from _kinds(option)


def _from_tags(written: str) -> ToolCall:
    found = _TAGS.fullmatch(written)
    if found is None:
        return bad_call(written, ValueError("a call that begins with <function=...> ends with </function>"))
    name, body = found.groups()
    texts = _texts(body, _PARAMETER, _PARAMETER_END)
    if texts is None:
        return bad_call(written, ValueError("a call holds only <parameter=...>...</parameter>"))
    return ToolCall(name.strip(), texts, has_texts=True)


def _from_argument_tags(written: str) -> ToolCall:
    name, mark, body = written.partition("<arg_key>")
    texts = _texts(mark + body, _ARGUMENT, _ARGUMENT_END)
    if texts is None or len(name.split()) != 1:
        return bad_call(written, ValueError("a call is a name and <arg_key>...</arg_key><arg_value>...</arg_value>"))
    return ToolCall(name.strip(), {key.strip(): text for key, text in texts.items()}, has_texts=True)


def _texts(body: str, pattern: re.Pattern[str], mark: str) -> dict[str, Any] | None:
    """Returns the pairs of a name and a text, each ended by the mark; None if there is anything else."""
    end = body.rfind(mark) + len(mark)  # behind it nothing is searched, as in marked_calls()
    if (pattern.sub("", body[:end]) + body[end:]).strip():
        return None
    return dict(pattern.findall(body, 0, end))


def _from_function_tag(written: str) -> ToolCall:
    name, _, arguments = written.partition(">")
    return _from_named(name, arguments or "{}", written)


def _from_kimi(written: str) -> ToolCall:
    head, mark, arguments = written.partition(_KIMI_ARGUMENTS)
    found = _KIMI_ID.fullmatch(head.strip())
    if not mark or found is None:
        return bad_call(written, ValueError(f"a call is functions.NAME:NUMBER{_KIMI_ARGUMENTS} and a JSON object"))
    return _from_named(found[1], arguments, written)._replace(id=found[0])


def _from_gemma(written: str) -> ToolCall:
    """Reads `call:NAME{...}`, whose keys have no quotes and whose texts have quotes of their own."""
    name, pieces = _GEMMA_NAME.match(written), written.split(_GEMMA_QUOTE)
    if name is None or len(pieces) % 2 == 0:
        return bad_call(written, ValueError(f"a call is call:NAME{{...}} with texts in pairs of {_GEMMA_QUOTE}"))
    pieces[0] = pieces[0][name.end() :]
    plain = [_GEMMA_LITERAL.sub(_as_literal, _GEMMA_KEY.sub(_as_key, piece)) for piece in pieces[::2]]
    texts = [json.dumps(piece) for piece in pieces[1::2]]
    return _from_named(name[1], "".join(map("".join, zip_longest(plain, texts, fillvalue=""))), written)


def _as_key(match: re.Match[str]) -> str:
    return json.dumps(match[1].rstrip())


def _as_literal(match: re.Match[str]) -> str:
    return json.dumps(_LITERALS[match[0]])


def _from_deepseek(written: str) -> ToolCall:
    """Reads `function<sep>NAME`, a line break and a block of JSON, as V3 writes, or `NAME<sep>{...}`, as V3.1 does."""
    head, mark, body = written.partition(_DEEPSEEK_SEPARATOR)
    if not mark:
        return bad_call(written, ValueError("a call is a name, the separator and a JSON object"))
    name, fence, block = body.partition(_DEEPSEEK_FENCE)
    return _from_named(name, block.rstrip().removesuffix("```"), written) if fence else _from_named(head, body, written)


def _from_mistral(text: str, begin: int) -> tuple[list[ToolCall], int]:
    """Reads a list of objects, or as tokenizers since v11 have it `NAME[ARGS]{...}` or `NAME[CALL_ID]ID[ARGS]{...}`.

    Returns the calls, and where they end: their texts may hold the mark of calls. A bad call ends where it begins.
    """
    head = _MISTRAL_HEAD.match(text, begin)
    assert head, "it matches no text, too"
    try:
        value, stop = _DECODER.raw_decode(text, head.end())
    except (ValueError, RecursionError) as error:
        following = text.find(_MISTRAL_BEGIN, begin)
        written = text[begin : following if following >= 0 else len(text)]
        told = (
            json.JSONDecodeError(error.msg, written, error.pos - begin)
            if isinstance(error, json.JSONDecodeError)
            else error
        )
        return ([bad_call(written, told)] if written.strip() else []), begin
    if head[1]:
        value = {"name": head[1], "arguments": value, "id": head[2]}
    return [_with_mistral_id(item) for item in (value if isinstance(value, list) else [value])], stop


def _with_mistral_id(item: Any) -> ToolCall:
    """Returns the call with the id that the policy gave it, unless the chat template would refuse it."""
    given = str(item.get("id")) if isinstance(item, dict) else ""
    return _from_object(item, str(item))._replace(id=given if _MISTRAL_ID.fullmatch(given) else "")


def _from_named(name: str, arguments: str, written: str) -> ToolCall:
    return _from_object({"name": name.strip(), "arguments": arguments}, written)


def _from_json(written: str) -> ToolCall:
    try:
        wanted = json.loads(written)
    except (ValueError, RecursionError) as error:
        return bad_call(written, error)
    return _from_object(wanted, written)


def _from_object(wanted: Any, written: str) -> ToolCall:
    try:
        if not isinstance(wanted, dict):
            raise TypeError("a call is an object with a name and arguments")
        arguments = wanted.get("arguments", wanted.get("parameters", {}))
        name, arguments = wanted["name"], json.loads(arguments) if isinstance(arguments, str) else arguments
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise TypeError("the name is a text and the arguments are an object")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        return bad_call(written, error)
    return ToolCall(name, arguments)


def _json_values(text: str) -> Iterator[tuple[int, int, Any]]:
    """Yields the outermost JSON objects and lists of a text, with where they begin and end."""
    skipped = index = 0
    while (index := _next_opening(text, index)) < len(text):
        if index > _MAX_COUNTED:
            text, skipped, index = text[index:], skipped + index, 0
        try:
            value, stop = _DECODER.raw_decode(text, index)
        except RecursionError:  # a turn that only opens brackets; a search from each would take seconds
            return
        except ValueError:
            index += 1
            continue
        yield skipped + index, skipped + stop, value
        index = stop


def _next_opening(text: str, start: int) -> int:
    found = _OPENING.search(text, start)
    return found.start() if found else len(text)
