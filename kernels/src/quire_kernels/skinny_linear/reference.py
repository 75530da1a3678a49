"""skinny_linear in plain torch: the reference for every implementation."""

from quire_kernels.linear.reference import linear as skinny_linear

__all__ = ["skinny_linear"]
