"""Content in parts reaches a chat template as its author expects, which transformers' rendering shows."""

from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from quire_engine.api.body import validate_body
from quire_engine.api.chat import ChatCompletionRequest
from quire_engine.api.rendering_worker import Conversation, prompt_text
from quire_engine.text.chat_template import ChatTemplate

EITHER = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for part in m.content %}{{ part.text | trim }}{% endfor %}{% endif %}{% endfor %}"
)
MAPPED = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}"
    "{% else %}{{ m.content | map(attribute='text') | join('+') }}{% endif %}{% endfor %}"
)
PARTS_ONLY = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}"
)
TEXT_ONLY = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
TEXT_JOINED = "{% for m in messages %}{{ '<' + m.role + '>' + m.content }}{% endfor %}"
FIRST_OF_SYSTEM = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}"
    "{% elif m.role == 'system' %}{{ m.content[0].text }}"
    "{% else %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}"
)


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def prompt(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    body = validate_body(ChatCompletionRequest, {"model": "m", "messages": messages}, lenient=False)
    settings: dict[str, Any] = {"add_generation_prompt": False, **options}
    return prompt_text(ChatTemplate(source, {}), Conversation(messages=body.messages, **settings))


@pytest.mark.parametrize("source", [EITHER, MAPPED, PARTS_ONLY])
@pytest.mark.parametrize("texts", [["a"], ["a ", " b"], []])
def test_templates_for_content_parts_receive_parts(source: str, texts: list[str]) -> None:
    messages = [{"role": "system", "content": parts(*texts)}, {"role": "user", "content": parts(*texts, "end")}]
    reference = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE()))
    assert prompt(source, messages) == reference.apply_chat_template(messages, chat_template=source, tokenize=False)


@pytest.mark.parametrize("source", [TEXT_ONLY, TEXT_JOINED])
def test_templates_for_text_receive_joined_text(source: str) -> None:
    assert prompt(source, [{"role": "user", "content": parts("a", "b")}]) == "<user>a\nb"


def test_text_reaches_a_template_that_reads_parts_alone() -> None:
    assert prompt(PARTS_ONLY, [{"role": "user", "content": "Hi"}]) == "<user>Hi"


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_earlier_reasoning_is_accepted_under_two_names(name: str) -> None:
    source = "{% for m in messages %}{{ m.reasoning_content }}/{{ m.content }}{% endfor %}"
    assert prompt(source, [{"role": "assistant", "content": "4", name: "2+2"}]) == "2+2/4"


def test_all_parts_reach_a_role_that_renders_one() -> None:
    messages = [{"role": "system", "content": parts("a", "b")}, {"role": "user", "content": parts("c", "d")}]
    assert prompt(FIRST_OF_SYSTEM, messages) == "<system>a\nb<user>cd"


def test_the_last_part_of_an_answer_is_continued() -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": parts("One, ", "two,")}]
    text = prompt(MAPPED + "<end>", messages, continue_final_message=True)
    assert text == "<user>Hi<assistant>One, +two,"
