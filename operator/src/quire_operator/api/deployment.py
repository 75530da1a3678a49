"""The whole LLMDeployment as values, or all reasons why a document is not one.

It parses Kubernetes objects and local YAML files alike. An unknown field is an error.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from quire_operator.api import names
from quire_operator.api.engine import DType, Engine, Parallelism, Resources
from quire_operator.api.engine_flags import extra_args_problems
from quire_operator.api.field_kinds import Boolean, Integer, PassedOn, SecretReference
from quire_operator.api.fields import Fields, Problem, section_of, shown
from quire_operator.api.model import AccessMode, Draft, Model
from quire_operator.api.rollout import Drain, Rollout, RolloutStrategy
from quire_operator.api.scaling import Autoscaling, AutoscalingMode
from quire_operator.api.schema import Rule, Section, flag_owners, read_section

HOSTNAME = "kubernetes.io/hostname"
"""The label of a node with its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Invalid:
    """The reasons why a document is not an LLMDeployment, in the order of its fields."""

    name: str | None
    namespace: str | None
    problems: tuple[Problem, ...]
    readable: "Spec | None" = None
    """The rest of the spec, with defaults for invalid fields: only for finding more problems, never to be applied."""

    def __str__(self) -> str:
        return "; ".join(map(str, self.problems))


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """One LLMDeployment with its defaults filled in."""

    name: str
    namespace: str
    model: Model = Section("The model to serve and the location of its weights.").required()
    engine: Engine = Section("Settings of the inference engine in each replica.").default(Engine())
    resources: Resources = Section(
        "Resources of each replica's engine container. To request a GPU, set the limit nvidia.com/gpu or "
        "amd.com/gpu, or nvidia.com/mig-PROFILE for a MIG slice; for several whole GPUs, divide the model among as "
        "many ranks with parallelism. The kernels are compiled for GPUs of AMD, but have not run on one yet.",
        flags=("device",),
    ).default(Resources())
    parallelism: Parallelism = Section(
        "Ranks over which each replica spreads the model, and the pods in which they run. The ranks of a pod share "
        "its CPUs and memory; on GPUs, each rank has one. For model families that quire implements itself. Default "
        "is one rank.",
        is_default_stored=False,
    ).default(Parallelism())
    replicas: int = Integer(
        "Number of replicas. While spec.autoscaling is set, it is only the number at which autoscaling started and "
        "cannot be changed. When spec.autoscaling is removed, the autoscaler's number of replicas stays if it is "
        "higher, until this field is changed. To stop the autoscaler for some time, set autoscaling.mode to "
        "Recommend."
    ).default(1)
    autoscaling: Autoscaling | None = Section(
        "Settings of the autoscaler. Without them, spec.replicas sets the number of replicas."
    ).default(None)
    rollout: Rollout = Section("How replicas are replaced when the spec changes.").default(Rollout())
    auth_secret: str | None = SecretReference(
        "API keys that may send requests. Without auth, every client that can reach the replicas or the gateway "
        "may send requests.",
        secret="Secret in this namespace whose key `keys` contains API keys, one per line: KEY or sha256:HEX, "
        "optionally preceded by name=TENANT and the limits requests_per_minute=N, tokens_per_minute=N and "
        "max_concurrent=N. Engines require one of these keys in the header Authorization: Bearer KEY, which a "
        "gateway without keys forwards. Through a gateway that has keys, a client sends its key of the "
        "gateway there, and that of the engine in the header X-Quire-Engine-Key: KEY. Changes take effect "
        "without a restart. With minReplicas 0, configure keys in the gateway too, because it queues requests "
        "that no engine has authenticated yet. `quire up` has no secrets and reads the file named by "
        "QUIRE_API_KEY_FILE.",
        flags=("api-key-file", "api-key"),
    ).default(None)
    drain: Drain = Section("How a replica finishes its work before it stops.").default(Drain())
    paused: bool = Boolean(
        "True keeps the existing replicas although the spec has changed, until it is false again. Replicas are "
        "still scaled and restarted, with the previous pod template.",
        is_default_stored=False,
    ).default(False)
    pod_template: Mapping[str, object] = PassedOn(
        "Strategic merge patch for the pod template: nodeSelector, tolerations, affinity, env, volumes, "
        "priorityClassName, additional containers and so on. The engine's container is named engine; it does not "
        "start if a variable QUIRE_ENGINE_… reaches it, for example by envFrom. Changes that break the "
        "communication between quire and its pods are rejected, and so is everything that the restricted Pod "
        "Security Standard forbids, groups 0, system priorities, and tokens of the API server. The chart value "
        "operator.podTemplate.allow can list the exceptions that a message names."
    ).default({})

    RULES: ClassVar = (
        Rule(
            at="replicas",
            cel="!has(self.autoscaling) || !has(oldSelf.autoscaling) || self.replicas == oldSelf.replicas",
            message="the autoscaler owns the number of replicas while spec.autoscaling is set: change "
            "autoscaling.minReplicas and maxReplicas instead, or remove autoscaling",
        ),
        Rule(
            at="engine.extraArgs",
            holds=lambda spec, document: spec.resources.gpus > 0 or not spec.engine.kv_cache_in_fp8,
            message="has --kv-cache-dtype fp8, which needs a GPU: set spec.resources.limits[nvidia.com/gpu] to 1",
        ),
        Rule(
            at="engine.extraArgs",
            holds=lambda spec, document: spec.resources.gpus == 0 or spec.engine.quantization != "int8",
            message="has --quantization int8, which is for CPUs: use fp8, or leave out the GPU of spec.resources",
        ),
        Rule(
            at="engine.extraArgs",
            holds=lambda spec, document: spec.resources.gpus > 0 or spec.engine.quantization != "fp8",
            message="has --quantization fp8, which needs a GPU: set spec.resources.limits[nvidia.com/gpu] to 1, or use "
            "int8",
        ),
        Rule(
            at="engine.extraArgs",
            holds=lambda spec, document: not spec.resources.on_amd or spec.engine.quantization != "fp8",
            message="has --quantization fp8, which is for GPUs of NVIDIA in this version: leave it out, or use "
            "nvidia.com/gpu",
        ),
        Rule(
            at="engine.extraArgs",
            holds=lambda spec, document: (
                spec.engine.quantization != "fp8" or spec.engine.dtype in (DType.AUTO, DType.BFLOAT16)
            ),
            message="has --quantization fp8, which computes in bfloat16: set engine.dtype to Auto or BFloat16",
        ),
        Rule(
            at="model",
            cel="!has(self.rollout) || !has(self.rollout.strategy) || self.rollout.strategy != 'Canary' "
            "|| (has(self.model.servedName) ? self.model.servedName : '') "
            "== (has(oldSelf.model.servedName) ? oldSelf.model.servedName : '')",
            message="servedName cannot change with rollout.strategy Canary, because a canary serves the same name: set "
            "strategy to RollingUpdate for this change",
        ),
        Rule(
            at="parallelism.tensor",
            holds=lambda spec, document: (
                spec.parallelism.ranks_per_node <= 1
                or spec.resources.cpu_limit is None
                or spec.resources.cpu_limit >= spec.parallelism.ranks_per_node
            ),
            message="must be at most resources.limits.cpu for the ranks of each pod (tensor × pipeline ÷ nodes), "
            "because ranks compute at the same time: lower it, raise the limit, or use more nodes",
        ),
        Rule(
            at="parallelism.tensor",
            holds=lambda spec, document: (
                # Ranks that are not divided evenly have a message of their own.
                spec.parallelism.ranks % spec.parallelism.nodes > 0
                or spec.resources.gpus in (0, spec.parallelism.ranks_per_node)
            ),
            message="each rank uses one GPU, so spec.resources must have as many GPUs as a pod has ranks (tensor × "
            "pipeline ÷ nodes): change one of them",
        ),
        Rule(
            at="parallelism.tensor",
            holds=lambda spec, document: not spec.resources.has_parts_of_gpus or spec.parallelism.ranks == 1,
            message="does not work with MIG slices and shared GPUs, nor does pipeline, because NCCL cannot connect the "
            "ranks: request nvidia.com/gpu, or one larger slice",
        ),
        Rule(
            at="parallelism.tensor",
            holds=lambda spec, document: spec.engine.adapters is None or spec.parallelism.ranks == 1,
            message="does not work with engine.adapters in this version, nor does pipeline: remove one of them",
        ),
        Rule(
            at="parallelism.tensor",
            holds=lambda spec, document: spec.parallelism.ranks == 1 or spec.draft is None,
            message="does not work with engine.speculation.draft in this version, nor does pipeline: remove one of "
            "them",
        ),
        Rule(
            at="parallelism",
            cel="((has(self.parallelism) && has(self.parallelism.nodes) ? self.parallelism.nodes : 1) == 1) == "
            "((has(oldSelf.parallelism) && has(oldSelf.parallelism.nodes) ? oldSelf.parallelism.nodes : 1) == 1)",
            message="nodes cannot change between 1 and more, because one pod and a group of pods are objects of "
            "different kinds: create another LLMDeployment, and delete this one when the other is Ready",
        ),
        Rule(
            at="rollout.strategy",
            holds=lambda spec, document: (
                spec.rollout.strategy is not RolloutStrategy.CANARY or not spec.parallelism.is_group
            ),
            message="Canary does not work with parallelism.nodes in this version: use RollingUpdate",
        ),
    )

    def check(self, document: Fields) -> None:
        """Note a name too long for a group."""
        if self.parallelism.is_group and len(self.name) > names.MAX_GROUP_NAME_LENGTH:
            document.problem(
                "parallelism.nodes",
                f"with several nodes, metadata.name must have at most {names.MAX_GROUP_NAME_LENGTH} characters: "
                f"pods and labels are named after it; has {len(self.name)}",
            )

    @classmethod
    def parse(cls, body: Mapping[str, object]) -> "Spec | Invalid":
        """Return the spec of a whole object (apiVersion, kind, metadata, spec), or its problems. It never raises."""
        root, name, namespace = read_head(body, kind=names.KIND, name_problem=names.name_problem)
        spec = _read_spec(root, name=name or "unnamed", namespace=namespace) if root.has("spec") else None
        root.done()
        if root.problems or spec is None:
            return Invalid(name=name, namespace=namespace, problems=tuple(root.problems), readable=spec)
        return spec

    @property
    def draft(self) -> Draft | None:
        """The draft model or head of the engine."""
        return None if self.engine.speculation is None else self.engine.speculation.draft

    @property
    def gpus_per_replica(self) -> int:
        return self.resources.gpus * self.parallelism.nodes

    @property
    def max_pods(self) -> int:
        """The largest number of pods at once, without a rollout's surge."""
        return self.max_replicas * self.parallelism.nodes

    @property
    def has_one_node_cache(self) -> bool:
        """True if the volume that caches the model is mounted on one node, which the pod template does not name."""
        cache = self.model.cache
        if cache is None or not cache.is_created or cache.access_mode is not AccessMode.READ_WRITE_ONCE:
            return False
        return not section_of(self.pod_template, "spec", "nodeSelector").get(HOSTNAME)

    @property
    def replaces_in_place(self) -> bool:
        """True if a rollout must stop the only replica first.

        Its successor could be scheduled to a node that cannot mount the cache while the replica runs, and the replica
        would wait for the successor.
        """
        is_rolling = self.rollout.strategy is RolloutStrategy.ROLLING_UPDATE
        return is_rolling and self.max_pods < 2 and self.has_one_node_cache

    @property
    def initial_replicas(self) -> int:
        """The number of replicas to start with if none runs yet and no schedule is in force."""
        if self.autoscaling is None:
            return self.replicas
        return max(self.autoscaling.min_replicas, min(self.replicas, self.autoscaling.max_replicas))

    @property
    def only_recommends(self) -> bool:
        """True if decisions of the autoscaler are not applied."""
        return self.autoscaling is not None and self.autoscaling.mode is AutoscalingMode.RECOMMEND

    @property
    def max_replicas(self) -> int:
        """The largest number of replicas at once, without a rollout's surge."""
        return self.replicas if self.autoscaling is None else self.autoscaling.most_replicas


