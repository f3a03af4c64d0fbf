# SPDX-License-Identifier: Apache-2.0
"""A cluster as Kubernetes manifests: a kustomize base, and an overlay for each kind of engines.

The base has what all have in common: masters that elect through a Lease, a node of the store on every host
with a label, conductor, gateway, rights, budgets, network rules and monitoring. An overlay adds prefill and
decode, as LeaderWorkerSets or as a RoleBasedGroup, with our workers or vLLM, and the arguments that name
their instances. Pods run as a user without rights, and only masters get a token of the API server.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mooncake.cli import boards
from mooncake.cli.alerts import rule_groups
from mooncake.cli.deploy import (
    CLIENTS_FILE,
    CONDUCTOR_PORT,
    CREDENTIALS,
    ENGINE_PORT,
    MASTER_PORT,
    NODE_CHECK,
    SECRETS,
    Addresses,
    DeploySettings,
    Program,
    conductor,
    gateway,
    master,
    node,
    vllm,
    worker,
)

PART = "app.kubernetes.io/part-of"
COMPONENT = "app.kubernetes.io/component"
FIRST_STAGE = {"mooncake/stage": "first"}
"""Label of the pod of a group of stages that has the HTTP server."""
USER = 10001
POD_IP, POD_NAME = "$(POD_IP)", "$(POD_NAME)"
LEASE = "masters"
ENGINES = ("workers", "vllm")
GROUPS = ("lws", "rbg")
"""LeaderWorkerSets, RoleBasedGroup."""
GROUP = "engines"
"""Name of the RoleBasedGroup."""
GIVEN_CLIENTS = "/etc/mooncake/clients/clients.toml"
"""Where the gateway's pod has the Secret of its clients' keys."""
MAX_SECRET_BYTES = 1 << 20
"""The largest Secret that Kubernetes keeps."""
MEMORY_BEYOND_POOL = 2 << 30
DESIRED = "mooncake_conductor_desired_instances"

Manifest = dict[str, Any]


def files(settings: DeploySettings) -> dict[str, Any]:
    """Base, overlays, and the Secrets' kustomization, by path."""
    base = base_of(settings)
    found: dict[str, Any] = {f"kubernetes/base/{name}": content for name, content in base.items()}
    found["kubernetes/base/kustomization.yaml"] = _kustomization(
        namespace=settings.namespace, resources=sorted(base)
    )
    for engine in ENGINES:
        for group in GROUPS:
            if settings.stages > 1 and (engine, group) == ("workers", "rbg"):
                continue  # its stages would find each other by other names
            folder = f"kubernetes/overlays/{engine}-{group}"
            resources, patches = overlay_of(settings, engine, group)
            found |= {f"{folder}/{name}": content for name, content in {**resources, **patches}.items()}
            found[f"{folder}/kustomization.yaml"] = _kustomization(
                namespace=settings.namespace,
                resources=["../../base", *sorted(resources)],
                patches=[{"path": name} for name in sorted(patches)],
            )
    adapter = {"rules": adapter_rules(), "externalRules": external_adapter_rules()}
    found["kubernetes/prometheus-adapter.yaml"] = adapter
    found[f"{SECRETS}/kustomization.yaml"] = _secrets(settings)
    return found


