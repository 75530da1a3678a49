"""The paths of embeddings, reranking, scores and messages: routing, and what they count."""

import json
from typing import Any

import pytest

from quire_common.contract.engine import CLIENT_PATHS
from quire_gateway.limits import Charge
from quire_gateway.prompt import peek_request


@pytest.mark.parametrize("path", sorted(CLIENT_PATHS))
async def test_every_path_of_clients_reaches_a_replica(gateway, replicas, path: str) -> None:
    chat = await replicas("embed-0")
    await gateway.push(embed=[chat.endpoint()])
    async with gateway.client.post(gateway.url + path, json={"model": "embed", "input": "a"}) as response:
        assert response.status == 200 and (await response.json())["served_by"] == "embed-0"


@pytest.mark.parametrize(
    ("body", "sequences"),
    [
        ({"input": "a"}, 1),
        ({"input": ["a", "b", "c"]}, 3),
        ({"input": [1, 2, 3]}, 1),
        ({"input": [[1, 2], [3]]}, 2),
        ({"input": [{"role": "user", "content": 'a response, with "texts"'}]}, 1),
        ({"query": "a", "documents": ["b", "c"]}, 2),
        ({"query": "a", "documents": [{"text": "b"}, {"text": "c"}, "d"]}, 3),
        ({"text_1": "a", "text_2": ["b", "c"]}, 2),
        ({"text_1": "a", "text_2": "b"}, 1),
    ],
)
def test_each_text_is_a_sequence(body: dict[str, Any], sequences: int) -> None:
    raw = json.dumps({"model": "embed", **body}).encode()
    assert peek_request(raw, is_generating=True, counts_sequences=True).sequences == sequences


@pytest.mark.parametrize("field", ["query", "documents", "text_1", "text_2", "input"])
def test_texts_count_as_prompt(field: str) -> None:
    raw = json.dumps({"model": "embed", field: "x" * 3000}).encode()
    found = peek_request(raw, is_generating=True)
    assert found.num_bytes == 3002 and len(found.blocks) == 3002 // 256


def test_the_usage_is_charged() -> None:
    charge = Charge(5.0)
    vectors = ",".join(["0.125"] * 3000)
    charge.read(b'{"object":"list","data":[{"embedding":[%b]}],"usage":' % vectors.encode())
    charge.read(b'{"prompt_tokens":7,"total_tokens":7}}')
    charge.end()
    assert charge.tokens() == 7.0
