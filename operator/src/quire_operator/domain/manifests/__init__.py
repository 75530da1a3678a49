"""The Kubernetes objects that an LLMDeployment should have."""
