"""Fetching models from hubs, buckets and registries."""
