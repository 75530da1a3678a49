"""langchain-openai's usual calls, with only the address changed. Run in .venv-clients: ADDRESS KEY."""

import asyncio
import json
import sys
import urllib.request
from typing import Any

import openai
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI, OpenAI

address, key = sys.argv[1:]
# One loop for all calls: the libraries keep their connections, which belong to a loop.
loop = asyncio.Runner()


def token_ids(text: str) -> list[int]:
    """Return token ids as the server counts them: langchain's own tokenizer would have to be downloaded."""
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"{address}/tokenize", json.dumps({"prompt": text}).encode(), headers)
    with urllib.request.urlopen(request) as response:
        tokens: list[int] = json.load(response)["tokens"]
    return tokens


options: dict[str, Any] = {"model": "demo", "base_url": f"{address}/v1", "api_key": key, "max_retries": 0}
chat = ChatOpenAI(**options, max_tokens=12, temperature=0, custom_get_token_ids=token_ids)
QUESTION = "What is a list?"


def chat_in_one_piece() -> None:
    answer = chat.invoke(QUESTION)
    assert isinstance(answer.content, str) and len(answer.content) > 10
    assert answer.response_metadata["finish_reason"] == "length" and answer.response_metadata["model_name"] == "demo"
    usage = answer.usage_metadata
    assert usage is not None and usage["output_tokens"] == 12
    assert usage["total_tokens"] == usage["input_tokens"] + 12


def chat_streamed() -> None:
    chunks = list(chat.stream(QUESTION))
    assert "".join(str(chunk.content) for chunk in chunks) == chat.invoke(QUESTION).content and len(chunks) > 5
    *_, last = [chunk.usage_metadata for chunk in chat.stream(QUESTION, stream_usage=True) if chunk.usage_metadata]
    assert last["output_tokens"] == 12


def chat_in_batches() -> None:
    answers = chat.batch([QUESTION, "What is a dict?", QUESTION])
    assert answers[0].content == answers[2].content != answers[1].content


def chat_with_every_role() -> None:
    messages = [SystemMessage("Be brief."), HumanMessage("Hi"), AIMessage("Hello"), HumanMessage(QUESTION)]
    answer = loop.run(chat.ainvoke(messages))
    assert answer.content


def chat_streamed_asynchronously() -> None:
    async def collect() -> str:
        return "".join([str(chunk.content) async for chunk in chat.astream(QUESTION)])

    assert loop.run(collect()) == chat.invoke(QUESTION).content


def bound_options() -> None:
    text = str(chat.invoke(QUESTION).content)
    stop = text[6:9]
    cut = chat.bind(stop=[stop]).invoke(QUESTION)
    assert cut.content == text[: text.index(stop)] and cut.response_metadata["finish_reason"] == "stop"
    logprobs = chat.bind(logprobs=True, top_logprobs=2).invoke(QUESTION).response_metadata["logprobs"]["content"]
    assert len(logprobs) == 12 and len(logprobs[0]["top_logprobs"]) == 2
    assert (
        chat.bind(seed=3, temperature=1).invoke(QUESTION).content
        == chat.bind(seed=3, temperature=1).invoke(QUESTION).content
    )


def several_generations() -> None:
    result = ChatOpenAI(**options, max_tokens=5, n=2).generate([[HumanMessage(QUESTION)]])
    assert len(result.generations[0]) == 2


def a_chain() -> None:
    prompt = ChatPromptTemplate.from_messages([("system", "You are {who}."), ("human", "{question}")])
    chain = prompt | chat | StrOutputParser()
    inputs = {"who": "a teacher", "question": QUESTION}
    assert "".join(chain.stream(inputs)) == chain.invoke(inputs) != ""


def counted_tokens() -> None:
    assert chat.get_num_tokens(QUESTION) == len(token_ids(QUESTION)) > 3


def plain_completions() -> None:
    llm = OpenAI(**options, max_tokens=8, temperature=0)
    text = llm.invoke("The list")
    assert text and "".join(llm.stream("The list")) == text == loop.run(llm.ainvoke("The list"))
    assert llm.batch(["The list", "A dict"])[0] == text
    result = llm.generate(["The list", "A dict"])
    assert result.llm_output is not None and 8 < result.llm_output["token_usage"]["completion_tokens"] <= 16


def tools_are_refused_by_name() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    try:
        chat.bind_tools([tool]).invoke(QUESTION)
    except openai.BadRequestError as error:
        assert "no place for tools" in str(error)
    else:
        raise AssertionError("tools were ignored")


def a_wrong_key_is_told() -> None:
    try:
        ChatOpenAI(**options | {"api_key": "wrong-key-1"}).invoke(QUESTION)
    except openai.AuthenticationError as error:
        assert "invalid_api_key" in str(error)
    else:
        raise AssertionError("a wrong key was taken")


CALLS = (
    chat_in_one_piece,
    chat_streamed,
    chat_in_batches,
    chat_with_every_role,
    chat_streamed_asynchronously,
    bound_options,
    several_generations,
    a_chain,
    counted_tokens,
    plain_completions,
    tools_are_refused_by_name,
    a_wrong_key_is_told,
)
with loop:
    for call in CALLS:
        call()
        print(call.__name__)
