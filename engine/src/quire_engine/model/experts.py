"""The mixture-of-experts part of a config.json: experts, experts per token, and the layers that have them.

This module only reads and needs no torch. ``expert_tensors`` knows the names of experts in checkpoints.
"""

from dataclasses import dataclass

from quire_common.model_memory import Fields


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """A family's names for the parts of its sparse layers."""

    part: str
    """The part of the layer that contains router and experts."""
    gate: str
    up: str
    down: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    num_experts: int
    experts_per_token: int
    intermediate_size: int
    """The size of one expert."""
    normalise_weights: bool
    """True if the weights of a token's experts are scaled to a sum of 1; otherwise they are softmax over all experts.
    """
    in_layer: tuple[bool, ...]
    """Which layers have experts; the others have one feed-forward layer."""


def mixtral_experts(fields: Fields, layers: int) -> ExpertsConfig:
    num_experts, per_token = _counts(fields, "num_local_experts", default=8, per_token=2)
    return ExpertsConfig(
        num_experts=num_experts,
        experts_per_token=per_token,
        intermediate_size=fields.positive_int("intermediate_size"),
        normalise_weights=True,
        in_layer=(True,) * layers,
    )


def qwen3_moe_experts(fields: Fields, layers: int) -> ExpertsConfig:
    """Return experts for every ``decoder_sparse_step``-th layer that ``mlp_only_layers`` does not list."""
    # transformers writes the count under Mixtral's name as well.
    name = "num_experts" if fields.raw.get("num_experts") is not None else "num_local_experts"
    num_experts, per_token = _counts(fields, name, default=128, per_token=8)
    step = fields.positive_int("decoder_sparse_step", default=1)
    dense = fields.indices("mlp_only_layers", layers)
    return ExpertsConfig(
        num_experts=num_experts,
        experts_per_token=per_token,
        intermediate_size=fields.positive_int("moe_intermediate_size", default=768),
        normalise_weights=fields.boolean("norm_topk_prob", default=False),
        in_layer=tuple((layer + 1) % step == 0 and layer not in dense for layer in range(layers)),
    )


def _counts(fields: Fields, name: str, *, default: int, per_token: int) -> tuple[int, int]:
    num_experts = fields.positive_int(name, default=default)
    chosen = fields.positive_int("num_experts_per_tok", default=per_token)
    if chosen > num_experts:
        fields.problems.append(
            f"num_experts_per_tok {chosen} is more than {name} {num_experts}; at most all are chosen"
        )
    return num_experts, chosen
