"""What was observed on the cluster, and who owns which of its fields."""
