"""The autoscaler: from metrics of replicas and gateways to a number of replicas, and its loop."""
