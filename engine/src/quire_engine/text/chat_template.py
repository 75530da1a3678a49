"""Chat templates of models: from messages to the text of a prompt, in the environment that templates expect.

The reference is transformers' ``apply_chat_template``; tests compare the results. Templates come with models, so they
run in Jinja's sandbox and see plain JSON values only.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

from quire_engine.errors import InvalidRequest, ModelFolderError
from quire_engine.model_folder import read_json_object

_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
_MARK = "\U000f51c3continue\U000f51c3"
"""A mark after the message to continue; the space after the mark shows whether the template trims messages."""


TextParts = list[dict[str, str]]
"""The content of a message in parts, each {"type": "text", "text": …}."""

_PROBES = ("\U000f51c3one\U000f51c3", "\U000f51c3two\U000f51c3")
_PROBE_PARTS = [{"type": "text", "text": probe} for probe in _PROBES]
_CALL = {"id": "call_1", "type": "function", "function": {"name": "probe", "arguments": {}}}


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentForms:
    """The forms of a message's content that a template renders: one text, a list of parts, or both."""

    text: bool
    parts: bool

    @property
    def any(self) -> bool:
        """True if the template renders the content at all."""
        return self.text or self.parts


class ChatTemplate:
    """A compiled chat template. Raises ModelFolderError if the source is not a valid template."""

    def __init__(self, source: str, variables: Mapping[str, Any], *, origin: str = "chat template") -> None:
        """``variables`` are those that every conversation sees, such as bos_token, unless ``render`` gives others."""
        self.source = source
        self.variables = dict(variables)
        self._forms: dict[str, ContentForms] = {}
        self._omitting: dict[tuple[str, str], bool] = {}
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelFolderError(f"{origin}, line {error.lineno}: {error.message}") from error

    def mentions(self, word: str) -> bool:
        """Return whether the template's source contains this word, as it does for every role it handles."""
        return word in self.source

    def content_forms(self, role: str) -> ContentForms:
        """Return the forms of content that the template renders for a role.

        A template is a program that declares nothing, so a message of this role is rendered in both forms.
        """
        if role not in self._forms:
            self._forms[role] = ContentForms(
                text=_PROBES[0] in self._try_render(_conversation(role, _PROBES[0])),
                parts=_shows_parts(self._try_render(_conversation(role, _PROBE_PARTS))),
            )
        return self._forms[role]

    def omits_instructions(self, first: str, later: str) -> bool:
        """Return whether the template renders only one of two messages of these roles without refusing the other.

        Some templates know one place for instructions, and drop system messages elsewhere, or all but the last one.
        """
        if (first, later) not in self._omitting:
            question, answer = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
            one, two = (
                {"role": role, "content": probe if self.content_forms(role).text else [{"type": "text", "text": probe}]}
                for role, probe in zip((first, later), _PROBES, strict=True)
            )
            texts = (self._try_render([one, two, question]), self._try_render([one, question, answer, two, question]))
            self._omitting[first, later] = any(text and not all(each in text for each in _PROBES) for text in texts)
        return self._omitting[first, later]

    def _try_render(self, messages: list[dict[str, Any]]) -> str:
        try:
            return self.render(messages)
        except InvalidRequest:
            return ""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Return the text of a conversation. Raises InvalidRequest.

        ``variables`` are further variables of the template (chat_template_kwargs).
        """
        conversation = [_without_nulls(message) for message in messages]
        if continue_final_message:
            conversation[-1] = _marked(conversation[-1])
        names = {
            **self.variables,
            "messages": conversation,
            "tools": tools or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **(variables or {}),
        }
        text = self._render(names)
        return _up_to_mark(text) if continue_final_message else text

    def _render(self, names: dict[str, Any]) -> str:
        try:
            return self._template.render(names)
        except jinja2.TemplateError as error:
            raise InvalidRequest(
                f"messages: the model's chat template refuses them: {error}", param="messages"
            ) from error
        except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError) as error:
            # A template is a program that runs over the client's messages, so its errors are caused by them.
            raise InvalidRequest(
                f"messages: the model's chat template cannot render them: {error}", param="messages"
            ) from error


_DEFAULT = "default"
"""The name of the template that applies where no other is chosen."""


@dataclass(frozen=True, slots=True)
class _Source:
    text: str
    origin: str
    """The place of the text, for messages."""


def load_chat_template(folder: Path, override: Path | None, variables: Mapping[str, Any]) -> ChatTemplate | None:
    """Load the chat template of a model folder, or None if it has none. Raises ModelFolderError.

    ``override`` is a file, or the name of one of the folder's templates.
    """
    if override is not None and override.is_file():
        return _compiled(_read_source(override), variables)
    sources = _named_sources(folder)
    name = _DEFAULT if override is None else str(override)
    if name in sources:
        return _compiled(sources[name], variables)
    if override is None:
        return None
    others = f", nor a template of the model ({', '.join(sorted(sources))})" if sources else ""
    raise ModelFolderError(f"the chat template {override} cannot be read: it is not a file{others}")


def _compiled(source: _Source, variables: Mapping[str, Any]) -> ChatTemplate:
    return ChatTemplate(source.text, variables, origin=source.origin)


def _read_source(file: Path) -> _Source:
    try:
        return _Source(file.read_text(encoding="utf-8"), str(file))
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFolderError(f"the chat template {file} cannot be read: {error}") from error


def _named_sources(folder: Path) -> dict[str, _Source]:
    """Return the templates of a model folder by name, from every place in which transformers has kept them."""
    sources: dict[str, _Source] = {}
    for name in ("tokenizer_config.json", "chat_template.json"):
        origin = f"{folder / name}: chat_template"
        configured = read_json_object(folder / name).get("chat_template")
        if isinstance(configured, str):
            configured = {_DEFAULT: configured}
        elif isinstance(configured, list):
            configured = {entry.get("name"): entry.get("template") for entry in configured if isinstance(entry, dict)}
        if isinstance(configured, dict):
            sources |= {
                key: _Source(text, origin)
                for key, text in configured.items()
                if isinstance(key, str) and isinstance(text, str)
            }
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        sources[file.stem] = _read_source(file)
    if (folder / "chat_template.jinja").is_file():
        sources[_DEFAULT] = _read_source(folder / "chat_template.jinja")
    return sources


def _without_nulls(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the message without nulls, because templates test for presence, and with all names of its reasoning."""
    plain = {name: value for name, value in message.items() if value is not None}
    reasoning = next((plain[name] for name in _REASONING_NAMES if name in plain), None)
    return plain if reasoning is None else {"thinking": reasoning, **plain, "reasoning_content": reasoning}


