"""A model that several processes, the ranks, run together: rank 0 is the engine process, and it starts the others."""
