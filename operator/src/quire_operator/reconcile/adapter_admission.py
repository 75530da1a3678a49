"""The review of a new or changed LLMAdapter: ``AdapterSpec.parse`` and the decision that the list of its model needs.

``handlers`` calls it for each review that the webhook gets, on the leader and on standbys. It reads only what the
watches have shown and writes nothing. What other objects may still change, such as an LLMDeployment that is applied
later, is a warning and never a rejection; only the leader warns.
"""

from collections.abc import Callable, Mapping

from quire_operator.domain.cluster_state.observed import Resource
from quire_operator.domain.cluster_state.trimming import trim_adapter
from quire_operator.domain.manifests.adapters import Listing, Refusal
from quire_operator.domain.manifests.model_volume import file_problem
from quire_operator.domain.resource import AdapterSpec, Invalid
from quire_operator.domain.resource.fields import Problem
from quire_operator.domain.status.review import ALLOWED, Review, asks_for_nothing

Preview = Callable[[Resource], Listing | None]


class AdapterReviewer:
    """A reviewer of LLMAdapters. ``preview`` returns the decision about one that is about to be stored."""

    def __init__(self, preview: Preview) -> None:
        self._preview = preview

    async def review(self, new: Mapping[str, object], old: Mapping[str, object] | None) -> Review:
        """Return the review of an object that is about to be stored; ``old`` is the stored one."""
        if asks_for_nothing(new, old):
            return ALLOWED
        resource = trim_adapter(new)
        spec = AdapterSpec.parse(resource.body)
        if isinstance(spec, Invalid):
            return Review(problems=spec.problems)
        if (problem := file_problem(spec.source)) is not None:
            return Review(problems=(Problem(path="spec.source", message=problem),))
        listing = self._preview(resource)
        if listing is None or listing.refusal in (None, Refusal.INVALID_SPEC):
            return ALLOWED
        return Review(warnings=(f"{listing.refusal}: {listing.message}",))
