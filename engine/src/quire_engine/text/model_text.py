"""The text side of a model folder, which is read before anything slow: tokenizer, chat template, sampling defaults."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire_engine.config import ModelTextOptions
from quire_engine.core.sampling_params import MODEL_RANGES, ModelRange
from quire_engine.errors import InvalidRequest, ModelFolderError
from quire_engine.model_folder import NO_OVERRIDES, ConfigOverrides, read_generation_config
from quire_engine.text.answers.formats import AnswerFormats, formats_of
from quire_engine.text.chat_template import ChatTemplate, load_chat_template
from quire_engine.text.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """The values that apply where a request sets none, by the model's generation_config.json."""

    params: Mapping[str, float] = field(default_factory=dict)
    """Values of SamplingParams by field name; a field that is missing keeps its own default."""
    max_new_tokens: int | None = None
    """An upper bound for requests that set no limit of their own."""


def load_sampling_defaults(
    folder: Path, overrides: ConfigOverrides = NO_OVERRIDES, *, ignore_file: bool = False
) -> SamplingDefaults:
    """Read generation_config.json of a model folder. Raises ModelFolderError where a value is out of its range.

    With ``ignore_file`` only the overrides count.
    """
    file = folder / "generation_config.json"
    config = dict(overrides.generation) if ignore_file else read_generation_config(folder, overrides)
    params = {
        name: _checked(file, name, value, permitted)
        for name, permitted in MODEL_RANGES.items()
        if (value := config.get(name)) is not None and (isinstance(value, bool) or value not in permitted.unset)
    }
    limit = config.get("max_new_tokens")
    permitted = ModelRange(lowest=1, highest=2**31, whole=True)
    return SamplingDefaults(
        params=params,
        max_new_tokens=None if limit is None else int(_checked(file, "max_new_tokens", limit, permitted)),
    )


def _checked(file: Path, name: str, value: Any, permitted: ModelRange) -> float:
    types = int if permitted.whole else int | float
    if isinstance(value, bool) or not isinstance(value, types) or not permitted.lowest <= value <= permitted.highest:
        kind = "an integer" if permitted.whole else "a number"
        raise ModelFolderError(
            f"{file}: {name} is {value!r}; expected {kind} from {permitted.lowest:g} to {permitted.highest:g} "
            "(--generation-config none ignores this file)"
        )
    return value if permitted.whole else float(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelText:
    """The text side of a model."""

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    sampling_defaults: SamplingDefaults
    formats: AnswerFormats = AnswerFormats()


def load_model_text(folder: Path, options: ModelTextOptions, overrides: ConfigOverrides = NO_OVERRIDES) -> ModelText:
    """Load the text side of a model folder. Raises ModelFolderError."""
    tokenizer = load_tokenizer(options.tokenizer or folder)
    template = load_chat_template(
        options.tokenizer or folder,
        options.chat_template,
        {**tokenizer.named_tokens, **options.chat_template_kwargs},
    )
    return ModelText(
        tokenizer=tokenizer,
        chat_template=template,
        formats=formats_of(
            None if template is None else template.source, options.tool_call_parser, options.reasoning_parser
        ),
        sampling_defaults=load_sampling_defaults(folder, overrides, ignore_file=options.generation_config == "none"),
    )


def end_problem(text: ModelText, eos_token_ids: Sequence[int]) -> str | None:
    """Return why answers may not end where the model ends them; None if the chat template's turns end with an eos."""
    if not eos_token_ids:
        return (
            "the model folder names no end-of-sequence token: answers end at max_tokens or at a stop string only; set "
            "one with --override-generation-config '{\"eos_token_id\": N}'"
        )
    token_id = None if text.chat_template is None else _turn_end(text.chat_template, text.tokenizer)
    if token_id is None or token_id in eos_token_ids:
        return None
    ends = [*eos_token_ids, token_id]
    return (
        f"the chat template ends an assistant's turn with {text.tokenizer.decode([token_id])!r} (token {token_id}), "
        "which is not an end-of-sequence token of the model: chat answers may run on; add it with "
        "--override-generation-config "
        f"'{{\"eos_token_id\": {ends}}}'"
    )


_ANSWER = "Yes."


def _turn_end(template: ChatTemplate, tokenizer: Tokenizer) -> int | None:
    """Return the first special token after an assistant's message; None where the template writes none."""
    conversation = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": _ANSWER}]
    try:
        rendered = template.render(conversation, add_generation_prompt=False)
    except InvalidRequest:
        return None
    _, found, rest = rendered.rpartition(_ANSWER)
    ids = tokenizer.encode(rest, add_special_tokens=False) if found else []
    return next((token_id for token_id in ids if token_id in tokenizer.special_ids), None)
