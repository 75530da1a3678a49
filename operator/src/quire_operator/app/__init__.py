"""The operator's process: settings, metrics page, and the connection of adapters, reconciling and scaling."""
