"""Parameters of sampling and stopping; the names are those of the OpenAI API and of vLLM.

The server validates them once; afterwards they are only read. Stop *strings* are not here: they belong to the text
side, which sees characters; this side sees token ids.

A new parameter is one field here, one in ``server.openai.schemas`` and its computation in ``quire_kernels.sampling``:
the server, the messages between the processes, a model's own defaults and the samplers read the fields of this class.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

_MODEL_RANGE = "model_range"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRange:
    """The values that a model's generation_config.json may set as the default of a parameter."""

    lowest: float
    highest: float
    whole: bool = False
    """True where the value must be an integer."""
    unset: tuple[int, ...] = ()
    """The values which mean that the model sets no default."""


def _model_default(default: Any, lowest: float, highest: float, **options: Any) -> Any:
    return field(default=default, metadata={_MODEL_RANGE: ModelRange(lowest=lowest, highest=highest, **options)})


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningPhase:
    """The reasoning at the start of an answer, between two tags that are a token each."""

    start_token_id: int
    end_token_id: int
    opened: bool
    """True where the prompt ends within the reasoning."""
    optional: bool = True
    """True where an answer that is not within its reasoning yet may begin it."""
    budget: int | None = None
    """The most tokens of reasoning; then the end tag is the only token allowed. None sets no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooling:
    """The values that are read from the last layer at the tokens of a prompt, in the place of a sampled token."""

    mean: bool = False
    """True reads the sum over all tokens of the prompt, False the last token alone."""
    token_ids: tuple[int, ...] = ()
    """The tokens whose logits are read; without any, the hidden state is read, after the last norm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The parameters of sampling a token, and of the end of a sequence.

    The order of operations is vLLM's: ``allowed_token_ids``, ``bad_words_token_ids``, ``min_tokens``, ``logit_bias``
    and the penalties (repetition, frequency, presence) change the logits; then come ``temperature``, ``min_p``,
    ``top_k``, ``top_p`` and ``typical_p``. Reported logprobs are the model's own, before all of these.

    ``temperature`` 0 is greedy. ``top_k`` None means all tokens. The same ``seed`` samples the same tokens whatever the
    batch: Philox(seed, position) goes through the inverse of the cumulative distribution. Without a seed the client of
    the engine picks one per request.
    """

    max_tokens: int
    temperature: float = _model_default(1.0, 0.0, 100.0)
    top_p: float = _model_default(1.0, 0.0, 1.0, unset=(0,))
    top_k: int | None = _model_default(None, 1, 2**31, whole=True, unset=(-1, 0))
    min_p: float = _model_default(0.0, 0.0, 1.0)
    typical_p: float = _model_default(1.0, 0.0, 1.0, unset=(0,))
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = _model_default(1.0, 0.01, 100.0, unset=(0,))
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    """The only tokens that are sampled; None allows all."""
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    """Token sequences of which the last token is not sampled directly after the others."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    """The number of most probable tokens to report in addition to the sampled one; None reports nothing."""
    prompt_logprobs: int | None = None
    """The same for each prompt token but the first, given those before it. Such a prompt is computed whole: prefixes
    found in the cache have no logits."""
    grammar: str | None = None
    """A grammar of llguidance that the answer follows; None allows any text. It ends the answer itself: where nothing
    but an end-of-sequence token may follow, that token is sampled despite ``min_tokens`` and ``ignore_eos``."""
    reasoning_phase: ReasoningPhase | None = None
    """The reasoning that may precede the answer: it has a budget, and the grammar begins after it."""

    pooling: Pooling | None = None
    """The values that an engine which pools reads from the prompt. Nothing is sampled."""


FIELD_NAMES = tuple(each.name for each in fields(SamplingParams))
MODEL_RANGES: Mapping[str, ModelRange] = {
    each.name: each.metadata[_MODEL_RANGE] for each in fields(SamplingParams) if _MODEL_RANGE in each.metadata
}
"""The range of the default that a model may set, by parameter."""
FILTER_NAMES = ("temperature", "top_p", "min_p", "typical_p")
"""The parameters that the sampling kernel reads as float32 columns, under these names."""


def every_parameter(*, top_k: int, logprobs: int) -> SamplingParams:
    """Return parameters that use every step of sampling, for warming up and for measuring memory."""
    return SamplingParams(
        max_tokens=2,
        temperature=1.0,
        top_p=0.9,
        top_k=top_k,
        min_p=0.01,
        typical_p=0.9,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        repetition_penalty=1.1,
        logit_bias=((0, 0.5),),
        min_tokens=1,
        logprobs=logprobs,
        prompt_logprobs=logprobs,
    )
