"""Qwen3: Llama whose queries and keys are normalised head by head before they are rotated."""

from quire_engine.model.decoder import Traits, decoder_family

FAMILY = decoder_family(Traits(qk_norm=True))
