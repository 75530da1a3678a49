"""Names and numbers on which engine, gateway and operator agree: ports, paths, metrics, labels and file formats."""
