"""Valid names of an LLMDeployment and its children."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_operator.api.names import HEADLESS_SUFFIX, MAX_NAME_LENGTH, name_problem


@pytest.mark.parametrize("name", ["chat", "a", "llama-3-8b", "a" * MAX_NAME_LENGTH])
def test_valid_names_are_accepted(name: str) -> None:
    assert name_problem(name) is None


@pytest.mark.parametrize(
    "name", ["", "Chat", "3chat", "chat-", "chat.v1", "chat_1", "a" * (MAX_NAME_LENGTH + 1), "chat\n"]
)
def test_invalid_names_are_rejected(name: str) -> None:
    assert name_problem(name) is not None


@given(st.from_regex(r"[a-z]([-a-z0-9]*[a-z0-9])?", fullmatch=True))
def test_every_child_of_an_allowed_name_fits_a_dns_label(name: str) -> None:
    if name_problem(name) is None:
        assert len(f"{name}{HEADLESS_SUFFIX}") <= 63
