"""The Llama family: pre-norm, rotary positions, grouped-query attention, SwiGLU; biases where the config says so."""

from quire_engine.model.decoder import Traits, decoder_family

FAMILY = decoder_family(Traits())