def base_of(settings: DeploySettings) -> dict[str, Any]:
    """The files of the base, without its kustomization."""
    place = place_of(settings, "lws")
    without = Addresses(**{**vars(place), "prefill": (), "decode": ()})
    programs = {
        "master": master(settings, Addresses(**{**vars(place), "own_name": f"{POD_NAME}.master"})),
        "node": node(settings, place),
        "conductor": conductor(settings, place, "workers"),
        "gateway": gateway(settings, without, "workers"),
    }
    return {
        "namespace.yaml": _object("v1", "Namespace", settings.namespace, scope=None),
        "master.yaml": [
            *_election(settings),
            _service(programs["master"], is_headless=True),
            _masters(settings, programs["master"]),
            _budget("master"),
        ],
        "node.yaml": [
            _service(programs["node"], is_headless=True),
            _object(
                "apps/v1",
                "DaemonSet",
                "node",
                selector=_selector("node"),
                updateStrategy={"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1}},
                template=_pod(settings, programs["node"], nodeSelector={"mooncake/node": "true"}),
            ),
        ],
        "conductor.yaml": [
            _service(programs["conductor"]),
            # One that is replaced begins with what engines and gateways report; two would know half each.
            _deployment(settings, programs["conductor"], replicas=1, strategy={"type": "Recreate"}),
        ],
        "gateway.yaml": [
            _service(programs["gateway"]),
            _deployment(
                settings,
                programs["gateway"],
                strategy={"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
            ),
            _budget("gateway"),
            _scaler(
                "gateway",
                ("apps/v1", "Deployment", "gateway"),
                2,
                8,
                _pods_metric("mooncake_gateway_requests_in_flight", "256"),
            ),
        ],
        "engines.yaml": [_budget("prefill"), _budget("decode")],
        "network.yaml": network_policies(settings),
        "monitoring.yaml": [
            *(_monitor(name, *program.web, settings) for name, program in programs.items()),
            _object(
                "monitoring.coreos.com/v1",
                "PrometheusRule",
                "mooncake",
                groups=rule_groups(settings.docs_url, [f'namespace="{settings.namespace}"']),
            ),
            *(
                _object(
                    "v1",
                    "ConfigMap",
                    f"mooncake-{name.removesuffix('.json')}",
                    labels={"grafana_dashboard": "1"},
                    scope=None,
                    data={name: json.dumps(content, indent=1)},
                )
                for name, content in boards.board_files(settings.namespace).items()
            ),
        ],
    }


def overlay_of(
    settings: DeploySettings, engine: str, group: str
) -> tuple[dict[str, Any], dict[str, Manifest]]:
    """The resources that an overlay adds, and its patches of the base."""
    place = place_of(settings, group)
    web = ("https" if engine == "workers" else "http", "http")
    added: list[Manifest] = []
    scaled: dict[str, tuple[str, str, str]] = {}
    if group == "lws":
        for role in ("prefill", "decode"):
            added.append(_leader_worker_set(settings, place, engine, role))
            scaled[role] = ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", role)
    else:
        added.append(_role_based_group(settings, place, engine))
        for role in ("prefill", "decode"):
            scaled[role] = ("workloads.x-k8s.io/v1alpha2", "RoleBasedGroupScalingAdapter", f"{GROUP}-{role}")
    for role, metric, target in (
        ("prefill", "mooncake_engine_requests_waiting", "4"),
        ("decode", "mooncake_engine_kv_cache_usage", "800m"),
    ):
        fewest, most = getattr(settings, role), getattr(settings, f"max_{role}")
        # vLLM does not report how long its steps take, so the conductor can't predict what they need.
        wanted = _desired_metric(role) if engine == "workers" else _pods_metric(metric, target)
        window_s = 120 if engine == "workers" else 600
        added.append(_scaler(role, scaled[role], fewest, most, wanted, window_s))
    for role in ("prefill", "decode"):
        served = _engine(settings, place, engine, role)
        # Of later stages there is nothing to scrape.
        first = FIRST_STAGE if _num_stages(settings, engine, role) > 1 else {}
        added.append(_service(served, name=f"{role}-web", is_headless=True, labels=first))
        added.append(_monitor(role, *web, settings))
    patches = {
        "conductor-patch.yaml": _arguments("conductor", conductor(settings, place, engine)),
        "gateway-patch.yaml": _arguments("gateway", gateway(settings, place, engine)),
    }
    return {"engines.yaml": added}, patches


def place_of(settings: DeploySettings, group: str) -> Addresses:
    """Where programs run, by the names that pods have in the cluster's DNS."""

    def instances(role: str) -> tuple[str, ...]:
        name, service = (role, role) if group == "lws" else (f"{GROUP}-{role}", f"s-{GROUP}-{role}")
        most = getattr(settings, f"max_{role}")
        return tuple(f"{name}-{number}.{service}:{ENGINE_PORT}" for number in range(most))

    masters = [f"master-{number}.master:{MASTER_PORT}" for number in range(settings.masters)]
    return Addresses(
        listens_on=POD_IP,
        own_name=POD_IP,
        masters=",".join(masters),
        election=f"k8s://{settings.namespace}/{LEASE}" if settings.masters > 1 else "",
        conductor=f"conductor:{CONDUCTOR_PORT}",
        prefill=instances("prefill"),
        decode=instances("decode"),
    )


def network_policies(settings: DeploySettings) -> list[Manifest]:
    """What may connect to what; everything else within the namespace is refused.

    Pods that use their host's network are not bound by them, and no selector of pods matches what they send.
    So masters then accept connections of all, and refuse those without the cluster's certificate.
    """
    of_masters = () if settings.host_network else ("master", "node", "prefill", "decode", "gateway")
    scrapers = {"namespaceSelector": {"matchLabels": {"mooncake/monitoring": "true"}}}
    allowed: dict[str, list[tuple[Sequence[str], Sequence[str | int]]]] = {
        "master": [
            (of_masters, ("rpc",)),
            (("conductor",), ("events", "replay")),
        ],
        "node": [(("node", "prefill", "decode"), ("data",))],
        "conductor": [(("gateway",), ("rpc",))],
        # Engines connect to each other at ports that they publish: stages of one instance, requests for KV
        # that is pushed, and the pushes. KV events are replayed from a port that the engine names.
        "prefill": [(("gateway",), ("http",)), (("conductor", "prefill", "decode"), ())],
        "decode": [(("gateway",), ("http",)), (("conductor", "prefill", "decode"), ())],
        "gateway": [((), ("https",))],  # its page of metrics, too
    }
    web = {role: "http" if role in ("prefill", "decode") else "web" for role in allowed if role != "gateway"}
    found = []
    for role, rules in allowed.items():
        ingress: list[Manifest] = []
        for sources, ports in rules:
            rule: Manifest = {}
            if sources:
                rule["from"] = [{"podSelector": {"matchLabels": _labels(one)}} for one in sources]
            if ports:
                rule["ports"] = [{"port": port, "protocol": "TCP"} for port in ports]
            ingress.append(rule)
        if role in web:
            ingress.append({"from": [scrapers], "ports": [{"port": web[role], "protocol": "TCP"}]})
        found.append(
            _object(
                "networking.k8s.io/v1",
                "NetworkPolicy",
                role,
                podSelector={"matchLabels": _labels(role)},
                policyTypes=["Ingress"],
                ingress=ingress,
            )
        )
    return found


def adapter_rules() -> list[Manifest]:
    """Rules of prometheus-adapter that make our metrics those of pods, by names that Kubernetes accepts."""
    names = {
        "mooncake_gateway_requests_in_flight": "mooncake_gateway_requests_in_flight",
        "vllm:num_requests_waiting": "mooncake_engine_requests_waiting",
        "vllm:kv_cache_usage_perc": "mooncake_engine_kv_cache_usage",
    }
    resources = {name: {"resource": name} for name in ("namespace", "pod")}
    return [
        {
            "seriesQuery": f'{series}{{namespace!="",pod!=""}}',
            "resources": {"overrides": resources},
            "name": {"as": name},
            "metricsQuery": "sum(<<.Series>>{<<.LabelMatchers>>}) by (<<.GroupBy>>)",
        }
        for series, name in names.items()
    ]


def external_adapter_rules() -> list[Manifest]:
    """The rule that makes the conductor's numbers of instances an external metric.

    ``max``: conductors that follow state none, so there is one number, or two for a moment of a takeover.
    """
    return [
        {
            "seriesQuery": f'{DESIRED}{{namespace!="",role!=""}}',
            "resources": {"overrides": {"namespace": {"resource": "namespace"}}},
            "name": {"as": DESIRED},
            "metricsQuery": "max(<<.Series>>{<<.LabelMatchers>>})",
        }
    ]


def _engine(
    settings: DeploySettings, place: Addresses, engine: str, role: str, stage: int | None = None
) -> Program:
    return vllm(settings, place, role) if engine == "vllm" else worker(settings, place, role, stage)


def _num_stages(settings: DeploySettings, engine: str, role: str) -> int:
    return settings.stages if (engine, role) == ("workers", "prefill") else 1


def _leader_worker_set(settings: DeploySettings, place: Addresses, engine: str, role: str) -> Manifest:
    size = _num_stages(settings, engine, role)
    first = _engine(settings, place, engine, role, 0 if size > 1 else None)
    template: Manifest = {"size": size, "restartPolicy": "RecreateGroupOnPodRestart"}
    if size > 1:
        template["leaderTemplate"] = _pod(settings, first)
        template["leaderTemplate"]["metadata"]["labels"] |= FIRST_STAGE
        template["workerTemplate"] = _pod(settings, _engine(settings, place, engine, role, 1))
    else:
        template["workerTemplate"] = _pod(settings, first)
    return _object(
        "leaderworkerset.x-k8s.io/v1",
        "LeaderWorkerSet",
        role,
        # No replicas: an update that states them would undo what the HorizontalPodAutoscaler has set.
        networkConfig={"subdomainPolicy": "Shared"},
        rolloutStrategy={
            "type": "RollingUpdate",
            "rollingUpdateConfiguration": {"maxUnavailable": 1, "maxSurge": 0},
        },
        leaderWorkerTemplate=template,
    )


def _role_based_group(settings: DeploySettings, place: Addresses, engine: str) -> Manifest:
    roles = [
        {
            "name": role,
            # No replicas, as in LeaderWorkerSets: the API server merges roles by their names.
            "scalingAdapter": {"enable": True},
            "rolloutStrategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxUnavailable": 1, "maxSurge": 0},
            },
            "standalonePattern": {"template": _pod(settings, _engine(settings, place, engine, role))},
        }
        for role in ("prefill", "decode")
    ]
    return _object("workloads.x-k8s.io/v1alpha2", "RoleBasedGroup", GROUP, roles=roles)


