"""One declarative reader of flags: a table of them gives the parser, the environment variables, the help and a schema.

``kinds`` says what a value may be, and ``table`` reads a command line and an environment.
"""
