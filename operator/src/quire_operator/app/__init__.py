"""The operator's process: settings, metrics page, watches, and the connection of all parts."""
