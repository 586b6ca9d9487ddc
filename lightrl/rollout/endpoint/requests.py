"""Parses requests and builds answers: OpenAI chat completions, and requests with tokens in and tokens out."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lightrl.config.adapters import POLICY
from lightrl.rollout.endpoint.errors import RequestError
from lightrl.rollout.endpoint.messages import checked_messages
from lightrl.rollout.endpoint.session import Reply, Wish

_MAX_CHOICES = 128
_MAX_STOPS = 16
_MOST_SHOWN = 200  # characters of a refused value
# Settings that change the distribution, each with its neutral values; the run decides them.
_DISTRIBUTION: dict[str, tuple[Any, ...]] = {
    "top_p": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
}


_KNOWN = {  # other fields of a chat request that the endpoint reads, or that do not concern the answer
    *("model", "messages", "tools", "tool_choice", "parallel_tool_calls", "response_format", "n", "temperature"),
    *("max_tokens", "max_completion_tokens", "stop", "stop_token_ids", "stream", "stream_options"),
    *("logprobs", "top_logprobs", "return_token_ids", "continue_final_message"),
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "request_id"),
}
_OF_THE_ANSWER = {  # sampling parameters of a token request that say how the tokens are returned
    *("detokenize", "include_stop_str_in_output", "output_kind", "prompt_logprobs", "skip_special_tokens"),
    "spaces_between_special_tokens",
}


def parsed_body(raw: bytes) -> dict[str, Any]:
    """Returns the JSON object of a request."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"The body is not JSON: {error}", code="invalid_json") from error
    if not isinstance(body, dict):
        raise RequestError(f"The body is a {type(body).__name__}; it must be a JSON object.", code="invalid_json")
    return body


def adapter_of(body: Mapping[str, Any], model: str, others: Sequence[str]) -> str:
    """Returns the adapter that the model name of a request selects; raises RequestError if there is none.

    Args:
        model: The policy's name at this endpoint.
        others: Names of the engine's adapters besides the policy's.
    """
    name = body.get("model", model)
    if name == model:
        return POLICY
    if name in others:
        return str(name)
    raise RequestError(
        f"The model {name!r} does not exist. This endpoint serves {', '.join(map(repr, (model, *others)))}.",
        status=404,
        code="model_not_found",
        param="model",
    )


