"""A changed spec that serves a share of the requests: its figures, its judgement, its progress and its children."""
