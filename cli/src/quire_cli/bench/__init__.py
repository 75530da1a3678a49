"""``quire bench``: one load generator for any OpenAI-compatible address.

``workload`` decides what is sent and when, ``traces`` reads production traces, ``client`` sends and times it,
``summary`` says what came of it, ``report`` shows it, ``command`` is the command line.
"""
