"""All that a model folder says about text, read at once before anything slow."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire_engine.config import TextOptions
from quire_engine.errors import ModelFolderError
from quire_engine.model_folder import read_json_object
from quire_engine.text.chat_template import ChatTemplate, load_chat_template
from quire_engine.text.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    max_new_tokens: int | None = None
    """An upper bound for requests that set no limit of their own."""


def load_sampling_defaults(folder: Path) -> SamplingDefaults:
    """Raises ModelFolderError where a value is out of its range."""
    file = folder / "generation_config.json"
    config = read_json_object(file)

    def number(name: str, lowest: float, highest: float, otherwise: float) -> float:
        value = config.get(name)
        if value is None:
            return otherwise
        return float(_checked(file, name, value, lowest, highest, (int, float)))

    top_k = config.get("top_k")
    limit = config.get("max_new_tokens")
    return SamplingDefaults(
        temperature=number("temperature", 0.0, 100.0, 1.0),
        top_p=number("top_p", 0.0, 1.0, 1.0) or 1.0,
        top_k=None if not top_k else int(_checked(file, "top_k", top_k, 1, 2**31, (int,))),
        min_p=number("min_p", 0.0, 1.0, 0.0),
        typical_p=number("typical_p", 0.0, 1.0, 1.0) or 1.0,
        repetition_penalty=number("repetition_penalty", 0.01, 100.0, 1.0),
        max_new_tokens=None if limit is None else int(_checked(file, "max_new_tokens", limit, 1, 2**31, (int,))),
    )


def _checked(
    file: Path, name: str, value: Any, lowest: float, highest: float, types: tuple[type[int] | type[float], ...]
) -> Any:
    if isinstance(value, bool) or not isinstance(value, types) or not lowest <= value <= highest:
        raise ModelFolderError(
            f"{file}: {name} is {value!r}; needed is a number from {lowest:g} to {highest:g} "
            "(--generation-config none leaves the file aside)"
        )
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelText:
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    sampling_defaults: SamplingDefaults


def load_model_text(folder: Path, options: TextOptions) -> ModelText:
    """Raises ModelFolderError."""
    tokenizer = load_tokenizer(folder)
    ignored = options.generation_config == "none"
    return ModelText(
        tokenizer=tokenizer,
        chat_template=load_chat_template(folder, options.chat_template, tokenizer.named_tokens),
        sampling_defaults=SamplingDefaults() if ignored else load_sampling_defaults(folder),
    )
