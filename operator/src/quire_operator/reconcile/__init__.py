"""Reconciling one LLMDeployment: observe, desired, plan, apply, status."""
