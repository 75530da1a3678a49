"""What a client may ask of sampling and stopping; the names are those of the OpenAI API and of vLLM.

Validated once, where the request enters; afterwards only read. Stop *strings* are not here: they belong to the text
side, which sees characters; this side sees token ids.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is drawn, and when a sequence ends.

    ``temperature`` 0 is greedy. ``top_k`` None means all tokens. The same ``seed`` draws the same tokens whatever the
    batch: the draw is Philox(seed, position) through the inverse of the cumulative distribution. Without a seed the
    engine picks one per request.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    """How many of the likeliest tokens to report beside the drawn one; None reports nothing."""

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0
