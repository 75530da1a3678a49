"""Adapters to what reports metrics: Prometheus, replicas and gateways."""
