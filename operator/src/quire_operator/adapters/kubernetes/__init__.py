"""Adapters to the Kubernetes API."""