def _masters(settings: DeploySettings, program: Program) -> Manifest:
    claim = {
        "metadata": {"name": "oplog"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "20Gi"}}},
    }
    return _object(
        "apps/v1",
        "StatefulSet",
        "master",
        serviceName="master",
        replicas=settings.masters,
        podManagementPolicy="Parallel",
        minReadySeconds=15,  # a new master becomes a standby in sync before the next one is stopped
        selector=_selector("master"),
        template=_pod(
            settings,
            program,
            serviceAccountName="master",
            affinity=_apart("master"),
        ),
        volumeClaimTemplates=[claim],
    )


def _election(settings: DeploySettings) -> list[Manifest]:
    """The Lease, and the right to change this one only."""
    account = _object("v1", "ServiceAccount", "master", scope=None, automountServiceAccountToken=False)
    if settings.masters == 1:
        return [account]
    return [
        account,
        _object("coordination.k8s.io/v1", "Lease", LEASE, scope=None),
        _object(
            "rbac.authorization.k8s.io/v1",
            "Role",
            "election",
            scope=None,
            rules=[
                {
                    "apiGroups": ["coordination.k8s.io"],
                    "resources": ["leases"],
                    "resourceNames": [LEASE],
                    "verbs": ["get", "update"],
                }
            ],
        ),
        _object(
            "rbac.authorization.k8s.io/v1",
            "RoleBinding",
            "election",
            scope=None,
            roleRef={"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "election"},
            subjects=[{"kind": "ServiceAccount", "name": "master"}],
        ),
    ]


def _pod(settings: DeploySettings, program: Program, **more: Any) -> Manifest:
    """The template of a pod with one container."""
    role = program.role
    mounts: list[Manifest] = [
        {"name": "tls", "mountPath": CREDENTIALS, "readOnly": True},
        {"name": "tmp", "mountPath": "/tmp"},
    ]
    volumes: list[Manifest] = [
        {"name": "tls", "secret": {"secretName": "mooncake-tls", "defaultMode": 0o440}},
        {"name": "tmp", "emptyDir": {}},
    ]
    spec: Manifest = {
        "automountServiceAccountToken": role == "master" and settings.masters > 1,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 120,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        **more,
    }
    if settings.host_network and role in ("node", "prefill", "decode"):
        spec |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    if role == "master":
        mounts.append({"name": "oplog", "mountPath": "/var/lib/mooncake"})
    if role == "node" and settings.ssd_path:
        mounts.append({"name": "ssd", "mountPath": "/ssd"})
        volumes.append({"name": "ssd", "hostPath": {"path": settings.ssd_path, "type": "Directory"}})
    if program.computes:  # shared memory of the engine's own processes; 64 MiB otherwise
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}})
    if program.computes or role == "gateway":
        mounts.append({"name": "models", "mountPath": "/models", "readOnly": True})
        claim = {"claimName": settings.models_claim, "readOnly": True}
        volumes.append({"name": "models", "persistentVolumeClaim": claim})
    if role == "gateway":
        spec["initContainers"] = [_private_copy(program), _kept_copy(program)]
        mounts.append({"name": "clients", "mountPath": CLIENTS_FILE.rpartition("/")[0], "readOnly": True})
        volumes.append({"name": "given", "secret": {"secretName": "mooncake-clients"}})
        # Two copies while one replaces the other, and what the file system itself needs.
        size = _mebibytes(3 * MAX_SECRET_BYTES)
        volumes.append({"name": "clients", "emptyDir": {"medium": "Memory", "sizeLimit": size}})
    spec["containers"] = [_container(settings, program, mounts)]
    spec["volumes"] = volumes
    return {"metadata": {"labels": _labels(role)}, "spec": spec}


