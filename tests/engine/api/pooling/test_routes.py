"""Embeddings, reranking and scores of the demo model: a whole server, held to transformers and to OpenAI's client."""

import math
import struct
from base64 import b64decode
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

MODEL = Path(__file__).parents[4] / "examples" / "models" / "quire-demo"
TEXTS = ["What is a list?", "A list is a sequence of values.", "Hello", "A list is a sequence"]
Start = Callable[..., AbstractContextManager[Any]]


@pytest.fixture(scope="module")
def server(start_server: Start) -> Iterator[Any]:
    with start_server("--runner", "pooling", "--check-integrity", "--max-num-batched-tokens", "256") as started:
        yield started


@pytest.fixture(scope="module")
def reranker(start_server: Start) -> Iterator[Any]:
    overrides = '{"architectures": ["LlamaForSequenceClassification"], "classifier_from_token": ["not", "is"]}'
    with start_server("--hf-overrides", overrides, "--check-integrity") as started:
        yield started


@pytest.fixture(scope="module")
def states() -> Callable[[str], torch.Tensor]:
    """Return a function from a text to its hidden states [P, H]."""
    from transformers import AutoModel, AutoTokenizer

    factory: Any = AutoModel
    model, tokenizer = factory.from_pretrained(MODEL, dtype=torch.float32), AutoTokenizer.from_pretrained(MODEL)

    def read(text: str) -> torch.Tensor:
        with torch.inference_mode():
            hidden: torch.Tensor = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
            return hidden

    return read


def unit(values: torch.Tensor) -> list[float]:
    return torch.nn.functional.normalize(values, dim=0).tolist()


def close(own: list[float], expected: list[float]) -> bool:
    """Return whether two unit vectors are the same, but for the arithmetic of 16 bits."""
    return len(own) == len(expected) and sum(a * b for a, b in zip(own, expected, strict=True)) > 0.995


def post(server: Any, path: str, **body: Any) -> dict[str, Any]:
    answer = server.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_embeddings_are_last_hidden_states(server: Any, states: Callable[[str], torch.Tensor]) -> None:
    answer = post(server, "/v1/embeddings", model="demo", input=TEXTS)
    assert answer["object"] == "list" and [each["index"] for each in answer["data"]] == [0, 1, 2, 3]
    for each, text in zip(answer["data"], TEXTS, strict=True):
        assert close(each["embedding"], unit(states(text)[-1]))
        assert sum(value * value for value in each["embedding"]) == pytest.approx(1.0, abs=1e-4)
    tokens = sum(len(states(text)) for text in TEXTS)
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert list(answer)[-1] == "usage", "a gateway reads the end of an answer"


def test_openai_client_gets_embeddings(server: Any) -> None:
    # It asks for base64 by default, and decodes it.
    key = server.http.headers["authorization"].removeprefix("Bearer ")
    with openai.OpenAI(base_url=f"{server.address}/v1", api_key=key, timeout=60) as client:
        small = client.embeddings.create(model="demo", input=TEXTS[0], dimensions=16)
        plain = client.embeddings.create(model="demo", input=TEXTS[0], encoding_format="float")
    first = plain.data[0].embedding[:16]
    length = math.sqrt(sum(value * value for value in first))
    assert small.data[0].embedding == pytest.approx([value / length for value in first], abs=1e-5)


def test_forms_of_input_are_equal(server: Any) -> None:
    (ids,) = [server.http.post("/tokenize", json={"prompt": TEXTS[0]}).json()["tokens"]]
    forms = [TEXTS[0], [TEXTS[0]], ids, [ids]]
    answers = [post(server, "/v1/embeddings", input=form)["data"] for form in forms]
    assert all(answer == answers[0] for answer in answers)
    packed = post(server, "/v1/embeddings", input=ids, encoding_format="base64")["data"][0]["embedding"]
    raw = b64decode(packed)
    assert list(struct.unpack(f"<{len(raw) // 4}f", raw)) == pytest.approx(answers[0][0]["embedding"])


def test_an_embedding_depends_on_its_text_alone(server: Any) -> None:
    alone = post(server, "/v1/embeddings", input=TEXTS[1])["data"][0]["embedding"]
    among = post(server, "/v1/embeddings", input=[*TEXTS * 8])["data"]
    assert all(close(alone, each["embedding"]) for each in among[1::4])


def test_long_inputs_are_cut_or_refused(server: Any) -> None:
    (ids,) = [server.http.post("/tokenize", json={"prompt": TEXTS[1]}).json()["tokens"]]
    cut = post(server, "/v1/embeddings", input=ids, truncate_prompt_tokens=4)
    assert cut["usage"]["prompt_tokens"] == 4
    longest = server.http.post("/tokenize", json={"prompt": "a"}).json()["max_model_len"]
    whole = post(server, "/v1/embeddings", input=[5] * (longest + 9), truncate_prompt_tokens=-1)
    assert whole["usage"]["prompt_tokens"] == longest
    refused = server.http.post("/v1/embeddings", json={"input": [[5], [5] * (longest + 1)]})
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    assert refused.json()["error"]["message"].startswith("input[1]: ")


