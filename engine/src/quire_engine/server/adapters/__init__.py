"""The adapters of a server.

``registry`` has their names and versions, ``sources`` their files, and ``service`` acts on both.
"""
