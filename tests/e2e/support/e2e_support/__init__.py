"""What the end-to-end scenarios stand on: a cluster, the installed chart, a namespace each, and what a run found.

``target`` is the cluster; ``release`` the installed chart; ``space`` a namespace and its LLMDeployments; ``traffic``
streams requests meanwhile and checks every answer; ``results`` and ``evidence`` keep what came of it.
"""
