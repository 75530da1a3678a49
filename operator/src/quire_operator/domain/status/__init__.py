"""The status of an LLMDeployment: conditions, replicas and their causes."""
