"""Timelines of scenarios on one clock: requests, actions and messages of the cluster, as JSON and as a plot.

`watch.ClusterWatch` observes the cluster while traffic flows, `model.Timeline` combines both, `plot.draw` draws it.
"""

from e2e_support.timeline.model import Blind, ClusterMessage, Steps, Timeline, timeline
from e2e_support.timeline.recording import keep
from e2e_support.timeline.watch import ClusterWatch, Sight, sight_of

__all__ = ["Blind", "ClusterWatch", "Sight", "Steps", "Timeline", "ClusterMessage", "keep", "sight_of", "timeline"]
