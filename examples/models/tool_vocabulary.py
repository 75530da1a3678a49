"""The tokenizer and chat template of `quire-demo-tools`, and dialogues with tools as token ids.

This is the second stage of training that model. Spaces, numbers and punctuation are tokens of their own: a word then
has the same tokens in a question as in the JSON of a call, so that the model can copy it token by token.
"""

import json
import random
from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tool_dialogues import Exchange, Tool, ToolDialogue
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from vocabulary import BOS, EOS, PAD, SPECIAL_TOKENS, TURN_END, TURN_START, Example

CALL, CALL_END = "<tool_call>", "</tool_call>"
_TAGS = (CALL, CALL_END, "<tools>", "</tools>")

# ChatML with names and parameters of tools in the system turn, a line each, and calls in hermes form. So small a model
# reads neither descriptions nor types.
CHAT_TEMPLATE = """\
{%- macro text(content) %}
    {%- if content is string %}{{- content | trim }}
    {%- else %}{{- (content or []) | map(attribute="text") | join | trim }}
    {%- endif %}
{%- endmacro %}
{{- bos_token }}
{%- set system = messages[0].role == "system" %}
{%- if tools or system %}
    {{- "<|im_start|>system\\n" }}
    {%- if system %}{{- text(messages[0].content) ~ "\\n" }}{%- endif %}
    {%- if tools %}
        {{- "<tools>\\n" }}
        {%- for tool in tools %}
            {%- set schema = tool.function.parameters or {} %}
            {{- tool.function.name ~ "(" ~ (schema.properties or {}) | join(", ") ~ ")\\n" }}
        {%- endfor %}
        {{- "</tools>" }}
    {%- endif %}
    {{- "<|im_end|>\\n" }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "system" %}
        {%- if not loop.first %}{{- raise_exception("a system message must be the first message") }}{%- endif %}
    {%- elif message.role in ["user", "tool"] %}
        {{- "<|im_start|>" ~ message.role ~ "\\n" ~ text(message.content) ~ "<|im_end|>\\n" }}
    {%- elif message.role == "assistant" %}
        {{- "<|im_start|>assistant\\n" ~ text(message.content) }}
        {%- for call in message.tool_calls or [] %}
            {{- "<tool_call>\\n" ~ '{"name": "' ~ call.function.name ~ '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- "}\\n</tool_call>" ~ ("" if loop.last else "\\n") }}
        {%- endfor %}
        {{- "<|im_end|>\\n" }}
    {%- else %}
        {{- raise_exception("role must be system, user, assistant or tool, not " ~ message.role) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|im_start|>assistant\\n" }}
{%- endif %}
"""
_PIECES = r"\s|\d{1,2}|[^\w\s]+"


def train_tool_tokenizer(texts: Iterable[str], vocab_size: int, max_length: int) -> PreTrainedTokenizerFast:
    """Train a lossless byte-level BPE tokenizer that joins no characters across words, digits and punctuation."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [*SPECIAL_TOKENS, *(AddedToken(tag, normalized=False) for tag in _TAGS)]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    # The trainer makes all of them special, but the tags belong to the text of an answer.
    content = json.loads(tokenizer.to_str())
    for token in content["added_tokens"]:
        token["special"] = token["content"] not in _TAGS
    tokenizer = Tokenizer.from_str(json.dumps(content))
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


def encode_tool_dialogue(tokenizer: PreTrainedTokenizerBase, dialogue: ToolDialogue) -> Example:
    """Return the dialogue, in which all that the assistant writes counts in the loss."""
    tokens = _ids(tokenizer, _text(tokenizer, dialogue.tools, dialogue.messages(), answer_next=False))
    header = _ids(tokenizer, f"{TURN_START}assistant\n")
    end = tokenizer.get_vocab()[TURN_END]
    learned: list[bool] = []
    answering = False
    for place, token in enumerate(tokens):
        learned.append(answering)
        answering = tokens[place + 1 - len(header) : place + 1] == header or (answering and token != end)
    return Example(tokens=tuple(tokens), learned=tuple(learned))


def encode_answer(
    tokenizer: PreTrainedTokenizerBase, tools: tuple[Tool, ...], messages: Sequence[dict[str, Any]]
) -> Example:
    """Return a conversation in which only the last message, the assistant's, counts."""
    prompt = rendered(tokenizer, tools, messages[:-1])
    tokens = _ids(tokenizer, _text(tokenizer, tools, messages, answer_next=False).removesuffix("\n"))
    return Example(tokens=tuple(tokens), learned=tuple(place >= len(prompt) for place in range(len(tokens))))


def encode_copies(tokenizer: PreTrainedTokenizerBase, length: int, rng: random.Random) -> Example:
    """Return tokens that repeat some random ones, half of the time with spaces between them; repetitions count.

    Nothing but copying helps here, which keeps the model able to copy tokens that dialogues seldom have.
    """
    once = [rng.randrange(len(SPECIAL_TOKENS), len(tokenizer)) for _ in range(rng.randint(4, length // 8))]
    if rng.random() < 0.5:
        (space,) = _ids(tokenizer, " ")
        once = [token for pair in zip(once, [space] * len(once), strict=True) for token in pair]
    tokens = [tokenizer.bos_token_id, *once * (length // len(once) + 1)][:length]
    return Example(tokens=tuple(tokens), learned=tuple(place > len(once) + 1 for place in range(length)))


def encode_forced_call(
    tokenizer: PreTrainedTokenizerBase, tools: tuple[Tool, ...], exchange: Exchange, *, named: bool
) -> Example:
    """Return a question with the answer that `tool_choice` forces: the arguments of one call, or an array of calls.

    The first token does not count, so that the model writes this form only where a grammar makes it begin.
    """
    prompt = rendered(tokenizer, tools, exchange.messages()[:1])
    calls = [{"name": call.name, "parameters": call.arguments} for call in exchange.calls]
    answer = _ids(tokenizer, json.dumps(exchange.calls[0].arguments if named else calls, ensure_ascii=False) + TURN_END)
    learned = [False] * (len(prompt) + 1) + [True] * (len(answer) - 1)
    return Example(tokens=(*prompt, *answer), learned=tuple(learned))


def rendered(
    tokenizer: PreTrainedTokenizerBase, tools: tuple[Tool, ...], messages: Sequence[dict[str, Any]]
) -> list[int]:
    """Return the token ids of these messages and of the beginning of an answer."""
    return _ids(tokenizer, _text(tokenizer, tools, messages, answer_next=True))


def _text(
    tokenizer: PreTrainedTokenizerBase,
    tools: tuple[Tool, ...],
    messages: Sequence[dict[str, Any]],
    *,
    answer_next: bool,
) -> str:
    declarations = [tool.declaration() for tool in tools] or None
    return str(
        tokenizer.apply_chat_template(
            list(messages), tools=declarations, tokenize=False, add_generation_prompt=answer_next
        )
    )


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    return ids


def tokenizer_texts(dialogues: Iterable[ToolDialogue], words: Sequence[str], rng: random.Random) -> Iterable[str]:
    """Yield the texts that the tokenizer learns its pieces from."""
    for dialogue in dialogues:
        declarations = [tool.declaration() for tool in dialogue.tools]
        yield json.dumps([declarations, dialogue.messages()], ensure_ascii=False)
    for _ in range(1_000):
        yield " ".join(rng.choice(words) for _ in range(8))
    # Every number of one or two digits becomes a token.
    for number in range(100):
        yield f"{number:02} " * 20
