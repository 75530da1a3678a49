"""The demo model that calls tools: its folder is that of its record, and its data depend on the seed alone."""

import hashlib
import json
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from example_scripts import MODELS, example_modules

from quire_engine.text.chat_template import ChatTemplate

FOLDER = MODELS / "quire-demo-tools"


@pytest.fixture(scope="module")
def script() -> Iterator[SimpleNamespace]:
    names = ("evaluation", "tool_dialogues", "tool_evaluation", "tool_vocabulary", "train_tools")
    with example_modules(*names) as modules:
        yield modules


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(FOLDER, local_files_only=True)


@pytest.fixture(scope="module")
def choices(script: SimpleNamespace) -> Any:
    return script.tool_evaluation.held_out_choices(*script.train_tools.split_words())


@pytest.fixture(scope="module")
def choice(script: SimpleNamespace) -> Any:
    words, _ = script.train_tools.split_words()
    return script.tool_dialogues.Choice(values=script.tool_dialogues.Values(words=words, invented=0.5))


def test_the_folder_is_small_and_that_of_its_record() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 5_000_000
    record = json.loads((FOLDER / "training.json").read_text())
    weights = (FOLDER / "model.safetensors").read_bytes()
    assert hashlib.sha256(weights).hexdigest() == record["weights_sha256"]
    assert record["evaluation"]["right"]["new combinations"]["one call"] >= 0.9


def test_dialogues_depend_on_the_seed_alone(choice: Any) -> None:
    first, again, other = ([choice.dialogue(random.Random(seed), 4) for _ in range(3)] for seed in (1, 1, 2))
    assert first == again != other


def test_training_shows_no_pair_of_the_evaluation(script: SimpleNamespace, choices: Any, choice: Any) -> None:
    rng = random.Random(5)
    for chosen, held_out in ((choice, False), (choices["new combinations"], True)):
        for tool in chosen.tools(rng, 4):
            for _ in range(50):
                (call,) = chosen.calls(tool, rng, 1).calls
                (value,) = call.arguments.values()
                assert script.tool_dialogues.is_held_out(tool.kind.noun, value) is held_out


def test_words_and_cities_of_the_evaluation_are_not_in_training(script: SimpleNamespace) -> None:
    seen, held_out = script.train_tools.split_words()
    assert len(held_out) > 100 and not set(seen) & set(held_out)
    assert not set(script.tool_dialogues.CITIES) & set(script.tool_dialogues.HELD_OUT_CITIES)


def test_only_the_text_of_the_assistant_is_learned(script: SimpleNamespace, choice: Any, tokenizer: Any) -> None:
    rng = random.Random(3)
    for _ in range(20):
        dialogue = choice.dialogue(rng, 3)
        example = script.tool_vocabulary.encode_tool_dialogue(tokenizer, dialogue)
        learned = "".join(
            tokenizer.decode(token) for token, counts in zip(example.tokens, example.learned, strict=True) if counts
        )
        answers = learned.removesuffix("<|im_end|>").split("<|im_end|>")
        exchanges = [text for exchange in dialogue.exchanges for text in expected_texts(exchange)]
        assert answers == exchanges


def expected_texts(exchange: Any) -> list[str]:
    """Return what the assistant writes in an exchange."""
    calls = [
        f"<tool_call>\n{json.dumps({'name': call.name, 'arguments': call.arguments}, ensure_ascii=False)}\n</tool_call>"
        for call in exchange.calls
    ]
    return [*(["\n".join(calls)] if calls else []), exchange.answer]


def test_the_engine_renders_prompts_as_in_training(script: SimpleNamespace, choice: Any, tokenizer: Any) -> None:
    """Requests have arguments as JSON text and more fields than the training's messages."""
    template = ChatTemplate((FOLDER / "chat_template.jinja").read_text(), {"bos_token": tokenizer.bos_token})
    rng = random.Random(4)
    for _ in range(20):
        tools = choice.tools(rng, 3)
        exchange = choice.exchange(tools, rng)
        messages = exchange.messages()[:-1]
        trained = tokenizer.decode(script.tool_vocabulary.rendered(tokenizer, tools, messages))
        rendered = template.render(messages, tools=[tool.declaration() for tool in tools], add_generation_prompt=True)
        assert rendered == trained
