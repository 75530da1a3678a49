"""A count of the wrong verdicts of canaries in simulated runs."""
