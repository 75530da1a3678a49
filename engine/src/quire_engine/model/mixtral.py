"""Mixtral: Mistral with a mixture of experts in every layer, the weights of a token's experts normalised."""

from quire_engine.model.decoder import Traits, decoder_family
from quire_engine.model.expert_tensors import ExpertNames

FAMILY = decoder_family(Traits(experts=ExpertNames(part="block_sparse_moe", gate="w1", up="w3", down="w2")))
