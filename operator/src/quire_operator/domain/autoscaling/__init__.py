"""The autoscaling policy: from observations to a number of replicas."""