def _conversation(role: str, content: str | TextParts) -> list[dict[str, Any]]:
    """Return a short conversation in which a message of this role has this content."""
    question = {"role": "user", "content": "Hi"}
    message = {"role": role, "content": content}
    match role:
        case "user":
            return [message]
        case "assistant":
            return [question, message]
        case "tool":
            call = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
            return [question, call, {**message, "tool_call_id": _CALL["id"], "name": "probe"}]
        case _:
            return [message, question]


def _shows_parts(text: str) -> bool:
    """Return whether both parts occur as text: a template that supports no parts may print the list as Python."""
    _, one, rest = text.partition(_PROBES[0])
    between, two, _ = rest.partition(_PROBES[1])
    return bool(one and two) and "type" not in between


def _marked(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, list) and content:
        *others, last = content
        return {**message, "content": [*others, {**last, "text": last["text"] + _MARK + " "}]}
    if not isinstance(content, str):
        raise InvalidRequest("messages: continue_final_message needs text in the last message", param="messages")
    return {**message, "content": content + _MARK + " "}


def _up_to_mark(text: str) -> str:
    place = text.rfind(_MARK)
    if place < 0:
        raise InvalidRequest(
            "messages: continue_final_message is not possible, because the model's chat template omits or rewrites the "
            "last message",
            param="messages",
        )
    trimmed = not text.startswith(_MARK + " ", place)
    return text[:place].rstrip() if trimmed else text[:place]


class _GenerationTag(jinja2.ext.Extension):
    """The tag ``{% generation %}``, which marks an assistant's text for training; here it only renders its body."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace without names that give access to Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *positional = args
        names = dict(*positional, **kwargs)
        for name in names:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, names)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace may not contain {name!r}")


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _new_dict
    environment.globals["namespace"] = _Namespace
    return environment


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Encode as JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _new_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)
