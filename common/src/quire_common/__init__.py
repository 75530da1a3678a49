"""The code that engine, gateway, operator and the ``quire`` command share. Standard library only."""

__version__ = "0.1.0"
