"""Metrics and traces of the API process."""
