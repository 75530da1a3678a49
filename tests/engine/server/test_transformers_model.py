"""quire-engine with a model that only transformers supports: a tiny GPT-2, used with OpenAI's own client."""

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel

TEXT = ["The quick brown fox jumps over the lazy dog.", "Pack my box with five dozen liquor jugs."]


@dataclass
class Server:
    log: str
    openai: openai.OpenAI


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
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("gpt2") / "tiny-gpt2"
    folder.mkdir()
    save_model(folder)
    command = [sys.executable, "-m", "quire_engine", "--model", str(folder), "--host", "127.0.0.1", "--port", "0"]
    command += ["--threads", "1", "--kv-cache-memory-bytes", "8MiB"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as child:
        try:
            log = _log_until_ready(child)
            found = re.search(r"listening on (http://\S+);", log)
            assert found is not None, log
            with openai.OpenAI(base_url=f"{found[1]}/v1", api_key="any", timeout=60) as client:
                yield Server(log, client)
        finally:
            child.kill()


def _log_until_ready(child: subprocess.Popen[str]) -> str:
    assert child.stderr is not None
    log = ""
    while " info    ready: " not in log:
        line = child.stderr.readline()
        assert line, log
        log += line
    return log


def test_log_names_the_transformers_class(server: Server) -> None:
    assert "tiny-gpt2 is served by transformers' GPT2LMHeadModel" in server.log
    assert "Loading weights" not in server.log  # the progress output of transformers


def test_completions_are_equal_alone_and_in_a_batch(server: Server) -> None:
    def ask(prompt: str, **options: Any) -> str:
        answer = server.openai.completions.create(
            model="tiny-gpt2", prompt=prompt, max_tokens=12, temperature=0, extra_body={"ignore_eos": True}, **options
        )
        assert answer.usage is not None and answer.usage.completion_tokens == 12
        return answer.choices[0].text

    alone = [ask(text) for text in TEXT]
    together = server.openai.completions.create(
        model="tiny-gpt2", prompt=TEXT, max_tokens=12, temperature=0, extra_body={"ignore_eos": True}
    )
    assert [choice.text for choice in together.choices] == alone


def test_position_limit_bounds_the_prompt(server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match="context of 96 tokens"):
        server.openai.completions.create(model="tiny-gpt2", prompt="!" * 300, max_tokens=1)
