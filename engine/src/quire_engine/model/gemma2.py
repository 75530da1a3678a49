"""Gemma 2: norms before and after each part with weights about 0, scaled embeddings, gelu, soft caps, every other layer
with a sliding window (caps, windows and the scale of attention are in the config)."""

from quire_engine.model.decoder import Traits, decoder_family

FAMILY = decoder_family(Traits(norm_outputs=True, norm_offset=1.0, scale_embedding=True, gelu=True))
