"""The Kubernetes operator of quire."""

__version__ = "0.1.0"