def chat_wish(body: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]], Wish]:
    """Returns the messages, the tools and the settings of a chat request."""
    messages = checked_messages(body.get("messages"))
    tools = _given(body, "tools", [])
    if not isinstance(tools, list) or not all(
        isinstance(tool, dict) and isinstance(tool.get("function"), dict) for tool in tools
    ):
        raise _wrong("tools", tools, "a list of objects with a function")
    choice = _given(body, "tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise _wrong("tool_choice", choice, "auto or none, because no answer can be forced")
    kind = _given(body, "response_format", {})
    if not isinstance(kind, dict) or kind.get("type", "text") != "text":
        raise _wrong("response_format", kind, "text, because no format can be forced")
    if _whole(body, "top_logprobs", 0, low=0):
        raise _wrong("top_logprobs", body["top_logprobs"], "0, because only the chosen tokens have logprobs")
    if flag(body, "continue_final_message"):
        raise _wrong(
            "continue_final_message",
            True,
            "false, because an answer is a message of its own: to have a text continued, send its tokens as token_ids "
            "to /inference/v1/generate",
        )
    for name in ("stream", "logprobs", "return_token_ids"):
        flag(body, name)
    wants_usage(body)
    most_calls = None if flag(body, "parallel_tool_calls", True) else 1
    limit = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    return messages, ([] if choice == "none" else tools), replace(_wish(body, limit), most_calls=most_calls)


def unknown_fields(body: Mapping[str, Any]) -> list[str]:
    """Returns the fields of a chat request that may ask for another answer, which it does not get."""
    return sorted(name for name, value in body.items() if value is not None and name not in {*_KNOWN, *_DISTRIBUTION})


def unknown_settings(body: Mapping[str, Any]) -> list[str]:
    """Returns the sampling parameters of a token request that may ask for other tokens, which it does not get."""
    settings = body.get("sampling_params") or {}
    return [name for name in unknown_fields(settings) if settings[name] and name not in _OF_THE_ANSWER]


def wants_usage(body: Mapping[str, Any]) -> bool:
    """Returns whether a streamed answer is to end with the numbers of tokens."""
    options = _given(body, "stream_options", {})
    if not isinstance(options, dict):
        raise _wrong("stream_options", options, "an object")
    return flag(options, "include_usage")


def token_wish(body: Mapping[str, Any]) -> tuple[list[int], Wish]:
    """Returns the prompt and the settings of a token request."""
    ids = body.get("token_ids")
    if not isinstance(ids, list) or not ids or not all(type(token) is int for token in ids):
        raise _wrong("token_ids", ids, "a list of at least one integer")
    if body.get("features") or body.get("content_parts"):
        raise RequestError(
            "This route takes no images or videos: send images as parts of messages to /v1/chat/completions.",
            param="features",
        )
    if flag(body, "stream"):
        raise _wrong("stream", True, "false here")
    settings = _given(body, "sampling_params", {})
    if not isinstance(settings, dict):
        raise _wrong("sampling_params", settings, "an object")
    return ids, _wish(settings, "max_tokens")


def ignored_settings(body: Mapping[str, Any], temperature: float | None) -> list[str]:
    """Returns the settings of a request by which its turns would have another distribution than at the temperature."""
    settings = body.get("sampling_params") if isinstance(body.get("sampling_params"), dict) else body
    assert isinstance(settings, Mapping)
    given = [name for name, neutral in _DISTRIBUTION.items() if settings.get(name) not in (None, *neutral)]
    if settings.get("temperature") not in (None, temperature):
        given.append("temperature")
    return [f"{name}={settings[name]}" for name in given]


def without_temperature(wish: Wish) -> Wish:
    """Returns the wish changed to the run's own distribution."""
    return replace(wish, temperature=None)


def _wish(settings: Mapping[str, Any], limit: str) -> Wish:
    stop = _given(settings, "stop", [])
    stops = ((stop,) if stop else ()) if isinstance(stop, str) else tuple(stop) if isinstance(stop, list) else (None,)
    if len(stops) > _MAX_STOPS or not all(isinstance(text, str) and text for text in stops):
        raise _wrong("stop", stop, f"a text or a list of up to {_MAX_STOPS} texts, none of them empty")
    ids = _given(settings, "stop_token_ids", [])
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise _wrong("stop_token_ids", ids, "a list of integers")
    temperature = settings.get("temperature")
    if temperature is not None and not (type(temperature) in (int, float) and 0 <= temperature <= 1e6):
        raise _wrong("temperature", temperature, "a number of 0 or above")
    return Wish(
        num_choices=_whole(settings, "n", 1, low=1, high=_MAX_CHOICES) or 1,
        max_new_tokens=_whole(settings, limit, None, low=1),
        stop=stops,
        stop_token_ids=tuple(ids),
        temperature=temperature,
    )


def _whole(body: Mapping[str, Any], name: str, default: int | None, *, low: int, high: int = 1 << 31) -> int | None:
    value = body.get(name)
    if value is None:
        return default
    if type(value) is not int or not low <= value <= high:
        raise _wrong(name, value, f"a whole number from {low} to {high}")
    return value


def flag(body: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """Returns a setting that is true or false, or 1 or 0; a text such as "false" would count as true and is refused."""
    value = _given(body, name, default)
    if value not in (True, False):
        raise _wrong(name, value, "true or false")
    return bool(value)


def _given(body: Mapping[str, Any], name: str, default: Any) -> Any:
    value = body.get(name)
    return default if value is None else value


def _wrong(name: str, value: Any, wanted: str) -> RequestError:
    text = json.dumps(value, default=str)
    shown = text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
    return RequestError(f"{name!r} must be {wanted}; it is {shown}.", param=name)


# ---- Answers ---------------------------------------------------------------------------------------------------------


def chat_answer(replies: Sequence[Reply], body: Mapping[str, Any], model: str, tokenizer: Any) -> dict[str, Any]:
    """Returns a chat completion."""
    with_ids = flag(body, "return_token_ids")
    choices = [
        {
            "index": index,
            "message": {"refusal": None, **reply.message},
            "logprobs": {"content": _named_logprobs(reply, tokenizer)} if flag(body, "logprobs") else None,
            "finish_reason": reply.finish_reason,
            **({"token_ids": list(reply.turn.token_ids)} if with_ids else {}),
        }
        for index, reply in enumerate(replies)
    ]
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": f"version-{replies[0].turn.versions[-1] if replies[0].turn.versions else 0}",
        "choices": choices,
        "usage": _usage(replies),
        **({"prompt_token_ids": list(replies[0].call.prompt_ids)} if with_ids else {}),
    }


def chat_events(answer: Mapping[str, Any], *, with_usage: bool) -> list[bytes]:
    """Returns the server-sent events for a chat completion that is already complete."""
    head = {name: answer[name] for name in ("id", "created", "model", "system_fingerprint")}
    events: list[dict[str, Any]] = []
    for choice in answer["choices"]:
        message, index = choice["message"], choice["index"]
        calls = [{"index": number, **call} for number, call in enumerate(message.get("tool_calls", ()))]
        deltas = [{"role": "assistant", "content": message["content"]}, *({"tool_calls": [call]} for call in calls)]
        listed = [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None} for delta in deltas]
        listed[0]["logprobs"] = choice["logprobs"]
        listed.append({"index": index, "delta": {}, "logprobs": None, "finish_reason": choice["finish_reason"]})
        events += [{**head, "object": "chat.completion.chunk", "choices": [item]} for item in listed]
    if with_usage:
        events.append({**head, "object": "chat.completion.chunk", "choices": [], "usage": answer["usage"]})
    return [*(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events), b"data: [DONE]\n\n"]


