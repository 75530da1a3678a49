"""The demo models in examples/models are complete, match their records, and the draft model speeds up the target."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from fixed_drafts import use_every_draft

from quire_engine.config import CacheOptions, EngineConfig, ModelOptions, ServerOptions, SpeculationOptions
from quire_engine.core.options import SchedulerOptions
from quire_engine.core.sampling_params import SamplingParams
from quire_engine.core.sequence import Request
from quire_engine.engine import make_engine
from quire_engine.runner import load_model
from quire_engine.text.chat_template import ChatTemplate
from quire_engine.text.tokenizer import load_tokenizer

MODELS = Path(__file__).resolve().parents[2] / "examples" / "models"
TARGET, DRAFT, TOOLS = MODELS / "quire-demo", MODELS / "quire-demo-draft", MODELS / "quire-demo-tools"
QUESTIONS = ("What is a list comprehension?", "Explain the with statement.", "What are slicings?", "What is a tuple?")


def read_json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def test_models_are_small_and_match_their_records() -> None:
    assert sum(file.stat().st_size for folder in (TARGET, DRAFT, TOOLS) for file in folder.iterdir()) <= 21_000_000
    recorded = read_json(MODELS / "training.json")["weights_sha256"]
    recorded["quire-demo-tools"] = read_json(TOOLS / "training.json")["weights_sha256"]
    for folder in (TARGET, DRAFT, TOOLS):
        weights = (folder / "model.safetensors").read_bytes()
        assert hashlib.sha256(weights).hexdigest() == recorded[folder.name]


def test_draft_shares_everything_that_turns_text_into_tokens() -> None:
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (TARGET / file).read_bytes() == (DRAFT / file).read_bytes(), file


def test_end_of_text_and_end_of_turn_both_stop() -> None:
    stops = read_json(TARGET / "generation_config.json")["eos_token_id"]
    tokenizer = load_tokenizer(TARGET)
    assert [[stop] for stop in stops] == [
        tokenizer.encode(name, add_special_tokens=False) for name in ("<|end_of_text|>", "<|im_end|>")
    ]


def test_chat_template_writes_one_turn_per_message() -> None:
    template = ChatTemplate((TARGET / "chat_template.jinja").read_text(), {"bos_token": "<|begin_of_text|>"})
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": "Hello!"},
    ]
    assert template.render(messages, add_generation_prompt=True) == (
        "<|begin_of_text|>"
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello!<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.fixture(scope="module")
def answers() -> tuple[Any, list[str]]:
    """Return the counters of an engine that drafts four tokens wherever it can, and its greedy answers."""
    options = SpeculationOptions(method="draft_model", model=DRAFT, max_tokens=4)
    config = EngineConfig(
        model=ModelOptions(path=TARGET, dtype="float32", max_model_len=512),
        cache=CacheOptions(kv_cache_memory_bytes=2**27),
        scheduler=SchedulerOptions(max_num_seqs=16),
        server=ServerOptions(),
        speculation=options,
        threads=2,
    )
    engine = make_engine(load_model(config), scheduler=config.scheduler, speculation=options)
    use_every_draft(engine._scheduler._speculation)
    tokenizer = load_tokenizer(TARGET)
    template = ChatTemplate((TARGET / "chat_template.jinja").read_text(), {"bos_token": "<|begin_of_text|>"})
    params = SamplingParams(max_tokens=96, temperature=0.0)
    for key, question in enumerate(QUESTIONS):
        text = template.render([{"role": "user", "content": question}], add_generation_prompt=True)
        prompt = tokenizer.encode(text, add_special_tokens=False)
        assert engine.add(Request(key=key, prompt_token_ids=prompt, params=params, seed=0)) is None
    ids: dict[int, list[int]] = {key: [] for key in range(len(QUESTIONS))}
    while engine.has_work:
        if (output := engine.step()) is not None:
            for key, token_id in zip(output.keys, output.token_ids, strict=True):
                ids[key].append(token_id)
    engine.close()
    return engine.counters, [tokenizer.decode(each) for each in ids.values()]


def test_target_answers_in_english_about_python(answers: Any) -> None:
    _, (about_lists, about_with, *_) = answers
    assert all(word in about_lists for word in ("list", "expressions", "brackets"))
    assert all(word in about_with for word in ("with", "statement", "context"))


def test_draft_model_mostly_agrees_with_the_target(answers: Any) -> None:
    counters, _ = answers
    assert counters.draft_tokens > 100
    assert counters.accepted_tokens > 0.3 * counters.draft_tokens
