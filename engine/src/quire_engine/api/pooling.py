"""The facts about its model that a server which pools needs, and the form in which rerankers read a pair of texts."""

from collections.abc import Sequence
from dataclasses import dataclass

from quire_engine.config import PoolingSetup
from quire_engine.core.sampling_params import Pooling
from quire_engine.errors import InvalidRequest, ModelFolderError
from quire_engine.text.model_text import ModelText
from quire_engine.text.tokenizer import Tokenizer

_PAIR_ROLES = ("query", "document")
"""The roles of messages in the chat templates of rerankers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedPooling:
    """The task of the server, and how it writes and reads prompts."""

    setup: PoolingSetup
    pooling: Pooling
    first_ids: tuple[int, ...]
    """The tokens that the tokenizer puts before each text, and ``last_ids`` those after it; truncation keeps them."""
    last_ids: tuple[int, ...]
    has_pair_template: bool
    """True if the chat template renders a query and a document."""

    @property
    def scores(self) -> bool:
        """True for a reranker."""
        return self.setup.task == "score"

    def check_embeds(self, name: str) -> None:
        """Raise InvalidRequest for a reranker, which has no embeddings."""
        if self.scores:
            raise InvalidRequest(
                f"model: {name} is a reranker and serves no embeddings; send POST /v1/rerank or /v1/score",
                param="model",
                code="unsupported_task",
            )

    def check_dimensions(self, dimensions: int | None) -> None:
        """Raise InvalidRequest for a number of dimensions that this model's embeddings cannot have."""
        if dimensions is None:
            return
        allowed, most = self.setup.dimensions, self.setup.hidden_size
        if dimensions > most:
            raise InvalidRequest(
                f"dimensions: {dimensions} exceeds the {most} dimensions of this model's embeddings", param="dimensions"
            )
        if allowed and dimensions not in allowed:
            raise InvalidRequest(
                f"dimensions: {dimensions} is not supported; this model has {', '.join(map(str, allowed))}",
                param="dimensions",
            )


def served_pooling(setup: PoolingSetup, text: ModelText, vocab_size: int) -> ServedPooling:
    """Return what a server of the model pools. Raise ModelFolderError for a reranker without its tokens."""
    first, last = _added_ids(text.tokenizer)
    token_ids: tuple[int, ...] = ()
    if setup.task == "score":
        named = (setup.yes_token, *(() if setup.no_token is None else (setup.no_token,)))
        token_ids = tuple(_token_id(token, text.tokenizer, vocab_size) for token in named)
    template = text.chat_template
    return ServedPooling(
        setup=setup,
        pooling=Pooling(mean=setup.mean and not token_ids, token_ids=token_ids),
        first_ids=first,
        last_ids=last,
        has_pair_template=template is not None and all(_names(template.source, role) for role in _PAIR_ROLES),
    )


def _token_id(token: int | str, tokenizer: Tokenizer, vocab_size: int) -> int:
    ids = [token] if isinstance(token, int) else tokenizer.encode(token, add_special_tokens=False)
    if len(ids) != 1 or not 0 <= ids[0] < vocab_size:
        raise ModelFolderError(
            f"the reranker's token {token!r} is not one token of the model's tokenizer; see classifier_from_token in "
            "config.json, or 1_LogitScore/config.json"
        )
    return ids[0]


def _added_ids(tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the special tokens that the tokenizer puts before and after a text."""
    plain = tokenizer.encode("a", add_special_tokens=False)
    added = tokenizer.encode("a", add_special_tokens=True)
    for begin in range(len(added) - len(plain) + 1):
        if plain and added[begin : begin + len(plain)] == plain:
            return tuple(added[:begin]), tuple(added[begin + len(plain) :])
    return (), ()


def _names(source: str, role: str) -> bool:
    return f'"{role}"' in source or f"'{role}'" in source


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
