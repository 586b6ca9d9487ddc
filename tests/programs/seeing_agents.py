"""An agent that shows the policy images through OpenAI's client, and never looks at those of its data itself."""

import base64
from io import BytesIO

from tests.programs.endpoint_agents import client_of
from tests.programs.screens import screen


def as_part(image):
    file = BytesIO()
    image.save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url, "detail": "low"}}


async def show(data, base_url, api_key, model):
    """Three turns that see an image for each answer, another third turn, and a conversation of its own."""

    async def ask(client, messages, text, *images):
        parts = [*map(as_part, images), {"type": "text", "text": text}]
        messages = [*messages, {"role": "user", "content": parts}] if text else messages
        answer = await client.chat.completions.create(model=model, messages=messages)
        return [*messages, {"role": "assistant", "content": answer.choices[0].message.content}]

    async with client_of(base_url, api_key) as client:
        first = await ask(client, [dict(message) for message in data.messages], "")
        seen = screen(first[-1]["content"])
        second = await ask(client, first, "now?", seen, seen)
        third = await ask(client, second, "and?", screen(second[-1]["content"]))
        fork = await ask(client, second, "or?", seen)
        other = await ask(client, [{"role": "system", "content": "See."}], "so?", screen(data.text))
    said = "".join(messages[-1]["content"] for messages in (first, second, third, fork, other))
    return {"reward": sum(character.isalpha() for character in said) / 24, "seen": 5}
