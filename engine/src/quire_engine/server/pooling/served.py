"""The facts about its model that a server which pools needs, found once at the start."""

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
