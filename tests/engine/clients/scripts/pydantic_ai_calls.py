"""pydantic-ai over chat completions and responses, whole and streamed. Run in .venv-clients: ADDRESS KEY.

Its model for Anthropic's API needs an older version of Anthropic's client than the other scripts use.
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from agent_tools import QUESTION, Sky, check, get_weather
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

address, key = sys.argv[1:]
openai = OpenAIProvider(base_url=f"{address}/v1", api_key=key)
MODELS: dict[str, Any] = {
    "chat": OpenAIChatModel("demo", provider=openai),
    "responses": OpenAIResponsesModel("demo", provider=openai),
}
STILL: Any = {"temperature": 0.0, "max_tokens": 200}


async def whole(model: Any) -> None:
    agent = Agent(model, tools=[get_weather], model_settings=STILL)
    check((await agent.run(QUESTION)).output)


async def streamed(model: Any) -> None:
    agent = Agent(model, tools=[get_weather], model_settings=STILL)
    async with agent.run_stream(QUESTION) as result:
        parts = [part async for part in result.stream_text(delta=True, debounce_by=None)]
    assert len(parts) > 3
    check("".join(parts))


async def typed_by_tool(model: Any) -> None:
    found = await Agent(model, output_type=ToolOutput(Sky), model_settings=STILL, retries=0).run(QUESTION)
    assert isinstance(found.output, Sky)


async def typed_by_schema(model: Any) -> None:
    found = await Agent(model, output_type=NativeOutput(Sky), model_settings=STILL, retries=0).run(QUESTION)
    assert isinstance(found.output, Sky)


async def main() -> None:
    runs: tuple[Callable[[Any], Awaitable[None]], ...] = (whole, streamed, typed_by_tool, typed_by_schema)
    for name, model in MODELS.items():
        for run in runs:
            await run(model)
            print(f"{name}:{run.__name__}", flush=True)


asyncio.run(main())
