"""litellm's usual calls, under the prefixes openai/ and hosted_vllm/. Run in .venv-clients: ADDRESS KEY."""

import asyncio
import os
import sys
from typing import Any

# Otherwise it downloads a list of prices.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import litellm

litellm.telemetry = False
litellm.suppress_debug_info = True

address, key = sys.argv[1:]
# One loop for all calls: the libraries keep their connections, which belong to a loop.
loop = asyncio.Runner()
place: dict[str, Any] = {"api_base": f"{address}/v1", "api_key": key, "num_retries": 0}
options: dict[str, Any] = {**place, "messages": [{"role": "user", "content": "What is a list?"}], "max_tokens": 8}
still: dict[str, Any] = {**options, "temperature": 0}


def text_of(answer: Any) -> str:
    text: str = answer.choices[0].message.content
    return text


def in_one_piece(model: str) -> None:
    answer = litellm.completion(model=model, **options, temperature=0)
    assert len(text_of(answer)) > 5 and answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 8 and answer.usage.prompt_tokens > 5


def streamed(model: str) -> None:
    chunks = list(litellm.completion(model=model, **still, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text_of(
        litellm.completion(model=model, **still)
    )
    assert chunks[-1].choices[0].finish_reason == "length"
    *_, last = litellm.completion(model=model, **still, stream=True, stream_options={"include_usage": True})
    assert last.usage.completion_tokens == 8


def asynchronously(model: str) -> None:
    async def both() -> tuple[str, str]:
        whole = await litellm.acompletion(model=model, **still)
        parts = [
            part.choices[0].delta.content or ""
            async for part in await litellm.acompletion(model=model, **still, stream=True)
        ]
        return text_of(whole), "".join(parts)

    whole, joined = loop.run(both())
    assert whole == joined != ""


def with_every_option_of_openai(model: str) -> None:
    answer = litellm.completion(
        model=model,
        **options,
        n=2,
        stop=["zzz"],
        seed=3,
        temperature=0.5,
        top_p=0.9,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        logit_bias={5: -1},
        user="client-7",
        logprobs=True,
        top_logprobs=2,
    )
    assert len(answer.choices) == 2 and len(answer.choices[1].logprobs.content[0].top_logprobs) == 2


def with_further_sampling_fields(model: str) -> None:
    assert text_of(litellm.completion(model=model, **options, top_k=1)) == text_of(
        litellm.completion(model=model, **still)
    )


def with_parts_of_text(model: str) -> None:
    parts = [{"type": "text", "text": "What is a list?"}]
    assert text_of(
        litellm.completion(model=model, **{**still, "messages": [{"role": "user", "content": parts}]})
    ) == text_of(litellm.completion(model=model, **still))


def plain_completions(model: str) -> None:
    prompt: dict[str, Any] = {**place, "prompt": "The list", "max_tokens": 6, "temperature": 0}
    answer = litellm.text_completion(model=model, **prompt)
    assert answer.choices[0].text and answer.usage.completion_tokens == 6
    parts = [chunk.choices[0].text or "" for chunk in litellm.text_completion(model=model, **prompt, stream=True)]
    assert "".join(parts) == answer.choices[0].text


def mistakes(model: str) -> None:
    for error, message, changed in (
        (litellm.BadRequestError, "temperature: should be less than or equal to 2", {"temperature": 9}),
        (litellm.BadRequestError, "guided_json", {"extra_body": {"guided_json": {"not": {}}}}),
        (litellm.NotFoundError, "this server serves demo", {"model": model.replace("demo", "none")}),
        (litellm.AuthenticationError, "API key", {"api_key": "wrong-key-1"}),
    ):
        try:
            litellm.completion(**{**options, "model": model, **changed})
        except error as raised:
            assert message in str(raised), raised
        else:
            raise AssertionError(f"{changed} was taken")


CALLS = (
    in_one_piece,
    streamed,
    asynchronously,
    with_every_option_of_openai,
    with_further_sampling_fields,
    with_parts_of_text,
    plain_completions,
    mistakes,
)
with loop:
    for prefix in ("openai", "hosted_vllm"):
        for call in CALLS:
            call(f"{prefix}/demo")
            print(f"{prefix}:{call.__name__}")
