"""The evaluation of a probe: attention that our kernel computes, or the reason why it differs.

Everything is pure, except that the masks' functions are evaluated on a few positions.
"""

from collections import Counter
from dataclasses import dataclass

import torch

from quire_common.model_memory import Windows
from quire_engine.model.shape import LayerHeads
from quire_engine.model.transformers_backend.description import Unservable
from quire_engine.model.transformers_backend.probe import AttentionCall, Mask, Probe

# Arguments of attention that do not change the result.
_HARMLESS = frozenset(
    {
        "cache_position",
        "deterministic",
        "dropout",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "s_aux",  # attention sinks, which our kernel supports
        "scaling",
        "sliding_window",  # transformers' own attention uses the mask, not this argument
        "use_cache",
    }
)
# Farther back than any window reaches.
_FAR = 1 << 30
_KNOWN = {
    "indices": "sparse attention over chosen tokens",
    "position_bias": "a bias by position",
    "alibi": "a bias by position (ALiBi)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayers:
    """The layers that need a cache, in the order in which they run."""

    names: tuple[str, ...]
    heads: tuple[LayerHeads, ...]
    """A head dim is the larger one of keys' and values'."""
    windows: Windows
    chunked: bool
    """True if the windows are chunks."""


def judge(probe: Probe) -> AttentionLayers:
    """Return the attention layers. Raise Unservable if our kernel does not compute their attention."""
    if not probe.calls:
        raise Unservable("does not compute attention through transformers' interface")
    if not all(call.has_metadata for call in probe.calls):
        raise Unservable(
            "does not pass the arguments of its forward pass to its attention layers, which then do not know"
            " whose tokens they see"
        )
    repeated, count = Counter(call.layer for call in probe.calls).most_common(1)[0]
    if count > 1:
        raise Unservable(f"computes attention {count} times in one layer, {repeated}")
    for call in probe.calls:
        _check_call(call)
    sights = tuple(_sight(call) for call in probe.calls)
    kinds = {type(sight) for sight in sights if sight is not None}
    if len(kinds) > 1:
        raise Unservable("has layers with a sliding window and layers that attend in chunks")
    if probe.logits_rows != 2:
        raise Unservable("does not compute logits for chosen tokens alone (logits_to_keep)")
    return AttentionLayers(
        names=tuple(call.layer for call in probe.calls),
        heads=tuple(
            LayerHeads(heads=call.query[1], kv_heads=call.key[1], head_dim=max(call.key[3], call.value[3]))
            for call in probe.calls
        ),
        windows=tuple(None if sight is None else sight.tokens for sight in sights),
        chunked=_Chunk in kinds,
    )


def _check_call(call: AttentionCall) -> None:
    if call.arguments.get("is_causal", True) is not True:
        raise Unservable(f"lets tokens see later ones, in {call.layer}")
    for name, argument in call.arguments.items():
        if name not in _HARMLESS and name != "is_causal" and argument is not False:
            what = _KNOWN.get(name, f"attention with {name!r}, which our kernel does not know")
            raise Unservable(f"has {what}, in {call.layer}")
    if call.query[0] != 1 or call.key[2] != call.query[2] or call.query[1] % call.key[1]:
        raise Unservable(
            f"has other keys than its own tokens' in {call.layer}: queries {list(call.query)}, keys {list(call.key)}"
        )


@dataclass(frozen=True, slots=True)
class _Window:
    """A sliding window: a query sees its last tokens."""

    tokens: int

    def first_seen(self, query: int) -> int:
        return query - self.tokens + 1


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Positions in chunks: a query sees the tokens of its own chunk."""

    tokens: int

    def first_seen(self, query: int) -> int:
        return query // self.tokens * self.tokens


def _sight(call: AttentionCall) -> _Window | _Chunk | None:
    """Return the range of a layer's queries; None means up to the beginning."""
    if call.mask is None:
        raise Unservable(f"builds its own attention mask for {call.layer}")
    size = call.mask.local_size
    for candidate in (None, *((_Window(size), _Chunk(size)) if size else ())):
        if _is_causal(call.mask, candidate):
            return candidate
    if _sees_later_tokens(call.mask):
        raise Unservable(f"lets tokens see later ones, as encoders do, in {call.layer}")
    raise Unservable(f"has a mask that is neither causal nor a causal window or chunk, in {call.layer}")


def _sees_later_tokens(mask: Mask) -> bool:
    try:
        return bool(_seen(mask, 0, torch.tensor([1])))
    except (NotImplementedError, RuntimeError):
        return False


def _is_causal(mask: Mask, sight: _Window | _Chunk | None) -> bool:
    """Return whether the mask shows exactly the tokens from the first in range to the query's own, by samples."""
    reach = mask.local_size or _FAR
    for query in (0, 1, reach - 1, reach, reach + 1, 2 * reach, 3 * reach + 5, _FAR):
        begins = (query - reach, query // reach * reach)  # where a window or a chunk would begin
        near = [torch.arange(begin - 2, begin + 3) for begin in begins]
        keys = torch.cat((torch.tensor([0, 1, query // 2]), *near, torch.arange(max(0, query - 2), query + 3)))
        keys = keys[keys >= 0]
        expected = (keys <= query) & (keys >= (0 if sight is None else sight.first_seen(query)))
        try:
            if not torch.equal(_seen(mask, query, keys), expected):
                return False
        except (NotImplementedError, RuntimeError):  # the mask depends on values that a probe does not have
            return False
    return True


def _seen(mask: Mask, query: int, keys: torch.Tensor) -> torch.Tensor:
    zero = torch.tensor(0)
    return mask.function(zero, zero, torch.tensor(query), keys).expand(len(keys))
