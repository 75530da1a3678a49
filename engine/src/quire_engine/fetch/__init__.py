"""Model fetching: hubs, S3 buckets and OCI registries, with resumed downloads and checksums. Imports no torch."""
