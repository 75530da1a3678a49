"""One LLMDeployment: its children, and the passes that make the cluster have them."""