def _private_copy(program: Program) -> Manifest:
    """Copy the clients' keys to a file of mode 0600: the group of a pod may read a Secret's files."""
    return _copying(program, "clients", ["install", "-m", "0600", GIVEN_CLIENTS, CLIENTS_FILE])


def _kept_copy(program: Program) -> Manifest:
    """Copy them again whenever the Secret changes, beside the gateway, which reads a changed file.

    The copy takes the file's place in one step, so that the gateway never reads a part of it.
    """
    copy = f"install -m 0600 {GIVEN_CLIENTS} {CLIENTS_FILE}.new && mv {CLIENTS_FILE}.new {CLIENTS_FILE}"
    loop = f"while :; do cmp -s {GIVEN_CLIENTS} {CLIENTS_FILE} || {{ {copy}; }}; sleep 5 & wait $!; done"
    # As process 1 a shell ignores SIGTERM without a trap for it.
    command = ["sh", "-c", f"trap 'exit 0' TERM; {loop}"]
    return {**_copying(program, "clients-again", command), "restartPolicy": "Always"}


def _copying(program: Program, name: str, command: list[str]) -> Manifest:
    return {
        "name": name,
        "image": program.image,
        "command": command,
        "securityContext": _confined(),
        "resources": {"requests": {"cpu": "10m", "memory": "16Mi"}, "limits": {"memory": "64Mi"}},
        "volumeMounts": [
            {"name": "given", "mountPath": GIVEN_CLIENTS.rpartition("/")[0], "readOnly": True},
            {"name": "clients", "mountPath": CLIENTS_FILE.rpartition("/")[0]},
        ],
    }


