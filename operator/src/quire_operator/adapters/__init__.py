"""Implementations of ``ports`` for Kubernetes, Prometheus, replicas, gateways and the hub."""
