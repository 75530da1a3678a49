"""A device runner over a stand-in for the driver of a GPU that is not present: everything but the kernels runs."""
