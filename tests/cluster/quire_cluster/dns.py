"""Cluster DNS: CoreDNS on the host, at the address of the bridge. Pure: a configuration and a command line.

It knows the cluster's services and pods and forwards no queries: any other name does not exist.
"""

from pathlib import Path

from quire_cluster.nodes.plan import CLUSTER_DOMAIN, DNS_PORT, HOST_ADDRESS

READY_PORT = 8181
READY_URL = f"http://{HOST_ADDRESS}:{READY_PORT}/ready"


def config(kubeconfig: Path) -> str:
    return f"""\
{CLUSTER_DOMAIN}:{DNS_PORT} {{
  bind {HOST_ADDRESS}
  errors
  ready {HOST_ADDRESS}:{READY_PORT}
  kubernetes {CLUSTER_DOMAIN} {{
    kubeconfig {kubeconfig}
    ttl 2
  }}
}}

.:{DNS_PORT} {{
  bind {HOST_ADDRESS}
  template ANY ANY {{
    rcode NXDOMAIN
  }}
}}
"""


def command(program: Path, config_file: Path) -> list[str]:
    return [str(program), "-conf", str(config_file)]