def _container(settings: DeploySettings, program: Program, mounts: Sequence[Manifest]) -> Manifest:
    fields = {"POD_IP": "status.podIP", "POD_NAME": "metadata.name"}
    environment: list[Manifest] = [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()
    ]
    environment += [{"name": name, "value": value} for name, value in program.environment.items()]
    key = {"name": "mooncake-admin", "key": "ADMIN_API_KEY"}
    environment.append({"name": "ADMIN_API_KEY", "valueFrom": {"secretKeyRef": key}})
    found: Manifest = {
        "name": program.role,
        "image": program.image,
        "command": [program.command[0]],
        "args": list(program.command[1:]),
        "env": environment,
        "ports": [{"name": name, "containerPort": port} for name, port in program.ports.items()],
        "resources": _resources(settings, program),
        "securityContext": _confined(),
        "volumeMounts": list(mounts),
        **_probes(program),
    }
    if program.role == "gateway":
        # Requests still arrive until the end of this pod's endpoint is known everywhere.
        found["lifecycle"] = {"preStop": {"exec": {"command": ["sleep", "5"]}}}
    return found


def _probes(program: Program) -> Manifest:
    """Probes that open a connection, where no better one is possible: all ports but the gateway's require a
    certificate of the caller. Engines listen when their model is loaded."""
    port = next(iter(program.ports))
    ready: Manifest
    if program.role == "gateway":
        ready = {"httpGet": {"path": "/ready", "port": port, "scheme": "HTTPS"}}
        lives = {"httpGet": {"path": "/health", "port": port, "scheme": "HTTPS"}}
    else:
        ready = lives = {"tcpSocket": {"port": port}}
    if program.web[0] == "http" and program.computes:
        ready = lives = {"httpGet": {"path": "/health", "port": port}}
    if program.role == "node":
        ready = {"exec": {"command": list(NODE_CHECK)}}
    patience = 360 if program.computes else 30
    return {
        "startupProbe": {**lives, "periodSeconds": 5, "timeoutSeconds": 5, "failureThreshold": patience},
        "readinessProbe": {**ready, "periodSeconds": 5, "timeoutSeconds": 5, "failureThreshold": 2},
        "livenessProbe": {**lives, "periodSeconds": 10, "timeoutSeconds": 10, "failureThreshold": 6},
    }


