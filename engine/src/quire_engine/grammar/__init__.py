"""Grammars that constrain answers: what requests name, how llguidance reads it, and the masks of tokens it allows."""
