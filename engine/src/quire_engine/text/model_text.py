"""The text side of a model folder, which is read before anything slow: tokenizer, chat template, sampling defaults."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire_engine.config import TextOptions
from quire_engine.core.sampling_params import MODEL_RANGES, ModelRange
from quire_engine.errors import ModelFolderError
from quire_engine.model_folder import read_json_object
from quire_engine.text.chat_template import ChatTemplate, load_chat_template
from quire_engine.text.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """The values that apply where a request sets none, by the model's generation_config.json."""

    params: Mapping[str, float] = field(default_factory=dict)
    """Values of SamplingParams by field name; a field that is missing keeps its own default."""
    max_new_tokens: int | None = None
    """An upper bound for requests that set no limit of their own."""


def load_sampling_defaults(folder: Path) -> SamplingDefaults:
    """Read generation_config.json of a model folder. Raises ModelFolderError where a value is out of its range."""
    file = folder / "generation_config.json"
    config = read_json_object(file)
    params = {
        name: _checked(file, name, value, permitted)
        for name, permitted in MODEL_RANGES.items()
        if (value := config.get(name)) is not None and not (permitted.zero_is_unset and value == 0)
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


def load_model_text(folder: Path, options: TextOptions) -> ModelText:
    """Load the text side of a model folder. Raises ModelFolderError."""
    tokenizer = load_tokenizer(folder)
    ignored = options.generation_config == "none"
    return ModelText(
        tokenizer=tokenizer,
        chat_template=load_chat_template(folder, options.chat_template, tokenizer.named_tokens),
        sampling_defaults=SamplingDefaults() if ignored else load_sampling_defaults(folder),
    )
