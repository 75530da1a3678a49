"""Faults that engines of bad canaries have."""
