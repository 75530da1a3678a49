"""The operator's process: its settings, its metrics page, and what joins adapters, reconciling and scaling."""
