"""Adapters to the sources of metrics: Prometheus, replicas and gateways."""
