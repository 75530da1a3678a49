"""What every test folder may use: the fixtures of a real API server (`api_server`, `namespace`, `cluster_binaries`)."""

pytest_plugins = ["quire_cluster.pytest_plugin"]
