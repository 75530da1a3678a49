"""The status of an LLMDeployment: conditions, replicas, and why."""
