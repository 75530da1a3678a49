"""quire-engine with the demo model: what depends on its weights, and the size of its processes."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

ASK: Any = [{"role": "user", "content": "What is a list?"}]


@pytest.fixture
def server(demo_server: Any) -> Any:
    return demo_server


def complete(server: Any, **fields: Any) -> dict[str, Any]:
    """Return one answer's choice by plain HTTP, because the client's own types omit vLLM's fields."""
    response = server.http.post("/v1/completions", json={"model": "demo", "max_tokens": 12, "seed": 5, **fields})
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


def test_chat_answer_contains_words(server: Any) -> None:
    answer = server.openai.chat.completions.create(model="demo", messages=ASK, max_completion_tokens=30)
    content = answer.choices[0].message.content
    assert content and re.search(r"[a-z]{3}", content) and "\ufffd" not in content
    assert answer.usage is not None and answer.usage.completion_tokens <= 30


def test_seed_gives_the_same_output_under_load(server: Any) -> None:
    def ask(seed: int) -> str:
        text: str = complete(server, prompt="A list is", max_tokens=20, seed=seed)["text"]
        return text

    alone = ask(7)
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(ask, [1, 7, 2, 7, 3, 7, 4, 5]))
    assert [together[1], together[3], together[5]] == [alone] * 3
    assert len(set(together)) > 3


def test_logprobs_are_probabilities_in_falling_order(server: Any) -> None:
    answer = server.openai.chat.completions.create(
        model="demo", messages=ASK, max_completion_tokens=5, temperature=0, logprobs=True, top_logprobs=3
    )
    assert answer.choices[0].logprobs is not None and answer.choices[0].logprobs.content
    for entry in answer.choices[0].logprobs.content:
        likeliest = [other.logprob for other in entry.top_logprobs]
        assert likeliest == sorted(likeliest, reverse=True) and len(likeliest) == 3
        assert entry.logprob == pytest.approx(likeliest[0]) and entry.logprob <= 0
        assert bytes(entry.bytes or []).decode() == entry.token


def test_echoed_prompt_logprobs_equal_sampled_logprobs(server: Any) -> None:
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


def test_bad_words_and_allowed_tokens_are_respected(server: Any) -> None:
    fields = {"prompt": "The list", "temperature": 0, "max_tokens": 40, "ignore_eos": True}
    words = sorted(set(re.findall(r"[a-z]{3,}", complete(server, **fields)["text"])))
    without = complete(server, **fields, bad_words=words)["text"]
    assert words and not set(words) & set(re.findall(r"[A-Za-z]+", without))
    allowed = server.http.post("/tokenize", json={"prompt": "0123456789", "add_special_tokens": False}).json()["tokens"]
    digits = complete(server, prompt="The list", allowed_token_ids=allowed, typical_p=0.9)["text"]
    assert re.fullmatch(r"\d{5,}", digits)


def test_min_tokens_is_respected(server: Any) -> None:
    ids = list(range(64))
    fields = {"prompt": "The list", "stop_token_ids": ids, "logit_bias": {str(token): 50 for token in ids}}
    short = complete(server, **fields)
    assert short["finish_reason"] == "stop" and short["text"] == ""
    longer = complete(server, **fields, min_tokens=6, return_token_ids=True)
    assert longer["finish_reason"] == "stop" and len(longer["token_ids"]) == 7
    assert not set(longer["token_ids"][:6]) & set(ids)


def test_text_in_any_script_round_trips(server: Any) -> None:
    text = "naïve 北京 😀 ﷽ \u0000 e\u0301"
    assert complete(server, prompt=text, max_tokens=1, echo=True)["text"].startswith(text)
    ids = server.http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]
    assert server.http.post("/detokenize", json={"tokens": ids}).json()["prompt"] == text


def test_the_api_process_stays_small(server: Any) -> None:
    status = Path(f"/proc/{server.child.pid}/status").read_text()
    resident = int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) * 1024  # type: ignore[index]
    assert resident <= 150 * 2**20
    maps = Path(f"/proc/{server.child.pid}/maps").read_text()
    assert "libtorch" not in maps and "numpy" not in maps
