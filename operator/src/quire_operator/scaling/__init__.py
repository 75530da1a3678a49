"""Autoscaling: the tick that decides for all LLMDeployments, and what it reads and writes on a cluster."""
