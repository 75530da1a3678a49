"""Chat templates compared with transformers' own rendering, which is imported here and never in the API process.

`templates/` contains templates in the style of common families, written for these tests.
"""

from pathlib import Path
from typing import Any

import pytest
from template_reference import CONVERSATIONS, NAMED, OPTIONS, ours, reference_tokenizer, theirs

from quire_engine.errors import InvalidRequest, ModelFolderError
from quire_engine.text.chat_template import ChatTemplate, load_chat_template

FAMILIES = {file.stem: file.read_text() for file in sorted((Path(__file__).parent / "templates").glob("*.jinja"))}


@pytest.fixture(scope="module")
def reference() -> Any:
    return reference_tokenizer()


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_renders_as_transformers_does(reference: Any, family: str, conversation: str) -> None:
    source, messages = FAMILIES[family], CONVERSATIONS[conversation]
    for options in OPTIONS:
        expected = theirs(reference, source, messages, **dict(options))
        assert ours(source, messages, **options) == expected, options


def test_the_comparison_is_not_empty(reference: Any) -> None:
    texts = [theirs(reference, source, messages) for source in FAMILIES.values() for messages in CONVERSATIONS.values()]
    assert sum(text != "refused" for text in texts) > len(texts) / 2


@pytest.mark.parametrize("content", ["The answer is", "The answer is  ", "  The answer"])
@pytest.mark.parametrize("family", ["chatml", "headers", "instructions", "turns"])
def test_a_continued_message_stays_open(reference: Any, family: str, content: str) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": content}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    text = ours(FAMILIES[family], messages, **options)
    assert text == theirs(reference, FAMILIES[family], messages, **options)
    assert text.endswith((content.strip(), content))


@pytest.mark.parametrize(
    ("source", "part"),
    [
        ("{{ raise_exception('no such role') }}", "no such role"),
        ("{{ messages[5].content }}", "messages"),
        ("{{ messages[0].content + 1 }}", "str"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% set n = namespace(__init__=1) %}", "__init__"),
        ("{{ range(1000000000) | list }}", "range"),
        ("{{ messages.append(1) }}", "unsafe"),
    ],
)
def test_template_error_is_an_invalid_request(source: str, part: str) -> None:
    with pytest.raises(InvalidRequest, match=part) as caught:
        ChatTemplate(source, NAMED).render([{"role": "user", "content": "Hi"}])
    assert caught.value.param == "messages"


def test_a_message_that_the_template_drops_cannot_be_continued() -> None:
    with pytest.raises(InvalidRequest, match="continue_final_message"):
        ChatTemplate("nothing", NAMED).render([{"role": "user", "content": "Hi"}], continue_final_message=True)


def test_templates_can_read_the_current_date() -> None:
    text = ChatTemplate("{{ strftime_now('%Y') }}", NAMED).render([{"role": "user", "content": "Hi"}])
    assert len(text) == 4 and text.isdigit()


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"tokenizer_config.json": '{"chat_template": "one"}'}, "one"),
        ({"tokenizer_config.json": '{"chat_template": "one"}', "chat_template.jinja": "two"}, "two"),
        (
            {
                "tokenizer_config.json": '{"chat_template": [{"name": "tool_use", "template": "t"},'
                '{"name": "default", "template": "d"}]}'
            },
            "d",
        ),
        ({"chat_template.jinja": "two", "mine.jinja": "mine"}, "mine"),
        ({"chat_template.json": '{"chat_template": "three"}', "tokenizer_config.json": "{}"}, "three"),
        ({"chat_template.json": '{"chat_template": "three"}', "chat_template.jinja": "two"}, "two"),
        ({"chat_template.json": '{"chat_template": {"default": "d", "rag": "r"}}'}, "d"),
        ({"additional_chat_templates/tool_use.jinja": "t"}, None),
        ({"additional_chat_templates/default.jinja": "d"}, "d"),
    ],
)
def test_chat_template_is_found_in_the_folder(tmp_path: Path, files: dict[str, str], expected: str | None) -> None:
    (tmp_path / "additional_chat_templates").mkdir()
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    override = tmp_path / "mine.jinja" if "mine.jinja" in files else None
    template = load_chat_template(tmp_path, override, NAMED)
    assert (template and template.render([{"role": "user", "content": ""}])) == expected


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("chat_template.jinja", "a\n{% if %}", "line 2"),
        ("tokenizer_config.json", '{"chat_template": "{% endfor %}"}', "tokenizer_config.json"),
        ("tokenizer_config.json", "{", "JSON"),
        ("tokenizer_config.json", "[]", "instead of a JSON object"),
    ],
)
def test_a_broken_template_stops_the_start(tmp_path: Path, name: str, content: str, part: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ModelFolderError, match=part):
        load_chat_template(tmp_path, None, NAMED)


def test_a_template_flag_that_names_no_file_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match=r"none\.jinja"):
        load_chat_template(tmp_path, tmp_path / "none.jinja", NAMED)


def test_one_of_several_templates_is_chosen_by_name(tmp_path: Path) -> None:
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("t")
    (tmp_path / "chat_template.jinja").write_text("d")
    template = load_chat_template(tmp_path, Path("tool_use"), NAMED)
    assert template is not None and template.render([]) == "t"
    with pytest.raises(ModelFolderError, match="default, tool_use"):
        load_chat_template(tmp_path, Path("rag"), NAMED)
