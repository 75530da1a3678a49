"""The observed state of the cluster, and the owners of its fields."""
