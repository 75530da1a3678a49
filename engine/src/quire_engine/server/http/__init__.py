"""HTTP without any route of its own: listening, TLS, the edge that every request passes, bodies, errors, events."""