def _resources(settings: DeploySettings, program: Program) -> Manifest:
    if program.computes:
        memory = settings.worker_memory_bytes
        found: Manifest = {"requests": {"cpu": "4", "memory": _mebibytes(memory)}}
        found["limits"] = {"memory": _mebibytes(memory)}
        if settings.gpus:
            found["limits"]["nvidia.com/gpu"] = str(settings.gpus)
        return found
    if program.role == "node":
        memory = settings.pool_size_bytes + MEMORY_BEYOND_POOL
    else:
        memory = 4 << 30
    return {"requests": {"cpu": "1", "memory": _mebibytes(memory)}, "limits": {"memory": _mebibytes(memory)}}


def _mebibytes(size_bytes: int) -> str:
    return f"{-(-size_bytes // (1 << 20))}Mi"


def _confined() -> Manifest:
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def _deployment(settings: DeploySettings, program: Program, **spec: Any) -> Manifest:
    template = _pod(settings, program, affinity=_apart(program.role))
    return _object(
        "apps/v1", "Deployment", program.role, **spec, selector=_selector(program.role), template=template
    )


def _service(
    program: Program, *, name: str = "", is_headless: bool = False, labels: Mapping[str, str] = {}
) -> Manifest:
    """The Service of a program's pods, or of those with further ``labels``."""
    spec: Manifest = {"clusterIP": "None", "publishNotReadyAddresses": True} if is_headless else {}
    return _object(
        "v1",
        "Service",
        name or program.role,
        labels=_labels(program.role),
        **spec,
        selector={**_labels(program.role), **labels},
        ports=[{"name": name, "port": port, "targetPort": name} for name, port in program.ports.items()],
    )


