"""Fields of vLLM that the routes with other APIs than chat completions accept as well; they mean the same as there."""

from typing import Annotated, Any

from pydantic import Field

from quire_engine.server.openai.chat_schemas import TemplateVariables
from quire_engine.server.openai.schemas import Strict


class SamplingExtensions(Strict):
    """Sampling parameters and options of vLLM. None means that the client sets no value."""

    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    chat_template_kwargs: TemplateVariables | None = None
    thinking_token_budget: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None

    def extensions(self) -> dict[str, Any]:
        """Return the fields that the client sets, for a chat request."""
        return {
            name: value for name in SamplingExtensions.model_fields if (value := getattr(self, name, None)) is not None
        }