def test_similar_texts_rank_first(server: Any) -> None:
    documents = ["Hello", TEXTS[0], {"text": "An error"}]
    for path in ("/v1/rerank", "/v2/rerank", "/rerank"):
        answer = post(server, path, model="demo", query=TEXTS[0], documents=documents, top_n=2)
        assert [each["index"] for each in answer["results"]][0] == 1 and len(answer["results"]) == 2
        assert answer["results"][0]["relevance_score"] == pytest.approx(1.0, abs=1e-3)
        assert answer["results"][0]["document"] == {"text": TEXTS[0]}
    bare = post(server, "/v1/rerank", query="a", documents=["b"], return_documents=False)
    assert set(bare["results"][0]) == {"index", "relevance_score"}


def test_scores_pair_texts(server: Any) -> None:
    one = post(server, "/v1/score", text_1=TEXTS[0], text_2=TEXTS[:3])["data"]
    pairs = post(server, "/score", text_1=TEXTS[:2], text_2=TEXTS[:2])["data"]
    assert [each["index"] for each in one] == [0, 1, 2]
    assert [each["score"] for each in pairs] == pytest.approx([1.0, 1.0], abs=1e-3)
    assert one[0]["score"] == pytest.approx(1.0, abs=1e-3) and one[1]["score"] < 0.999


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {}, "input"),
        ("/v1/embeddings", {"input": ""}, "input"),
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": ["a", ""]}, "input"),
        ("/v1/embeddings", {"input": ["a", 5]}, "input"),
        ("/v1/embeddings", {"input": [10**6]}, "input"),
        ("/v1/embeddings", {"input": ["a"] * 1025}, "input"),
        ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions"),
        ("/v1/embeddings", {"input": "a", "dimensions": 10**6}, "dimensions"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ("/v1/embeddings", {"input": "a", "priority": 1}, "priority"),
        ("/v1/embeddings", {"input": "a", "inputs": "b"}, "inputs"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b", ""]}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b"] * 1025}, "documents"),
        ("/v1/rerank", {"query": "", "documents": ["b"]}, "query"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "model"),
        ("/v1/completions", {"prompt": "a"}, "model"),
        ("/v1/responses", {"input": "a"}, "model"),
    ],
)
def test_bad_requests_name_the_field(server: Any, path: str, body: dict[str, Any], param: str) -> None:
    answer = server.http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param, answer.text


def test_a_server_that_generates_has_no_embeddings(demo_server: Any) -> None:
    for path in ("/v1/embeddings", "/v1/rerank", "/v1/score"):
        answer = demo_server.http.post(path, json={"input": "a"})
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "unsupported_task"
        assert "--runner pooling" in answer.json()["error"]["message"]


def test_pooling_requests_are_counted_and_none_is_left(server: Any) -> None:
    server.assert_nothing_is_left()
    before = server.metric("vllm:prompt_tokens_total"), server.metric("vllm:generation_tokens_total")
    answer = post(server, "/v1/embeddings", input=TEXTS[0])
    server.until(lambda: server.metric("vllm:prompt_tokens_total") > before[0])
    assert server.metric("vllm:prompt_tokens_total") - before[0] == answer["usage"]["prompt_tokens"]
    assert server.metric("vllm:generation_tokens_total") == before[1]


def test_a_reranker_scores_pairs(reranker: Any) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from quire_engine.api.pooling import pair_prompt

    factory: Any = AutoModelForCausalLM
    model, tokenizer = factory.from_pretrained(MODEL, dtype=torch.float32), AutoTokenizer.from_pretrained(MODEL)
    expected = []
    for document in TEXTS:
        ids = tokenizer(pair_prompt("a list", document, None), add_special_tokens=False, return_tensors="pt")
        with torch.inference_mode():
            logits = model(**ids).logits[0, -1]
        no, yes = (tokenizer.encode(word, add_special_tokens=False)[0] for word in ("not", "is"))
        expected.append(torch.sigmoid(logits[yes] - logits[no]).item())
    answer = post(reranker, "/v1/rerank", query="a list", documents=TEXTS)
    own = {each["index"]: each["relevance_score"] for each in answer["results"]}
    assert [own[index] for index in range(len(TEXTS))] == pytest.approx(expected, abs=0.02)
    shown = [each["relevance_score"] for each in answer["results"]]
    assert shown == sorted(shown, reverse=True)
    scores = post(reranker, "/v1/score", text_1="a list", text_2=TEXTS)["data"]
    assert [each["score"] for each in scores] == pytest.approx(expected, abs=0.02)
    refused = reranker.http.post("/v1/embeddings", json={"input": "a"})
    assert refused.status_code == 400 and "/v1/rerank" in refused.json()["error"]["message"]


def test_a_reranker_needs_its_tokens(start_server: Start) -> None:
    overrides = '{"classifier_from_token": ["no", "neither of them is one token"]}'
    with pytest.raises(AssertionError, match="is not one token"), start_server("--hf-overrides", overrides):
        pass
