"""The share of each tensor that a rank reads: the declaration of tensor parallelism for decoder families.

Queries, keys, values, gates and ups are divided by their outputs (column parallel), attention outputs and downs by
their inputs (row parallel), so that a layer needs a sum over the ranks only after the attention and after the
feed-forward layer (Shoeybi et al., "Megatron-LM", 2019). Each expert is divided in the same way, so all ranks have the
same work whichever experts are chosen. The embedding and the LM head are divided by the vocabulary. Norms and routers
are on every rank.
"""

from quire_engine.model.config import ModelConfig
from quire_engine.model.families import Traits
from quire_engine.model.model_part import ModelPart, Span, Split

_BY_VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")


def tensor_split(traits: Traits, config: ModelConfig, part: ModelPart, name: str) -> Split | None:
    """Return a rank's share of the tensor ``name``; None if every rank has all of it.

    ``config`` is the configuration of the whole model.
    """
    if part.tensor_size == 1:
        return None
    if name in _BY_VOCABULARY:
        return Split(dim=0, spans=(part.share(config.vocab_size),))
    owner, _, kind = name.rpartition(".")
    if kind not in ("weight", "bias"):
        owner, kind = name, "weight"  # the tensors of all experts together have no such ending
    projection = owner.rpartition(".")[2]
    spans = _output_spans(traits, config, part, owner, projection)
    if spans is not None:
        return Split(dim=0, spans=spans)
    inputs = _input_span(traits, config, part, owner, projection)
    if inputs is None:
        return None
    if kind == "bias":
        return Split(dim=0, spans=((0, config.hidden_size),), is_zero=part.tensor_rank > 0)
    return Split(dim=1, spans=(inputs,))


def _output_spans(
    traits: Traits, config: ModelConfig, part: ModelPart, owner: str, projection: str
) -> tuple[Span, ...] | None:
    """Return the outputs of a projection that is divided by them."""
    dim = config.head_dim
    q = _scaled(part.share(config.num_heads), dim)
    kv = _scaled(part.kv_heads(config.num_kv_heads), dim)
    if ".self_attn." in owner:
        keys = config.num_heads * dim
        values = keys + config.num_kv_heads * dim
        return {
            "q_proj": (q,),
            "k_proj": (kv,),
            "v_proj": (kv,),
            "qkv_proj": (q, _moved(kv, keys), _moved(kv, values)),
        }.get(projection)
    inner = _inner_size(config, owner)
    share = part.share(inner)
    names = traits.experts
    if projection in ("gate_proj", "up_proj") or (names is not None and projection in (names.gate, names.up)):
        return (share,)
    return (share, _moved(share, inner)) if projection == "gate_up_proj" else None


def _input_span(traits: Traits, config: ModelConfig, part: ModelPart, owner: str, projection: str) -> Span | None:
    """Return the inputs of a projection that is divided by them."""
    if projection == "o_proj":
        return _scaled(part.share(config.num_heads), config.head_dim)
    names = traits.experts
    if projection == "down_proj" or (names is not None and projection == names.down):
        return part.share(_inner_size(config, owner))
    return None


def _inner_size(config: ModelConfig, owner: str) -> int:
    if config.experts is not None and ".experts." in owner:
        return config.experts.intermediate_size
    return config.intermediate_size


def _scaled(span: Span, size: int) -> Span:
    return span[0] * size, span[1] * size


def _moved(span: Span, by: int) -> Span:
    return span[0] + by, span[1] + by
