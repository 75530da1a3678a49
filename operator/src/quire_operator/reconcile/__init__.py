"""The reconcile of one LLMDeployment: observe, desired, plan, apply, status."""
