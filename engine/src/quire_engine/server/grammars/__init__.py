"""Grammars of requests: they are compiled and tried in worker processes before the engine gets them."""
