"""All that a model folder says about text, read at once before anything slow."""

from dataclasses import dataclass
from pathlib import Path

from quire_engine.config import TextOptions
from quire_engine.text.chat_template import ChatTemplate, load_chat_template
from quire_engine.text.generation_config import SamplingDefaults, load_sampling_defaults
from quire_engine.text.tokenizer import Tokenizer, load_tokenizer


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