def read_head(
    body: Mapping[str, object], *, kind: str, name_problem: Callable[[str], str | None]
) -> tuple[Fields, str | None, str]:
    """Return an object of this kind, its name, if it has a valid one, and its namespace; without a spec to read yet."""
    root = Fields(body, path="", problems=[])
    root.knows("status")
    for key, expected in (("apiVersion", names.API_VERSION), ("kind", kind)):
        value = root.raw(key)
        if value is None:
            root.problem(key, f"is required: {expected}")
        elif value != expected:
            root.problem(key, f"must be {expected}, got {shown(value)}")

    metadata = root.section("metadata")
    if not metadata.has("name"):
        metadata.problem("name", "is required")
    name = metadata.text("name", default=None, check=name_problem)
    namespace = metadata.text("namespace", default="default")
    if not root.has("spec"):
        root.problem("spec", "is required")
    return root, name, namespace


def _read_spec(root: Fields, *, name: str, namespace: str) -> Spec:
    document = root.section("spec")
    spec = read_section(Spec, document, name=name, namespace=namespace)
    if not any(problem.path.startswith(f"{document.at(_EXTRA_ARGS)}[") for problem in root.problems):
        for problem in extra_args_problems(spec.engine.extra_args, OWNED_FLAGS):
            document.problem(f"{_EXTRA_ARGS}[{problem.index}]", problem.message)
    model = replace(spec.model, served_name=spec.model.served_name or name)
    return replace(spec, model=model, autoscaling=spec.autoscaling and spec.autoscaling.resolved)


_EXTRA_ARGS = "engine.extraArgs"
OWNED_FLAGS = dict(flag_owners(Spec, "spec"))
"""Flags of the engine that a field of the LLMDeployment sets, with the field's path."""
