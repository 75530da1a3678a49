"""Leader election by a Lease, and the write fence that it opens."""
