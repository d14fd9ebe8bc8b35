"""The DataParallelDeployment API: every field of spec and status, once.

`crds/` is generated from these types (`python -m dp_operator.crd`), the operator decodes objects into them, and
the revision of a group is a hash over them. Field names are camelCase on the wire and snake_case here.

Three conventions the generator and the revision rely on:

* a field with a default is optional, and its default goes into the schema, so that `kubectl get -o yaml` shows it;
* `X | None = None` means "absent unless the user says so": it has no default in the schema;
* encoding leaves defaults out (`omit_defaults`), so adding a defaulted field later changes no revision.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct, field

from dp_operator.podtemplate import SCHEMA as POD_TEMPLATE_SCHEMA

GROUP = "dataparallel.io"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "DataParallelDeployment"
PLURAL = "dataparalleldeployments"

PER_NODE_MAX = 64  # devices

Port = Annotated[int, Meta(ge=1, le=65535)]
Seconds = Annotated[int, Meta(ge=0, le=604_800)]
# Of int-or-string fields the API server checks a pattern and a length only where the value is a string.
IntOrPercent = Annotated[
    int | str,
    Meta(
        extra_json_schema={
            "x-kubernetes-int-or-string": True,
            "minimum": 0,
            "maxLength": 4,
            "pattern": "^([0-9]|[1-9][0-9]|100)%$",
        }
    ),
]
Quantity = Annotated[
    int | str,
    Meta(
        extra_json_schema={
            "x-kubernetes-int-or-string": True,
            "minimum": 0,
            "maxLength": 32,
            "pattern": r"^\+?([0-9]+|[0-9]+\.[0-9]*|\.[0-9]+)(([KMGTPE]i)|[numkMGTPE]|([eE][-+]?[0-9]+))?$",
        }
    ),
]
ResourceList = Annotated[dict[str, Quantity], Meta(max_length=16)]
Labels = Annotated[dict[str, Annotated[str, Meta(max_length=63)]], Meta(max_length=64)]
Annotations = Annotated[dict[str, Annotated[str, Meta(max_length=4096)]], Meta(max_length=64)]
# A Kubernetes object we pass through without looking inside: kept whole by the API server, checked by it when used.
Opaque = Annotated[dict[str, Any], Meta(extra_json_schema={"x-kubernetes-preserve-unknown-fields": True})]

PodTemplate = Annotated[dict[str, Any], Meta(extra_json_schema=POD_TEMPLATE_SCHEMA)]


class _Spec(Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """Base of spec types. Unknown fields are ignored: the API server has already pruned or kept them."""


class Model(_Spec, frozen=True, kw_only=True):
    """What is served, and whether its DP ranks are one lock-stepped group (MoE) or independent engines (Dense)."""

    name: Annotated[
        str, Meta(min_length=1, max_length=512, description="Model name or path, as `vllm serve` takes it.")
    ]
    architecture: Annotated[
        Literal["Dense", "MoE"],
        Meta(description="Dense or MoE. vLLM's data-parallel rules differ, and only you know the model."),
    ]


class EnvVar(_Spec, frozen=True, kw_only=True):
    """One environment variable of the engine container."""

    name: Annotated[str, Meta(min_length=1, max_length=256, pattern=r"^[A-Za-z_][A-Za-z0-9_.-]*$")]
    value: Annotated[str, Meta(max_length=8192)] | None = None
    value_from: Opaque | None = None


class Resources(_Spec, frozen=True, kw_only=True):
    """Requests and limits of the engine container, devices aside."""

    requests: ResourceList = {}
    limits: ResourceList = {}


class Engine(_Spec, frozen=True, kw_only=True):
    """The vLLM container."""

    image: Annotated[str, Meta(min_length=1, max_length=512, description="Any unmodified vLLM image, or the stand-in.")]
    version: (
        Annotated[
            str,
            Meta(
                pattern=r"^[0-9]+\.[0-9]+(\.[0-9]+)?([.a-z0-9+-]*)$",
                max_length=32,
                description="vLLM version inside the image; default: the tag of a vllm/vllm-openai-like image.",
            ),
        ]
        | None
    ) = None
    command: Annotated[list[Annotated[str, Meta(max_length=1024)]], Meta(min_length=1, max_length=16)] = field(
        default_factory=lambda: ["vllm", "serve"]
    )
    args: Annotated[
        list[Annotated[str, Meta(max_length=4096)]],
        Meta(max_length=128, description="Appended last. A flag that the operator owns is refused."),
    ] = []
    env: Annotated[list[EnvVar], Meta(max_length=128)] = []
    port: Port = 8000
    scheme: Literal["HTTP", "HTTPS"] = "HTTP"
    resources: Resources = field(default_factory=Resources)
    shared_memory: Annotated[Quantity, Meta(description="Size of /dev/shm per local rank.")] = "2Gi"


class DataParallel(_Spec, frozen=True, kw_only=True):
    """Shape of one group of ranks."""

    size: Annotated[int, Meta(ge=1, le=4096, description="Data-parallel ranks in one group.")]
    size_local: Annotated[int, Meta(ge=1, le=4096, description="Ranks per pod; must divide size.")] = 1
    load_balancing: Literal["Internal", "Hybrid", "External"] = "Internal"
    head_placement: Annotated[
        Literal["Colocated", "Dedicated"],
        Meta(description="Dedicated: the head serves the API only and holds no rank (Dense, vLLM 0.14 or newer)."),
    ] = "Colocated"
    rpc_port: Port = 13345
    supervisor_port: Port = 9256
    api_server_count: (
        Annotated[
            int,
            Meta(
                ge=1,
                le=64,
                description="API server processes of a serving pod; default a quarter of its ranks, 1 to 4.",
            ),
        ]
        | None
    ) = None


class Devices(_Spec, frozen=True, kw_only=True):
    """Who decides which accelerators a container sees."""

    assignment: Annotated[
        Literal["None", "DevicePlugin", "Slots"],
        Meta(
            description="None: no devices. DevicePlugin: a limit on resourceName. Slots: fixed device indices per node."
        ),
    ]
    resource_name: Annotated[str, Meta(min_length=1, max_length=253)] = "nvidia.com/gpu"
    visible_devices_env_name: Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[A-Z_][A-Z0-9_]*$")] = (
        "CUDA_VISIBLE_DEVICES"
    )
    per_node: Annotated[int, Meta(ge=1, le=PER_NODE_MAX, description="Devices of one node, used by Slots.")] = 8


class Startup(_Spec, frozen=True, kw_only=True):
    """Limits on starting; changing them touches no pod."""

    timeout_seconds: Annotated[int, Meta(ge=10, le=604_800)] = 3600
    schedule_timeout_seconds: Annotated[int, Meta(ge=10, le=604_800)] = 900


class FailurePolicy(_Spec, frozen=True, kw_only=True):
    """How often and how fast a failed group is tried again."""

    max_restarts: (
        Annotated[int, Meta(ge=0, le=1000, description="Charged failures in a row before giving up; absent: never.")]
        | None
    ) = None
    backoff_seconds: Annotated[int, Meta(ge=1, le=3600)] = 10
    max_backoff_seconds: Annotated[int, Meta(ge=1, le=86_400)] = 300
    stable_seconds: Annotated[int, Meta(ge=1, le=604_800)] = 600
    unhealthy_seconds: Annotated[int, Meta(ge=5, le=86_400)] = 60
    stalled_seconds: Annotated[int, Meta(ge=10, le=86_400)] = 120


class Rollout(_Spec, frozen=True, kw_only=True):
    """How many groups may be replaced at once."""

    max_surge: IntOrPercent = 0
    max_unavailable: IntOrPercent = 1
    paused: bool = False


class Drain(_Spec, frozen=True, kw_only=True):
    """How a serving group is taken away: first its endpoint, then its head, then its workers."""

    endpoint_seconds: Annotated[int, Meta(ge=0, le=3600)] = 5
    timeout_seconds: Annotated[int, Meta(ge=0, le=86_400)] = 60


class Disruption(_Spec, frozen=True, kw_only=True):
    """What evictions may do."""

    policy: Literal["Managed", "Closed", "Open"] = "Managed"


class Scheduling(_Spec, frozen=True, kw_only=True):
    """Gang scheduler that should place the pods of a group together."""

    pod_group: Literal["None", "Volcano", "Coscheduling", "Kueue"] = "None"


class ServicePort(_Spec, frozen=True, kw_only=True):
    """One port of the client Service."""

    port: Port
    name: Annotated[str, Meta(max_length=15, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")] | None = None
    target_port: Port | None = None
    app_protocol: Annotated[str, Meta(max_length=253)] | None = None


class Service(_Spec, frozen=True, kw_only=True):
    """The Service that clients talk to: the pods of serving groups that have an API, nothing else."""

    type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = "ClusterIP"
    annotations: Annotations = {}
    ports: Annotated[list[ServicePort], Meta(max_length=16, description="Default: the engine's port.")] = []


class NetworkPolicy(_Spec, frozen=True, kw_only=True):
    """Who may reach the pods. vLLM's ZeroMQ ports have no authentication."""

    mode: Literal["Managed", "Unmanaged"] = "Managed"
    api_from: Annotated[list[Opaque], Meta(max_length=16)] | None = None
    peers: Annotated[list[Annotated[str, Meta(min_length=1, max_length=63)]], Meta(max_length=16)] = []


