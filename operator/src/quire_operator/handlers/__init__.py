"""Event handlers: kopf delivers, nothing is decided."""
