"""Which ``Origin`` a source has. Their libraries are slow to import, and most runs need none or one of them."""

from quire_operator.adapters.fetch.remote_files import Origin
from quire_operator.domain.resource import BucketSource, HubSource, ImageSource, RemoteSource


def origin_of(source: RemoteSource) -> Origin:
    match source:
        case HubSource():
            from quire_operator.adapters.fetch.hub_download import HubOrigin

            return HubOrigin(source)
        case BucketSource():
            from quire_operator.adapters.fetch.bucket import BucketOrigin

            return BucketOrigin(source)
        case ImageSource():
            from quire_operator.adapters.fetch.image import ImageOrigin

            return ImageOrigin(source)
