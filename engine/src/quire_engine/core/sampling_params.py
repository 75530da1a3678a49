"""What a client may ask of sampling and stopping; the names are those of the OpenAI API and of vLLM.

Validated once, where the request enters; afterwards only read. Stop *strings* are not here: they belong to the text
side, which sees characters; this side sees token ids.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is drawn, and when a sequence ends.

    The order of operations is vLLM's: ``allowed_token_ids``, ``bad_words_token_ids``, ``min_tokens``, ``logit_bias``
    and the penalties (repetition, frequency, presence) change the logits; then come ``temperature``, ``min_p``,
    ``top_k``, ``top_p`` and ``typical_p``. Reported logprobs are the model's own, before all of these.

    ``temperature`` 0 is greedy. ``top_k`` None means all tokens. The same ``seed`` draws the same tokens whatever the
    batch: the draw is Philox(seed, position) through the inverse of the cumulative distribution. Without a seed the
    engine picks one per request.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    typical_p: float = 1.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    """Nothing else is drawn; None allows all."""
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    """Where all but the last of these tokens were drawn just before, the last is not."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    """How many of the likeliest tokens to report beside the drawn one; None reports nothing."""
    prompt_logprobs: int | None = None
    """The same of each prompt token but the first, given those before it. Such a prompt is computed whole: prefixes
    found in the cache have no logits."""

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0
