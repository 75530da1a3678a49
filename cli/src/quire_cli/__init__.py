"""The quire command: the same LLMDeployment on one machine and, for a look, on a cluster."""

__version__ = "0.1.0"
