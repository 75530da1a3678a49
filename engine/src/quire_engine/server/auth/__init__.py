"""Authentication: which API key opens which route, and how much each key may use."""
