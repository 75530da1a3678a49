"""Mistral: Llama whose every layer may look back through a sliding window (the config says so)."""

from quire_engine.model.decoder import Traits, decoder_family

FAMILY = decoder_family(Traits())
