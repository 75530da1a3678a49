"""Gemma 3, text only: Gemma 2 with normalised queries and keys for soft caps, and a rotation within windows."""

from quire_engine.model.decoder import Traits, decoder_family

FAMILY = decoder_family(Traits(qk_norm=True, norm_outputs=True, norm_offset=1.0, scale_embedding=True, gelu=True))
