"""Phi-3 and Phi-4: Llama whose checkpoints join projections of one input; part of a head may stay unrotated."""

from quire_engine.model.decoder import Traits, decoder_family

FAMILY = decoder_family(Traits(fused=True))
