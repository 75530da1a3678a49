from pathlib import Path

import pytest

from quire_engine.config import ModelTextOptions
from quire_engine.errors import ModelFolderError
from quire_engine.model_folder import ConfigOverrides
from quire_engine.text.chat_template import ChatTemplate
from quire_engine.text.model_text import (
    ModelText,
    SamplingDefaults,
    end_problem,
    load_model_text,
    load_sampling_defaults,
)
from quire_engine.text.tokenizer import Tokenizer


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, SamplingDefaults()),
        ("{}", SamplingDefaults()),
        (
            '{"temperature": 0.6, "top_p": 1, "top_k": 50}',
            SamplingDefaults(params={"temperature": 0.6, "top_p": 1.0, "top_k": 50}),
        ),
        ('{"top_k": 0, "temperature": null}', SamplingDefaults()),
        ('{"top_k": -1, "repetition_penalty": 0, "top_p": 0}', SamplingDefaults()),
        ('{"repetition_penalty": 0.0}', SamplingDefaults()),
        (
            '{"repetition_penalty": 1.1, "typical_p": 0.9, "max_new_tokens": 64}',
            SamplingDefaults(params={"repetition_penalty": 1.1, "typical_p": 0.9}, max_new_tokens=64),
        ),
    ],
)
def test_sampling_defaults_are_read_from_generation_config(
    tmp_path: Path, content: str | None, expected: SamplingDefaults
) -> None:
    if content is not None:
        (tmp_path / "generation_config.json").write_text(content)
    assert load_sampling_defaults(tmp_path) == expected


@pytest.mark.parametrize(
    "content",
    [
        '{"temperature": "hot"}',
        '{"temperature": -1}',
        '{"top_p": 3}',
        '{"top_k": 1.5}',
        '{"top_k": -2}',
        '{"top_k": false}',
        '{"repetition_penalty": -1}',
        '{"max_new_tokens": true}',
        "nope",
    ],
)
def test_a_default_out_of_range_stops_the_start(tmp_path: Path, content: str) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ModelFolderError, match=r"generation_config\.json"):
        load_sampling_defaults(tmp_path)


@pytest.mark.parametrize(
    ("ignore_file", "expected"),
    [(False, {"top_p": 0.9, "temperature": 0.2}), (True, {"temperature": 0.2})],
)
def test_overrides_replace_the_models_defaults(tmp_path: Path, ignore_file: bool, expected: dict[str, float]) -> None:
    (tmp_path / "generation_config.json").write_text('{"top_p": 0.9, "temperature": 1.5}')
    overrides = ConfigOverrides(generation={"temperature": 0.2})
    assert load_sampling_defaults(tmp_path, overrides, ignore_file=ignore_file).params == expected


CHATML = "{% for m in messages %}{{ m.role }}:{{ m.content }}<|eos|>\n{% endfor %}"


@pytest.mark.parametrize(
    ("template", "eos", "problem"),
    [
        (CHATML, ("<|eos|>",), None),
        (CHATML, ("<|bos|>",), "<|eos|>"),
        (CHATML, (), "names no end-of-sequence token"),
        (None, ("<|bos|>",), None),
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}", ("<|bos|>",), None),
        ("{{ raise_exception('no') }}", ("<|bos|>",), None),
    ],
)
def test_a_turn_that_ends_without_eos_is_reported(
    byte_level: Tokenizer, template: str | None, eos: tuple[str, ...], problem: str | None
) -> None:
    compiled = None if template is None else ChatTemplate(template, {})
    text = ModelText(tokenizer=byte_level, chat_template=compiled, sampling_defaults=SamplingDefaults())
    ids = [byte_level.encode(token, add_special_tokens=False)[0] for token in eos]
    found = end_problem(text, ids)
    assert found is None if problem is None else found is not None and problem in found


def test_tokenizer_and_template_come_from_another_folder(
    model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    (model_folder / "chat_template.jinja").write_text("its own")
    empty = tmp_path_factory.mktemp("weights only")
    text = load_model_text(empty, ModelTextOptions(tokenizer=model_folder))
    assert text.chat_template is not None and text.chat_template.render([]) == "its own"
    assert text.tokenizer.decode(text.tokenizer.encode("hi", add_special_tokens=False)) == "hi"


def test_variables_of_the_command_line_reach_the_template(model_folder: Path) -> None:
    (model_folder / "chat_template.jinja").write_text("{{ enable_thinking }}")
    text = load_model_text(model_folder, ModelTextOptions(chat_template_kwargs={"enable_thinking": False}))
    assert text.chat_template is not None
    assert text.chat_template.render([]) == "False"
    assert text.chat_template.render([], variables={"enable_thinking": True}) == "True"
