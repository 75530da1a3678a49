"""The API server: its client, the observed objects, the Lease and the write fence."""
