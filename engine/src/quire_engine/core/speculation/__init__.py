"""Speculative decoding: which tokens a sequence may continue with, and how many of them a step should verify."""
