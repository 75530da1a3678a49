"""Qwen2 and Qwen2.5: Llama with a bias on queries, keys and values."""

from quire_engine.model.decoder import Traits, decoder_family

FAMILY = decoder_family(Traits(qkv_bias=True))