class Spec(_Spec, frozen=True, kw_only=True):
    """Desired state of a DataParallelDeployment."""

    model: Model
    engine: Engine
    data_parallel: DataParallel
    devices: Devices
    replicas: Annotated[int, Meta(ge=0, le=64, description="Number of groups.")] = 1
    suspend: bool = False
    head_resources: Annotated[
        Resources, Meta(description="Overrides engine.resources on the head pod, Colocated or not.")
    ] = field(default_factory=Resources)
    tensor_parallel_size: Annotated[int, Meta(ge=1, le=64)] = 1
    pipeline_parallel_size: Annotated[int, Meta(ge=1, le=64)] = 1
    enable_expert_parallel: bool = False
    startup: Startup = field(default_factory=Startup)
    failure_policy: FailurePolicy = field(default_factory=FailurePolicy)
    rollout: Rollout = field(default_factory=Rollout)
    drain: Drain = field(default_factory=Drain)
    disruption: Disruption = field(default_factory=Disruption)
    scheduling: Scheduling = field(default_factory=Scheduling)
    service: Service = field(default_factory=Service)
    network_policy: NetworkPolicy = field(default_factory=NetworkPolicy)
    template: PodTemplate | None = None
    head_template: PodTemplate | None = None


class _Status(Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """Base of status types. Times are RFC 3339 in UTC with whole seconds."""


class Condition(_Status, frozen=True, kw_only=True):
    """A Kubernetes condition."""

    type: Annotated[str, Meta(max_length=64)]
    status: Literal["True", "False", "Unknown"]
    reason: Annotated[str, Meta(max_length=128)]
    message: Annotated[str, Meta(max_length=2048)]
    last_transition_time: Annotated[str, Meta(extra_json_schema={"format": "date-time"})]
    observed_generation: int = 0


class Ranks(_Status, frozen=True, kw_only=True):
    """Ranks of all wanted groups that reached at least each stage."""

    expected: int = 0
    arrived: int = 0
    connected: int = 0
    loaded: int = 0
    ready: int = 0
    summary: Annotated[str, Meta(max_length=32, description='Ready ranks of expected ranks, such as "6/8".')] = ""


RankRanges = Annotated[str, Meta(max_length=1024, description="Ranks as ranges, such as 0-3,7.")]
Time = Annotated[str, Meta(extra_json_schema={"format": "date-time"})]


class Stages(_Status, frozen=True, kw_only=True):
    """Ranks of one group that reached at least each stage, as ranges."""

    arrived: RankRanges = ""
    connected: RankRanges = ""
    loaded: RankRanges = ""
    ready: RankRanges = ""


class Failure(_Status, frozen=True, kw_only=True):
    """Why one incarnation of a group ended."""

    reason: Annotated[str, Meta(max_length=64)]
    time: Time
    noticed_at: (
        Annotated[
            str,
            Meta(
                extra_json_schema={"format": "date-time"},
                description="When it was written down, before anything of the group was deleted.",
            ),
        ]
        | None
    ) = None
    charged: bool = True
    uncertain: Annotated[
        bool,
        Meta(
            description="Whether another pod may have been first, or was as late: its node is not in nodeFailures then."
        ),
    ] = False
    incarnation: Annotated[str, Meta(max_length=16)] = ""
    rank: int | None = None
    pod: Annotated[str, Meta(max_length=253)] = ""
    node: Annotated[str, Meta(max_length=253)] = ""
    exit_code: int | None = None
    signal: Annotated[str, Meta(max_length=16)] = ""
    message: Annotated[str, Meta(max_length=1024)] = ""
    first_error_lines: Annotated[str, Meta(max_length=1024)] = ""
    log_tail: Annotated[str, Meta(max_length=2048)] = ""


class GroupStatus(_Status, frozen=True, kw_only=True):
    """One incarnation of a group, and the ledger of its restarts and their causes.

    An entry without head pod is a group between two incarnations: waiting for its back-off.
    """

    incarnation: Annotated[str, Meta(max_length=16)]
    index: Annotated[int, Meta(ge=0, le=63)]
    revision: Annotated[str, Meta(max_length=16)] = ""
    state: Annotated[
        Literal["Starting", "Serving", "Stopping", "Waiting"],
        Meta(description="Starting, Serving, Stopping (being deleted), Waiting (for the next attempt)."),
    ] = "Starting"
    head_pod: Annotated[str, Meta(max_length=253)] = ""
    head_node: Annotated[str, Meta(max_length=253)] = ""
    engine_version: Annotated[
        str,
        Meta(max_length=32, description="vLLM version that its launchers found in the image; of several the oldest."),
    ] = ""
    created_at: Time | None = None
    scheduled_at: Time | None = None
    released_at: Time | None = None
    ready_at: Time | None = None
    suspected_at: (
        Annotated[
            str,
            Meta(
                extra_json_schema={"format": "date-time"},
                description="Since when the monitor reports a sign that a rank is gone, while the kubelet says nothing.",
            ),
        ]
        | None
    ) = None
    unready_at: (
        Annotated[
            str,
            Meta(
                extra_json_schema={"format": "date-time"},
                description="Since when a pod that serves was seen not to be ready; empty while all are.",
            ),
        ]
        | None
    ) = None
    stages: Stages = field(default_factory=Stages)
    waiting_for: Annotated[str, Meta(max_length=1024)] = ""
    restarts: Annotated[int, Meta(ge=0, description="Charged failures in a row.")] = 0
    served: Annotated[
        bool,
        Meta(description="Whether the group has served in this revision, in this incarnation or an earlier one."),
    ] = False
    next_attempt_at: Time | None = None
    restart_token: Annotated[
        str, Meta(max_length=128, description="Value of the restart annotation this incarnation was made under.")
    ] = ""
    last_failures: Annotated[list[Failure], Meta(max_length=3)] = []
    replaces: Annotated[
        str, Meta(max_length=16, description="Incarnation that serves until this one, its successor, is ready (surge).")
    ] = ""
    node_failures: Annotated[
        dict[str, Annotated[int, Meta(ge=0)]],
        Meta(max_length=8, description="Node -> how many of the charged failures in a row began there."),
    ] = {}


class Status(_Status, frozen=True, kw_only=True):
    """Observed state of a DataParallelDeployment."""

    observed_generation: int = 0
    selector: Annotated[str, Meta(max_length=512)] = ""
    replicas: int = 0
    ready_replicas: int = 0
    updated_replicas: int = 0
    available_replicas: int = 0
    ranks: Ranks = field(default_factory=Ranks)
    groups: Annotated[list[GroupStatus], Meta(max_length=256)] = []
    conditions: Annotated[list[Condition], Meta(max_length=16)] = []


class ObjectMeta(Struct, frozen=True, kw_only=True, rename="camel"):
    """The few metadata fields the operator reads."""

    name: str
    namespace: str = ""
    uid: str = ""
    generation: int = 0
    resource_version: str = ""
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class DataParallelDeployment(Struct, frozen=True, kw_only=True, rename="camel"):
    """One custom resource, decoded."""

    metadata: ObjectMeta
    spec: Spec
    status: Status = field(default_factory=Status)


def decode(obj: object) -> DataParallelDeployment:
    """Decode a custom resource as the API server returns it.

    Raises msgspec.ValidationError where the object does not fit the types, which can happen only while an
    older or newer CRD is installed than this operator's.
    """
    return msgspec.convert(obj, DataParallelDeployment)
