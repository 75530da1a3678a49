"""langchain-openai's and litellm's calls for embeddings and reranking. Run in .venv-clients: ADDRESS KEY."""

import asyncio
import os
import sys
from typing import Any

# Otherwise it downloads a list of prices.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import litellm
from langchain_openai import OpenAIEmbeddings

litellm.telemetry = False
litellm.suppress_debug_info = True

address, key = sys.argv[1:]
loop = asyncio.Runner()
texts = ["What is a list?", "A list is a sequence of values.", "Hello"]
place: dict[str, Any] = {"api_base": f"{address}/v1", "api_key": key, "num_retries": 0}
# Otherwise it counts tokens with a tokenizer that it downloads.
options: dict[str, Any] = {"base_url": f"{address}/v1", "api_key": key, "check_embedding_ctx_length": False}


def alike(one: list[float], other: list[float]) -> bool:
    return len(one) == len(other) and sum(a * b for a, b in zip(one, other, strict=True)) > 0.995


def langchain_documents_and_queries() -> None:
    embeddings = OpenAIEmbeddings(model="demo", **options)
    documents = embeddings.embed_documents(texts)
    assert len(documents) == len(texts) and alike(documents[0], embeddings.embed_query(texts[0]))


def langchain_dimensions() -> None:
    assert len(OpenAIEmbeddings(model="demo", dimensions=16, **options).embed_query(texts[0])) == 16


def langchain_asynchronously() -> None:
    embeddings = OpenAIEmbeddings(model="demo", **options)
    assert alike(loop.run(embeddings.aembed_query(texts[0])), embeddings.embed_query(texts[0]))


def litellm_embeddings(provider: str) -> None:
    answer = litellm.embedding(model=f"{provider}/demo", input=texts, **place)
    assert [each["index"] for each in answer.data] == [0, 1, 2] and answer.usage.prompt_tokens > 10
    again = loop.run(litellm.aembedding(model=f"{provider}/demo", input=texts[:1], **place))
    assert alike(again.data[0]["embedding"], answer.data[0]["embedding"])


def litellm_rerank() -> None:
    answer = litellm.rerank(
        model="hosted_vllm/demo", query=texts[0], documents=texts, top_n=2, api_base=address, api_key=key
    )
    assert len(answer.results) == 2 and answer.results[0]["index"] == 0
    assert answer.results[0]["relevance_score"] > 0.99


calls: list[tuple[Any, ...]] = [
    (langchain_documents_and_queries,),
    (langchain_dimensions,),
    (langchain_asynchronously,),
    (litellm_embeddings, "openai"),
    (litellm_embeddings, "hosted_vllm"),
    (litellm_rerank,),
]
with loop:
    for call, *arguments in calls:
        call(*arguments)
        print("-".join([call.__name__, *arguments]))