def _monitor(role: str, scheme: str, port: str, settings: DeploySettings) -> Manifest:
    endpoint: Manifest = {
        "port": port,
        "path": "/metrics",
        "scheme": scheme,
        "interval": boards.SCRAPE,
    }
    if scheme == "https":  # what is read in plain HTTP gets no key
        endpoint["authorization"] = {"credentials": {"name": "mooncake-admin", "key": "ADMIN_API_KEY"}}

        def of(key: str) -> Manifest:
            return {"secret": {"name": "mooncake-prometheus", "key": key}}

        endpoint["tlsConfig"] = {
            "ca": of("ca.pem"),
            "cert": of("prometheus.pem"),
            "keySecret": {"name": "mooncake-prometheus", "key": "prometheus.key"},
            "serverName": "localhost",
        }
    return _object(
        "monitoring.coreos.com/v1",
        "ServiceMonitor",
        role,
        namespaceSelector={"matchNames": [settings.namespace]},
        selector={"matchLabels": _labels(role)},
        endpoints=[endpoint],
    )


def _pods_metric(metric: str, average: str) -> Manifest:
    wanted = {"metric": {"name": metric}, "target": {"type": "AverageValue", "averageValue": average}}
    return {"type": "Pods", "pods": wanted}


def _desired_metric(role: str) -> Manifest:
    """The conductor's number of instances: divided by an average of 1 it is the number of replicas. A target
    of the type Value would multiply it by the present number."""
    metric = {"name": DESIRED, "selector": {"matchLabels": {"role": role}}}
    return {
        "type": "External",
        "external": {"metric": metric, "target": {"type": "AverageValue", "averageValue": "1"}},
    }


def _scaler(
    role: str,
    target: tuple[str, str, str],
    fewest: int,
    most: int,
    metric: Manifest,
    window_s: int = 600,
) -> Manifest:
    version, kind, name = target
    return _object(
        "autoscaling/v2",
        "HorizontalPodAutoscaler",
        role,
        scaleTargetRef={"apiVersion": version, "kind": kind, "name": name},
        minReplicas=fewest,
        maxReplicas=most,
        metrics=[metric],
        # Engines take minutes to load a model, and their caches are lost when they go. The conductor's number
        # has a window of its own; this one is for a conductor that was just started.
        behavior={"scaleDown": {"stabilizationWindowSeconds": window_s}},
    )


def _budget(role: str) -> Manifest:
    return _object("policy/v1", "PodDisruptionBudget", role, maxUnavailable=1, selector=_selector(role))


def _arguments(role: str, program: Program) -> Manifest:
    """A patch that replaces a container's arguments."""
    container = {"name": role, "args": list(program.command[1:])}
    return _object("apps/v1", "Deployment", role, template={"spec": {"containers": [container]}})


def _apart(role: str) -> Manifest:
    """Prefer hosts on which there is no other pod of the role."""
    term = {"labelSelector": {"matchLabels": _labels(role)}, "topologyKey": "kubernetes.io/hostname"}
    return {
        "podAntiAffinity": {
            "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": term}]
        }
    }


def _secrets(settings: DeploySettings) -> Manifest:
    """The kustomization that makes Secrets of the files beside it; ``ca.key`` is in none."""

    def one(name: str, *names: str) -> Manifest:
        return {"name": f"mooncake-{name}", "files": list(names)}

    return {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": settings.namespace,
        "generatorOptions": {"disableNameSuffixHash": True},
        "secretGenerator": [
            one("tls", "node.pem", "node.key", "ca.pem"),
            one("prometheus", "prometheus.pem", "prometheus.key", "ca.pem"),
            one("clients", "clients.toml"),
            {"name": "mooncake-admin", "envs": ["admin.env"]},
        ],
    }


def _kustomization(**fields: Any) -> Manifest:
    return {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization", **fields}


def _object(
    version: str,
    kind: str,
    name: str,
    labels: Mapping[str, str] = {},
    scope: str | None = "spec",
    **content: Any,
) -> Manifest:
    """A manifest whose ``content`` is its ``spec``, or is beside its metadata where there is no ``scope``."""
    metadata = {"name": name, "labels": {PART: "mooncake", **labels}}
    inner = {scope: content} if scope else content
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **inner}


def _labels(role: str) -> dict[str, str]:
    return {PART: "mooncake", COMPONENT: role}


def _selector(role: str) -> Manifest:
    return {"matchLabels": _labels(role)}
