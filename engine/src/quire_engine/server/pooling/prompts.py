"""The prompts of requests that pool: bounds, truncation, and the form in which rerankers read a pair of texts."""

from collections.abc import Sequence

from quire_engine.errors import InvalidRequest
from quire_engine.server.pooling.served import ServedPooling

_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""The task with which Qwen3-Reranker was trained, unless a request names another."""
_PAIR = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
"""The form of Qwen3-Reranker's training data, as its model card states it."""


def pair_prompt(query: str, document: str, instruction: str | None) -> str:
    """Return the prompt of a reranker whose chat template does not know the roles of a pair."""
    values = {"{instruction}": instruction or _INSTRUCTION, "{query}": query, "{document}": document}
    text = _PAIR
    # Split before anything is put in, so that braces in a text stay as they are.
    parts = [text]
    for name, value in values.items():
        before, _, after = parts.pop().partition(name)
        parts += [before, value, after]
    return "".join(parts)


def truncated(prompt: list[int], kept: int, side: str | None, served: ServedPooling) -> list[int]:
    """Return ``kept`` tokens of the prompt, from its beginning unless the side to cut is left.

    The special tokens that the tokenizer adds stay, because a model with last-token pooling reads the last of them.
    """
    if len(prompt) <= kept:
        return prompt
    first, last = list(served.first_ids), list(served.last_ids)
    first = first if prompt[: len(first)] == first else []
    last = last if last and prompt[-len(last) :] == last else []
    room = kept - len(first) - len(last)
    if room < 1:
        return prompt[-kept:] if side == "left" else prompt[:kept]
    text = prompt[len(first) : len(prompt) - len(last)]
    return [*first, *(text[-room:] if side == "left" else text[:room]), *last]


def check_prompts(prompts: Sequence[list[int]], places: Sequence[str], *, max_model_len: int, vocab_size: int) -> None:
    """Raise InvalidRequest for a prompt that is empty, too long, or has ids beyond the vocabulary.

    ``places`` are the paths of the fields that contain the prompts.
    """
    for prompt, place in zip(prompts, places, strict=True):
        param = place.partition("[")[0]
        if not prompt:
            raise InvalidRequest(f"{place}: is empty; it should have at least one token", param=param)
        if max(prompt) >= vocab_size:
            raise InvalidRequest(
                f"{place}: {max(prompt)} is not a token id of this model; the highest is {vocab_size - 1}", param=param
            )
        if len(prompt) > max_model_len:
            raise InvalidRequest(
                f"{place}: {len(prompt)} tokens exceed this model's context of {max_model_len} tokens; "
                "truncate_prompt_tokens -1 cuts to it",
                param=param,
                code="context_length_exceeded",
            )
