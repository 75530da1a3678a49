"""Names and options of the three images. Pure, except for checking whether a wheel exists."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from quire_cluster.errors import ImageBuildFailed
from quire_cluster.images.base_image import debian_base

TARGETS: Final = ("gateway", "operator", "engine")  # the quick ones first
# In every base image, so that a mount there leaves nothing behind.
WHEEL_FOLDER: Final = "/mnt"
CACHE_FOLDER: Final = "/media"


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """The options of `make images`."""

    base_image: str | None = None  # None: made of Debian's packages
    torch_spec: str = ""  # README, "A smaller torch"; empty: the lock's
    compiler: str = ""  # Debian packages; the test cluster's nodes have no GPU

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "BuildOptions":
        return cls(
            base_image=environment.get("BASE_IMAGE") or None,
            torch_spec=environment.get("TORCH_SPEC", ""),
            compiler=environment.get("COMPILER", ""),
        )

    @property
    def arguments(self) -> dict[str, str]:
        """Return the arguments of the Dockerfile; a wheel is named as mounted."""
        wheel = self.torch_wheel
        return {
            "BASE_IMAGE": self.base_image or debian_base(),
            "TORCH_SPEC": self.torch_spec if wheel is None else f"{WHEEL_FOLDER}/{wheel.name}",
            "COMPILER": self.compiler,
        }

    @property
    def torch_wheel(self) -> Path | None:
        """Return the path of torch's wheel if it is a file on this machine."""
        path = Path(self.torch_spec)
        if path.suffix != ".whl" or "://" in self.torch_spec:
            return None
        if not path.is_file():
            raise ImageBuildFailed(f"TORCH_SPEC is {self.torch_spec}, and there is no such file")
        return path.absolute()


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    registry: str
    repository: str
    tag: str

    @property
    def reference(self) -> str:
        return f"{self.registry}/{self.repository}:{self.tag}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Images:
    engine: Image
    operator: Image
    gateway: Image

    def chart_values(self) -> dict[str, Any]:
        """Return the chart's value `images`."""
        each = {name: {"repository": image.repository, "tag": image.tag} for name, image in self.by_target().items()}
        return {"images": {"registry": self.engine.registry, **each}}

    def by_target(self) -> dict[str, Image]:
        return {"engine": self.engine, "operator": self.operator, "gateway": self.gateway}
