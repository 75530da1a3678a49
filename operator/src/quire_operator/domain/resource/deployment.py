"""The whole LLMDeployment: what a person wrote, as values, or every reason why it can't be one.

Kubernetes objects and local YAML are both parsed here. The fields are those of the CRD. An unknown field is an error
and is never ignored.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from quire_common.model_source import FileSource
from quire_operator.domain.resource import names
from quire_operator.domain.resource.engine import Engine, Resources, read_engine, read_resources
from quire_operator.domain.resource.fields import Fields, Problem, shown
from quire_operator.domain.resource.model import Model, read_model, read_secret_name
from quire_operator.domain.resource.rollout import Drain, Rollout, read_drain, read_rollout
from quire_operator.domain.resource.scaling import Autoscaling, AutoscalingMode, read_autoscaling

_UNREADABLE = Model(source=FileSource(path="/", relative=False), served_name="", credentials_secret=None, cache=None)
"""In place of a model whose source is no source, in a spec that is invalid for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Invalid:
    """Why a document is no LLMDeployment: all reasons, in the order of its fields."""

    name: str | None
    namespace: str | None
    problems: tuple[Problem, ...]
    readable: "Spec | None" = None
    """The rest, with defaults where the problems are: for finding what else is wrong, never to be carried out."""

    def __str__(self) -> str:
        return "; ".join(map(str, self.problems))


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """One LLMDeployment with its defaults filled in."""

    name: str
    namespace: str
    model: Model
    engine: Engine
    resources: Resources
    replicas: int
    """With autoscaling only where it starts from."""
    autoscaling: Autoscaling | None
    rollout: Rollout
    auth_secret: str | None
    """Holds the API keys in a cluster; locally QUIRE_API_KEY_FILE does. None: open to all."""
    drain: Drain
    paused: bool
    """Replicas are scaled, and not replaced."""
    pod_template: Mapping[str, object]
    """Merged into the pods by strategic merge; has no meaning without a cluster."""

    @classmethod
    def parse(cls, body: Mapping[str, object]) -> "Spec | Invalid":
        """The spec in a whole object (apiVersion, kind, metadata, spec); never raises."""
        problems: list[Problem] = []
        root = Fields(body, path="", problems=problems)
        root.knows("status")
        _check_kind(root)
        metadata = root.section("metadata")
        name = _read_name(metadata)
        namespace = metadata.text("namespace", default="default")
        if not root.has("spec"):
            root.problem("spec", "is required")
        spec = _read_spec(root, name=name or "unnamed", namespace=namespace)
        root.done()
        if problems or spec is None:
            return Invalid(name=name, namespace=namespace, problems=tuple(problems), readable=spec)
        return spec

    @property
    def initial_replicas(self) -> int:
        """How many replicas to start with where nothing runs yet, while no schedule is in force."""
        if self.autoscaling is None:
            return self.replicas
        return max(self.autoscaling.min_replicas, min(self.replicas, self.autoscaling.max_replicas))

    @property
    def only_recommends(self) -> bool:
        """Whether the autoscaler decides and nothing comes of it."""
        return self.autoscaling is not None and self.autoscaling.mode is AutoscalingMode.RECOMMEND

    @property
    def max_replicas(self) -> int:
        """The most replicas there will ever be at once, a rollout's surge aside."""
        return self.replicas if self.autoscaling is None else self.autoscaling.most_replicas


def _check_kind(root: Fields) -> None:
    for key, expected in (("apiVersion", names.API_VERSION), ("kind", names.KIND)):
        value = root.raw(key)
        if value is None:
            root.problem(key, f"is required: {expected}")
        elif value != expected:
            root.problem(key, f"must be {expected}, got {shown(value)}")


def _read_name(metadata: Fields) -> str | None:
    if not metadata.has("name"):
        metadata.problem("name", "is required")
    return metadata.text("name", default=None, check=names.name_problem)


def _read_spec(root: Fields, *, name: str, namespace: str) -> Spec | None:
    fields = root.section("spec")
    if not root.has("spec"):
        return None
    model = read_model(fields.section("model"), deployment_name=name)
    engine = read_engine(fields.section("engine"))
    resources = read_resources(fields.section("resources"))
    if engine.kv_cache_in_fp8 and not resources.gpus:
        fields.section("engine").problem(
            "extraArgs", "has --kv-cache-dtype fp8, which needs a GPU: set spec.resources.limits[nvidia.com/gpu] to 1"
        )
    if engine.weights_in_int8 and resources.gpus:
        fields.section("engine").problem(
            "extraArgs", "has --quantization int8, which is for CPUs: leave it out, or spec.resources' nvidia.com/gpu"
        )
    replicas = fields.integer("replicas", default=1)
    autoscaling = read_autoscaling(fields.section("autoscaling")) if fields.has("autoscaling") else None
    rollout = read_rollout(fields.section("rollout"))
    auth_secret = read_secret_name(fields, "auth")
    drain = read_drain(fields.section("drain"))
    paused = fields.flag("paused")
    pod_template = fields.mapping("podTemplate")
    fields.done()
    return Spec(
        name=name,
        namespace=namespace,
        model=model or _UNREADABLE,
        engine=engine,
        resources=resources,
        replicas=replicas,
        autoscaling=autoscaling,
        rollout=rollout,
        auth_secret=auth_secret,
        drain=drain,
        paused=paused,
        pod_template=pod_template,
    )
