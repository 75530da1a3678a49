"""The autoscaler in operation: the ticks over all LLMDeployments, and their inputs and outputs in a cluster."""
