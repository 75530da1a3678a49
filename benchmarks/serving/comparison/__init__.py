"""quire beside its peers, by turns, on one machine: the parts of ``compare.py``.

``workloads`` says what is asked, ``contestants`` how each server is started, ``process_tree`` starts and stops it,
``turns`` measures it, ``machine`` and ``floor`` say what the machine allows, ``results`` compares, ``table`` and
``plot`` show it, ``cross_check`` puts another client beside ours.
"""

import sys
from pathlib import Path

PEERS = Path(__file__).resolve().parents[2] / "peers"
# The scripts that install peers say also where each lies.
sys.path.append(str(PEERS))
