"""``quire-engine --help``: the table of flags as one grouped page."""

import textwrap

from quire_engine.flag_kinds import Flag
from quire_engine.flag_table import GROUPS

_INDENT = " " * 30

_HEAD = """\
quire-engine serves one language model at an OpenAI-compatible address.

usage: quire-engine --model DIR [--port N] [flags]
"""

_TAIL = """\
Also: --help, --version, --flag-schema (the flags as JSON Schema).

Each flag can be set by a variable: --max-num-seqs 64 is QUIRE_ENGINE_MAX_NUM_SEQS=64. A flag wins over its variable.

SIGTERM or Ctrl-C drains: /readyz turns 503 at once, running requests finish within --drain-timeout; Ctrl-C again stops.

  quire-engine --model ./my-model --port 8000
  curl http://127.0.0.1:8000/v1/chat/completions -H 'content-type: application/json' \\
    -d '{"model": "my-model", "messages": [{"role": "user", "content": "What is a list?"}]}'
"""


def help_text(width: int = 120) -> str:
    parts = [_HEAD]
    for group, flags in GROUPS.items():
        rows = "\n".join(_row(flag, width) for flag in flags)
        parts.append(f"{group}:\n{rows}\n")
    return "\n".join([*parts, _TAIL])


def _row(flag: Flag, width: int) -> str:
    metavar = flag.kind.metavar + (" ..." if flag.many else "")
    left = f"  --{flag.name} {metavar}".rstrip()
    shown = flag.default or flag.shown_default
    text = flag.help + (f" (default: {shown})" if shown else " (required)" if flag.required else "")
    lines = textwrap.wrap(text, max(40, width - len(_INDENT)))
    if len(left) > len(_INDENT) - 2:
        return "\n".join([left, *(_INDENT + line for line in lines)])
    return "\n".join([left.ljust(len(_INDENT)) + lines[0], *(_INDENT + line for line in lines[1:])])
