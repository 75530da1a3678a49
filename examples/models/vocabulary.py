"""The tokenizer of the demo models: byte-level BPE trained on the corpus, with a chat template.

This is the third stage of training. It converts texts into a `PreTrainedTokenizerFast`, and dialogues into token ids
with a mask of the assistant's text. It does not depend on models.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from dialogues import Message
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

BOS = "<|begin_of_text|>"
EOS = "<|end_of_text|>"
PAD = "<|pad|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
SPECIAL_TOKENS = (BOS, EOS, PAD, TURN_START, TURN_END)

# ChatML, which other software supports, with checks for invalid messages.
CHAT_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role not in ["system", "user", "assistant"] %}
        {{- raise_exception("role must be system, user or assistant, not " ~ message.role) }}
    {%- endif %}
    {%- if message.role == "system" and not loop.first %}
        {{- raise_exception("a system message must be the first message") }}
    {%- endif %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = (message.content or []) | map(attribute="text") | join %}
    {%- endif %}
    {{- "<|im_start|>" ~ message.role ~ "\\n" ~ content | trim ~ "<|im_end|>\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|im_start|>assistant\\n" }}
{%- endif %}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A training example: token ids, and `learned[i]`, True if the prediction of `tokens[i]` counts."""

    tokens: tuple[int, ...]
    learned: tuple[bool, ...]


def train_tokenizer(texts: Iterable[str], vocab_size: int, max_length: int) -> PreTrainedTokenizerFast:
    """Train a lossless byte-level BPE tokenizer for any text. Plain text gets a BOS in front."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    bos = (BOS, tokenizer.token_to_id(BOS))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[bos]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=[TURN_START, TURN_END],
        clean_up_tokenization_spaces=False,
        model_max_length=max_length,
        chat_template=CHAT_TEMPLATE,
    )


def encode_text(tokenizer: PreTrainedTokenizerFast, text: str) -> Example:
    """Return plain text between BOS and EOS; all of it counts in the loss."""
    # A text longer than the context is valid here: training splits it into rows.
    tokens = (*tokenizer(text, verbose=False).input_ids, tokenizer.eos_token_id)
    return Example(tokens=tokens, learned=(False, *[True] * (len(tokens) - 1)))


def split_text(text: Example, max_tokens: int, first_tokens: int) -> Iterator[Example]:
    """Yield pieces of at most `max_tokens`, each with the BOS in front; `first_tokens` is the first length."""
    bos = text.tokens[0]
    start, end = 1, 1 + min(first_tokens, max_tokens - 1)
    while start < len(text.tokens):
        piece = text.tokens[start:end]
        yield Example(tokens=(bos, *piece), learned=(False, *text.learned[start:end]))
        start, end = end, end + max_tokens - 1


def encode_dialogue(
    tokenizer: PreTrainedTokenizerFast, dialogue: Sequence[Message], max_tokens: int | None = None
) -> Example:
    """Return a chat in the template, cut at `max_tokens`. Only the assistant's text and its end count in the loss."""
    tokens: list[int] = []
    learned: list[bool] = []
    for number, message in enumerate(dialogue):
        if message["role"] != "assistant":
            continue
        asked = _ids(tokenizer, dialogue[:number], add_generation_prompt=True)
        answered = _ids(tokenizer, dialogue[: number + 1], add_generation_prompt=False)
        learned += [False] * (len(asked) - len(tokens)) + [True] * (len(answered) - len(asked))
        tokens = answered
    return Example(tokens=tuple(tokens[:max_tokens]), learned=tuple(learned[:max_tokens]))


def _ids(tokenizer: PreTrainedTokenizerFast, messages: Sequence[Message], *, add_generation_prompt: bool) -> list[int]:
    turns = [{"role": message["role"], "content": message["content"]} for message in messages]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=add_generation_prompt)
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return ids
