"""quire-engine with the demo model, used with OpenAI's own client."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from server_children import engine_process

MODEL = Path(__file__).parents[3] / "examples" / "models" / "quire-demo"
ASK: Any = [{"role": "user", "content": "What is a list?"}]


@dataclass
class Server:
    child: subprocess.Popen[str]
    http: httpx.Client
    openai: openai.OpenAI


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    command = [sys.executable, "-m", "quire_engine", "--model", str(MODEL), "--served-model-name", "demo"]
    command += ["--host", "127.0.0.1", "--port", "0", "--threads", "1", "--kv-cache-memory-bytes", "32MiB"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as child:
        try:
            address = _address_when_ready(child)
            with (
                httpx.Client(base_url=address, timeout=60) as http,
                openai.OpenAI(base_url=f"{address}/v1", api_key="any", timeout=60) as client,
            ):
                yield Server(child, http, client)
        finally:
            child.kill()


def _address_when_ready(child: subprocess.Popen[str]) -> str:
    assert child.stderr is not None
    log = ""
    while " info    ready: " not in log:
        line = child.stderr.readline()
        assert line, log
        log += line
    found = re.search(r"listening on (http://\S+);", log)
    assert found is not None, log
    return found[1]


def test_chat_answer_contains_words(server: Server) -> None:
    answer = server.openai.chat.completions.create(model="demo", messages=ASK, max_completion_tokens=30)
    content = answer.choices[0].message.content
    assert content and re.search(r"[a-z]{3}", content) and "\ufffd" not in content
    assert answer.usage is not None and answer.usage.completion_tokens <= 30


def test_streamed_and_whole_answers_are_the_same(server: Server) -> None:
    options: dict[str, Any] = {"model": "demo", "messages": ASK, "max_completion_tokens": 40, "temperature": 0}
    whole = server.openai.chat.completions.create(**options).choices[0]
    text, reason = "", None
    for chunk in server.openai.chat.completions.create(**options, stream=True):
        text += chunk.choices[0].delta.content or ""
        reason = chunk.choices[0].finish_reason or reason
    assert (text, reason) == (whole.message.content, whole.finish_reason)


def test_seed_gives_the_same_output_under_load(server: Server) -> None:
    def ask(seed: int) -> str:
        return (
            server.openai.completions.create(model="demo", prompt="A list is", max_tokens=20, seed=seed).choices[0].text
        )

    alone = ask(7)
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(ask, [1, 7, 2, 7, 3, 7, 4, 5]))
    assert [together[1], together[3], together[5]] == [alone] * 3
    assert len(set(together)) > 3


def test_a_stop_string_cuts_the_text_before_it(server: Server) -> None:
    options: dict[str, Any] = {"model": "demo", "prompt": "The list", "max_tokens": 60, "temperature": 0}
    whole = server.openai.completions.create(**options, extra_body={"ignore_eos": True}).choices[0].text
    stop = whole[12:16]
    cut = server.openai.completions.create(**options, stop=[stop], extra_body={"ignore_eos": True}).choices[0]
    assert cut.text == whole[: whole.index(stop)] and cut.finish_reason == "stop"


def test_logprobs_are_probabilities_in_falling_order(server: Server) -> None:
    answer = server.openai.chat.completions.create(
        model="demo", messages=ASK, max_completion_tokens=5, temperature=0, logprobs=True, top_logprobs=3
    )
    assert answer.choices[0].logprobs is not None and answer.choices[0].logprobs.content
    for entry in answer.choices[0].logprobs.content:
        likeliest = [other.logprob for other in entry.top_logprobs]
        assert likeliest == sorted(likeliest, reverse=True) and len(likeliest) == 3
        assert entry.logprob == pytest.approx(likeliest[0]) and entry.logprob <= 0
        assert bytes(entry.bytes or []).decode() == entry.token


def complete(server: Server, **fields: Any) -> dict[str, Any]:
    """Return one answer's choice by plain HTTP, because the client's own types omit vLLM's fields."""
    response = server.http.post("/v1/completions", json={"model": "demo", "max_tokens": 12, "seed": 5, **fields})
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


