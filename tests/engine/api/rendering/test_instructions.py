"""System and developer messages reach the model wherever they are in a conversation, also with strict templates."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire_engine.api.rendering_worker import Conversation, prompt_text
from quire_engine.errors import InvalidRequest
from quire_engine.text.chat_template import ChatTemplate

Serving = Callable[..., Any]

_EACH = "{% for m in messages %}%s<{{ m.role }}>{{ m.content }}{% endfor %}"


def of_each(before: str = "") -> str:
    return _EACH.replace("%s", before)


_LATER = "{% if m.role == 'system' and not loop.first %}"
IN_ORDER = of_each()
REFUSING = of_each(_LATER + "{{ raise_exception('System message must be at the beginning.') }}{% endif %}")
FAILING = of_each(_LATER + "{{ m.content + 1 }}{% endif %}")
FIRST_ONLY = of_each(_LATER + "{% continue %}{% endif %}")
LAST_ONLY = (
    "{% set ns = namespace(s='') %}{% for m in messages %}{% if m.role == 'system' %}{% set ns.s = m.content %}"
    "{% endif %}{% endfor %}<system>{{ ns.s }}"
    "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
PARTS = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}{% endif %}"
    "<{{ m.role }}>{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
)
DEVELOPER_FIRST_ONLY = (  # as the template of gpt-oss
    "{% if messages[0].role in ('developer', 'system') %}<developer>{{ messages[0].content }}{% endif %}"
    "{% for m in messages if m.role not in ('developer', 'system') %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
NO_DEVELOPER = (  # mentions the role and does not render it
    "{# developer #}{% for m in messages if m.role != 'developer' %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
TEMPLATES = {
    name: ChatTemplate(source, {})
    for name, source in globals().copy().items()
    if name.isupper() and isinstance(source, str) and not name.startswith("_")
}


def message(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def prompt(template: str, *messages: dict[str, Any], **options: Any) -> str:
    return prompt_text(TEMPLATES[template], Conversation(messages=messages, **options))


USER, ANSWER = message("user", "Hi"), message("assistant", "Ho")


@pytest.mark.parametrize("template", ["REFUSING", "FAILING", "FIRST_ONLY", "LAST_ONLY", "PARTS"])
def test_later_instructions_join_the_first_message(template: str) -> None:
    a, b = message("system", "A"), message("developer", [{"type": "text", "text": "B"}, {"type": "text", "text": "C"}])
    for conversation in ((a, b, USER), (a, USER, b)):
        assert prompt(template, *conversation) == "<system>A\n\nB\nC<user>Hi"
    assert prompt(template, USER, ANSWER, b, USER) == "<system>B\nC<user>Hi<assistant>Ho<user>Hi"


def test_instructions_stay_in_place_where_the_template_renders_them() -> None:
    a, b = message("system", "A"), message("developer", "B")
    assert prompt("IN_ORDER", a, USER, b) == "<system>A<user>Hi<system>B"
    # A template that refuses them only behind the first message renders one message as it is.
    assert prompt("REFUSING", a, USER) == "<system>A<user>Hi"


def test_developer_is_system_where_the_template_omits_developer() -> None:
    assert prompt("NO_DEVELOPER", message("developer", "A"), USER) == "<system>A<user>Hi"
    assert prompt("DEVELOPER_FIRST_ONLY", message("developer", "A"), USER) == "<developer>A<user>Hi"
    mixed = [message("system", "A"), message("developer", "B"), USER]
    assert prompt("DEVELOPER_FIRST_ONLY", *mixed) == "<developer>A\n\nB<user>Hi"


def test_error_of_the_conversation_as_sent_is_reported() -> None:
    template = ChatTemplate("{{ raise_exception('not ' + messages[0].role) }}", {})
    with pytest.raises(InvalidRequest, match="not user"):
        prompt_text(template, Conversation(messages=[USER, message("system", "A")]))


def test_final_instructions_that_are_continued_are_not_moved() -> None:
    with pytest.raises(InvalidRequest, match="must be at the beginning"):
        prompt("REFUSING", USER, message("system", "A"), continue_final_message=True)
    prefilled = [USER, message("system", "A"), message("assistant", "So")]
    assert prompt("REFUSING", *prefilled, continue_final_message=True) == "<system>A<user>Hi<assistant>So"


ROLES = st.lists(st.sampled_from(["system", "developer", "user", "assistant"]), min_size=1, max_size=8)


@settings(deadline=None)
@given(roles=ROLES, template=st.sampled_from(sorted(TEMPLATES)))
def test_no_message_of_a_conversation_is_lost(roles: list[str], template: str) -> None:
    messages = [message(role, f"[{number}]") for number, role in enumerate(roles)]
    text = prompt(template, *messages)
    for group in (("system", "developer"), ("user", "assistant")):
        places = [text.find(one["content"]) for one in messages if one["role"] in group]
        assert -1 not in places and places == sorted(places)


async def test_all_routes_serve_later_instructions_with_strict_templates(serving: Serving) -> None:
    """Claude Code sends its list of agents as a system message after the user's, Codex its rules as developer."""
    later = [{"role": "user", "content": "Hi"}, {"role": "system", "content": "B"}]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/messages": {"max_tokens": 5, "system": "A", "messages": later},
        "/v1/messages/count_tokens": {"system": "A", "messages": later},
        "/v1/responses": {"instructions": "A", "input": [message("developer", "B"), USER]},
        "/v1/chat/completions": {"messages": [message("system", "A"), message("developer", "B"), USER]},
        "/tokenize": {"messages": [message("system", "A"), USER, message("developer", "B")]},
    }
    async with serving("ok", template=REFUSING) as server:
        for path, body in bodies.items():
            answer = await server.http.post(path, json={"model": "demo", **body})
            assert answer.status_code == 200, (path, answer.text)
            if path == "/v1/messages/count_tokens":
                assert answer.json()["input_tokens"] == len("<system>A\n\nB<user>Hi")
        prompts = [server.context.tokenizer.decode(stream.prompt) for stream in server.engine.streams]
        assert prompts == ["<system>A\n\nB<user>Hi"] * 3
        turns = [USER, ANSWER, message("developer", "B"), USER]
        answer = await server.http.post("/v1/responses", json={"model": "demo", "input": turns})
        assert answer.status_code == 200