def token_answer(replies: Sequence[Reply], body: Mapping[str, Any], model: str) -> dict[str, Any]:
    """Returns the answer to a token request, with the weight version of each token."""
    choices = [
        {
            "index": index,
            "token_ids": list(reply.turn.token_ids),
            "logprobs": {
                "content": [
                    {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
                    for token, logprob in zip(reply.turn.token_ids, reply.turn.logprobs, strict=True)
                ]
            },
            "versions": list(reply.turn.versions),
            "finish_reason": reply.finish_reason,
        }
        for index, reply in enumerate(replies)
    ]
    request_id = str(body.get("request_id") or f"generate-{uuid.uuid4().hex}")
    prompt_ids = list(replies[0].call.prompt_ids)
    return {
        "request_id": request_id,
        "model": model,
        "choices": choices,
        "prompt_token_ids": prompt_ids,
        "prompt_logprobs": None,
        "usage": _usage(replies),
    }


def _named_logprobs(reply: Reply, tokenizer: Any) -> list[dict[str, Any]]:
    texts = [tokenizer.decode([token]) for token in reply.turn.token_ids]
    return [
        {"token": text, "logprob": logprob, "bytes": _bytes_of(text), "top_logprobs": []}
        for text, logprob in zip(texts, reply.turn.logprobs, strict=True)
    ]


def _bytes_of(text: str) -> list[int] | None:
    """Returns the bytes of a token; None, as OpenAI has it, for a part of a character, whose text is no text of it."""
    return None if "\ufffd" in text else list(text.encode())


def _usage(replies: Sequence[Reply]) -> dict[str, int]:
    first = replies[0]
    prompt = len(first.turn.expanded_ids or first.call.prompt_ids)
    completion = sum(len(reply.turn.token_ids) for reply in replies)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
