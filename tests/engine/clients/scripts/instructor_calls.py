"""instructor in its modes with tools and schemas, whole and streamed. Run in .venv-clients: ADDRESS KEY."""

import sys
from typing import Any

import anthropic
import instructor
import openai
from agent_tools import QUESTION, Sky
from instructor import Mode

address, key = sys.argv[1:]
client = openai.OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0)
messages = anthropic.Anthropic(base_url=address, api_key=key, max_retries=0)
ASK: Any = [{"role": "user", "content": QUESTION}]
STILL: Any = {"model": "demo", "temperature": 0, "messages": ASK, "response_model": Sky, "max_retries": 0}


def whole(mode: Mode) -> None:
    assert isinstance(instructor.from_openai(client, mode=mode).chat.completions.create(**STILL), Sky)


def with_its_completion(mode: Mode) -> None:
    found, raw = instructor.from_openai(client, mode=mode).chat.completions.create_with_completion(**STILL)
    assert isinstance(found, Sky) and raw.model == "demo"


def partial(mode: Mode) -> None:
    *_, last = instructor.from_openai(client, mode=mode).chat.completions.create_partial(**STILL)
    assert last.sky in ("rain", "sun") and last.warm in (True, False)


def by_messages() -> None:
    create = instructor.from_anthropic(messages, mode=Mode.ANTHROPIC_TOOLS).messages.create
    options = {name: value for name, value in STILL.items() if name != "temperature"}
    assert isinstance(create(**options, max_tokens=200), Sky)


CALLS = (
    (whole, Mode.TOOLS),
    (whole, Mode.TOOLS_STRICT),
    (whole, Mode.JSON_SCHEMA),
    (with_its_completion, Mode.TOOLS),
    (partial, Mode.TOOLS),
    (partial, Mode.JSON_SCHEMA),
    (whole, Mode.RESPONSES_TOOLS),
)
for call, mode in CALLS:
    call(mode)
    print(f"{call.__name__}:{mode.name}", flush=True)
by_messages()
print("by_messages", flush=True)
