"""What happened in a scenario, on one clock: requests, what was done, what the cluster said. Kept as JSON and drawn.

`watch.ClusterWatch` looks at the cluster while traffic flows, `model.Timeline` joins both, `plot.draw` draws it.
"""

from e2e_support.timeline.keep import keep
from e2e_support.timeline.model import Blind, Steps, Timeline, Told, timeline
from e2e_support.timeline.watch import ClusterWatch, Sight, sight_of

__all__ = ["Blind", "ClusterWatch", "Sight", "Steps", "Timeline", "Told", "keep", "sight_of", "timeline"]
