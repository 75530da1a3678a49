"""quire-engine with a model that only transformers supports: a tiny GPT-2, used with OpenAI's own client."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel

TEXT = ["The quick brown fox jumps over the lazy dog.", "Pack my box with five dozen liquor jugs."]


def save_model(folder: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    torch.manual_seed(2)
    size = tokenizer.get_vocab_size()
    config = GPT2Config(vocab_size=size, n_embd=32, n_head=2, n_layer=2, n_positions=96, bos_token_id=0, eos_token_id=0)
    model: Any = GPT2LMHeadModel(config)
    model.save_pretrained(folder)


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, start_server: Callable[..., AbstractContextManager[Any]]
) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("gpt2") / "tiny-gpt2"
    folder.mkdir()
    save_model(folder)
    with start_server("--model", str(folder), "--kv-cache-memory-bytes", "8MiB") as started:
        yield started


def test_log_names_the_transformers_class(server: Any) -> None:
    log = "".join(server.log)
    assert "tiny-gpt2 is served by transformers' GPT2LMHeadModel" in log
    assert "Loading weights" not in log  # the progress output of transformers


def test_completions_are_equal_alone_and_in_a_batch(server: Any) -> None:
    def ask(prompt: str, **options: Any) -> str:
        answer = server.openai.completions.create(
            model="demo", prompt=prompt, max_tokens=12, temperature=0, extra_body={"ignore_eos": True}, **options
        )
        assert answer.usage is not None and answer.usage.completion_tokens == 12
        return answer.choices[0].text

    alone = [ask(text) for text in TEXT]
    together = server.openai.completions.create(
        model="demo", prompt=TEXT, max_tokens=12, temperature=0, extra_body={"ignore_eos": True}
    )
    assert [choice.text for choice in together.choices] == alone


def test_position_limit_bounds_the_prompt(server: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="context of 96 tokens"):
        server.openai.completions.create(model="demo", prompt="!" * 300, max_tokens=1)
