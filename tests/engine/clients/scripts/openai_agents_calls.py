"""openai-agents with chat completions and with responses, whole and streamed. Run in .venv-clients: ADDRESS KEY."""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import openai
from agent_tools import QUESTION, Sky, check, get_weather
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)

address, key = sys.argv[1:]
set_tracing_disabled(True)
client = openai.AsyncOpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0)
MODELS: dict[str, Any] = {
    "chat": OpenAIChatCompletionsModel("demo", openai_client=client),
    "responses": OpenAIResponsesModel("demo", openai_client=client),
}
STILL = ModelSettings(temperature=0, max_tokens=200)


def agent(model: Any, **fields: Any) -> Any:
    return Agent(name="Assistant", instructions="Use the tools.", model=model, model_settings=STILL, **fields)


async def whole(model: Any) -> None:
    check((await Runner.run(agent(model, tools=[function_tool(get_weather)]), QUESTION)).final_output)


async def streamed(model: Any) -> None:
    result = Runner.run_streamed(agent(model, tools=[function_tool(get_weather)]), QUESTION)
    kinds = [event.name async for event in result.stream_events() if event.type == "run_item_stream_event"]
    assert kinds == ["tool_called", "tool_output", "message_output_created"], kinds
    check(result.final_output)


async def typed(model: Any) -> None:
    found = (await Runner.run(agent(model, output_type=Sky), QUESTION)).final_output
    assert isinstance(found, Sky)


async def main() -> None:
    runs: tuple[Callable[[Any], Awaitable[None]], ...] = (whole, streamed, typed)
    for name, model in MODELS.items():
        for run in runs:
            await run(model)
            print(f"{name}:{run.__name__}", flush=True)


asyncio.run(main())