def test_echoed_prompt_logprobs_equal_sampled_logprobs(server: Server) -> None:
    drawn = complete(server, prompt="A list", logprobs=2, temperature=0, return_token_ids=True)
    prompt = drawn["prompt_token_ids"] + drawn["token_ids"]
    weighed = complete(server, prompt=prompt, logprobs=2, echo=True, max_tokens=0, prompt_logprobs=1)
    assert weighed["text"] == "A list" + drawn["text"]
    length = len(drawn["token_ids"])
    assert weighed["logprobs"]["tokens"][-length:] == drawn["logprobs"]["tokens"]
    assert weighed["logprobs"]["token_logprobs"][-length:] == pytest.approx(
        drawn["logprobs"]["token_logprobs"], abs=0.05
    )
    assert weighed["logprobs"]["token_logprobs"][0] is None
    offsets = [offset + len("A list") for offset in drawn["logprobs"]["text_offset"]]
    assert weighed["logprobs"]["text_offset"][-length:] == offsets
    told = weighed["prompt_logprobs"]
    assert told[0] is None and all(str(token) in one for one, token in zip(told[1:], prompt[1:], strict=True))


def test_bad_words_and_allowed_tokens_are_respected(server: Server) -> None:
    plain = complete(server, prompt="The list", temperature=0, max_tokens=40, ignore_eos=True)["text"]
    words = sorted(set(re.findall(r"[a-z]{3,}", plain)))
    without = complete(server, prompt="The list", temperature=0, max_tokens=40, ignore_eos=True, bad_words=words)[
        "text"
    ]
    assert words and not set(words) & set(re.findall(r"[A-Za-z]+", without))
    allowed = server.http.post("/tokenize", json={"prompt": "0123456789", "add_special_tokens": False}).json()["tokens"]
    digits = complete(server, prompt="The list", allowed_token_ids=allowed, typical_p=0.9)["text"]
    assert re.fullmatch(r"\d{5,}", digits)


def test_min_tokens_is_respected(server: Server) -> None:
    ids = list(range(64))
    short = complete(server, prompt="The list", stop_token_ids=ids, logit_bias={str(token): 50 for token in ids})
    assert short["finish_reason"] == "stop" and short["text"] == ""
    longer = complete(
        server,
        prompt="The list",
        stop_token_ids=ids,
        logit_bias={str(token): 50 for token in ids},
        min_tokens=6,
        return_token_ids=True,
    )
    assert longer["finish_reason"] == "stop" and len(longer["token_ids"]) == 7
    assert not set(longer["token_ids"][:6]) & set(ids)


def test_the_best_of_several_answers_is_one_of_them(server: Server) -> None:
    options: dict[str, Any] = {"model": "demo", "prompt": "The list", "max_tokens": 12, "seed": 5, "logprobs": 0}
    every = server.openai.completions.create(**options, n=4).choices
    best = server.openai.completions.create(**options, n=1, best_of=4)

    def mean(choice: Any) -> float:
        values = choice.logprobs.token_logprobs
        return sum(values) / len(values)

    assert len({choice.text for choice in every}) > 1
    assert best.choices[0].text == max(every, key=mean).text
    assert best.usage is not None and best.usage.completion_tokens > 12


def test_a_shared_prefix_is_found_in_the_cache(server: Server) -> None:
    prompt = "Lists are mutable sequences, typically used to store collections of items. " * 4
    usage = [
        server.openai.completions.create(model="demo", prompt=prompt + end, max_tokens=2).usage
        for end in ("One", "Two")
    ]
    assert usage[1] is not None and usage[1].prompt_tokens_details is not None
    cached = usage[1].prompt_tokens_details.cached_tokens
    assert cached and cached >= usage[1].prompt_tokens // 2 and cached % 16 == 0


def test_text_in_any_script_round_trips(server: Server) -> None:
    text = "naïve 北京 😀 ﷽ \u0000 e\u0301"
    echoed = server.openai.completions.create(model="demo", prompt=text, max_tokens=1, echo=True).choices[0].text
    assert echoed.startswith(text)
    ids = server.http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]
    assert server.http.post("/detokenize", json={"tokens": ids}).json()["prompt"] == text


def test_an_over_long_prompt_is_refused_with_numbers(server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match=r"\d+ tokens of the prompt.* context of \d+ tokens"):
        server.openai.completions.create(model="demo", prompt="list " * 5000, max_tokens=1)


def test_the_api_process_stays_small(server: Server) -> None:
    status = Path(f"/proc/{server.child.pid}/status").read_text()
    resident = int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) * 1024  # type: ignore[index]
    assert resident <= 150 * 2**20
    maps = Path(f"/proc/{server.child.pid}/maps").read_text()
    assert "libtorch" not in maps and "numpy" not in maps


def test_sigterm_shuts_the_server_down_cleanly(server: Server) -> None:
    """The test is the last one, because there is no server afterwards."""
    engine = engine_process(server.child.pid)
    server.child.send_signal(signal.SIGTERM)
    assert server.child.wait(60) == 0
    deadline = time.monotonic() + 60
    while Path(f"/proc/{engine}").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not os.path.exists(f"/proc/{engine}")
