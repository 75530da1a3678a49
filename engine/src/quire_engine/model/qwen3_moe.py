"""Qwen3-MoE: Qwen3 with a mixture of experts in most layers."""

from quire_engine.model.decoder import Traits, decoder_family
from quire_engine.model.expert_tensors import ExpertNames

FAMILY = decoder_family(
    Traits(qk_norm=True, experts=ExpertNames(part="mlp", gate="gate_proj", up="up_proj", down="down_proj"))
)
