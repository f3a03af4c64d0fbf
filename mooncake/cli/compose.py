# SPDX-License-Identifier: Apache-2.0
"""A cluster as a compose file: each program of ``deploy.py`` as a service, with etcd, Prometheus and Grafana.

Only the gateway, Prometheus and Grafana are published, the latter two on loopback. The containers' health
checks open a connection, as most ports require a certificate; a node's reads its page of metrics with its
own. Every service runs as the owner of the credentials, so a first service gives it the volumes: engines make
a volume with the owner that its folder has in the image, which is another user in Prometheus' and etcd's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mooncake.cli import boards
from mooncake.cli.deploy import (
    CLIENTS_FILE,
    CONDUCTOR_PORT,
    CREDENTIALS,
    ENGINE_PORT,
    GATEWAY_PORT,
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
    worker,
)

ETCD_IMAGE = "etcd:3.6"
PROMETHEUS_IMAGE = "prometheus:3"
GRAFANA_IMAGE = "grafana:12"
EVERYWHERE = "0.0.0.0"
VOLUMES = "volumes"
"""Name of the service that runs first, as root, with the right to change owners and no network."""
START_PERIODS = {"node": "600s", "prefill": "1800s", "decode": "1800s"}
"""Time in which a failed check does not count: a node registers its memory, and a worker loads its model."""
CONNECTS = "import socket; socket.create_connection(('127.0.0.1', {port}), 2)"


def files(settings: DeploySettings) -> dict[str, Any]:
    """The compose file, its variant for GPUs, and the configuration of Prometheus and Grafana."""
    services = services_of(settings)
    computing = [name for name in services if name.startswith(("prefill-", "decode-"))]
    targets = {
        name: (program.web[0], program.ports[program.web[1]])
        for name, program in programs_of(settings).items()
    }
    return {
        "compose.yaml": {
            "name": settings.namespace,
            "services": services,
            "volumes": {name: {} for name in volumes_of(settings)},
        },
        "compose.gpu.yaml": {
            "services": {
                name: {"deploy": {"resources": {"reservations": {"devices": [_gpus(settings, number)]}}}}
                for number, name in enumerate(computing)
            }
        },
        "monitoring/prometheus.yaml": boards.prometheus(targets),
    }


def _gpus(settings: DeploySettings, number: int) -> dict[str, Any]:
    """GPUs of the service with this number, by name: of a count each service gets the host's first ones."""
    each = max(1, settings.gpus)
    names = [str(one) for one in range(number * each, (number + 1) * each)]
    return {"driver": "nvidia", "device_ids": names, "capabilities": ["gpu"]}


def programs_of(settings: DeploySettings) -> dict[str, Program]:
    """The program of each service, by the service's name."""
    masters = [f"master-{number}" for number in range(settings.masters)]
    prefill = [f"prefill-{number}" for number in range(settings.prefill)]
    decode = [f"decode-{number}" for number in range(settings.decode)]

    def place(name: str) -> Addresses:
        return Addresses(
            listens_on=EVERYWHERE,
            own_name=name,
            masters=",".join(f"{one}:{MASTER_PORT}" for one in masters),
            election="etcd://etcd:2379" if len(masters) > 1 else "",
            conductor=f"conductor:{CONDUCTOR_PORT}",
            prefill=tuple(f"{one}:{ENGINE_PORT}" for one in prefill),
            decode=tuple(f"{one}:{ENGINE_PORT}" for one in decode),
        )

    found = {name: master(settings, place(name)) for name in masters}
    found |= {name: node(settings, place(name)) for name in (f"node-{n}" for n in range(settings.nodes))}
    found |= {name: worker(settings, place(name), "prefill") for name in prefill}
    found |= {name: worker(settings, place(name), "decode") for name in decode}
    found["conductor"] = conductor(settings, place("conductor"), "workers")
    found["gateway"] = gateway(settings, place("gateway"), "workers")
    return found


def volumes_of(settings: DeploySettings) -> list[str]:
    """Names of the volumes."""
    masters = [f"master-{number}" for number in range(settings.masters)]
    return [*(["etcd"] if settings.masters > 1 else []), *masters, "prometheus", "grafana"]


def services_of(settings: DeploySettings) -> dict[str, Any]:
    """The services of the compose file."""
    programs = programs_of(settings)
    masters = [name for name, program in programs.items() if program.role == "master"]
    nodes = [name for name, program in programs.items() if program.role == "node"]
    services: dict[str, Any] = {VOLUMES: _volumes(settings, volumes_of(settings))}
    if len(masters) > 1:
        services["etcd"] = _etcd()
    for name, program in programs.items():
        needs = {
            "master": ["etcd"] if len(masters) > 1 else [VOLUMES],
            "node": masters,
            "prefill": [*masters, *nodes],
            "decode": [*masters, *nodes],
            "conductor": masters,
            "gateway": ["conductor"],
        }[program.role]
        services[name] = _service(settings, name, program, needs)
    files = f"./{SECRETS}"
    services["prometheus"] = {
        "image": PROMETHEUS_IMAGE,
        "command": ["--config.file=/etc/prometheus/prometheus.yaml", "--storage.tsdb.path=/prometheus"],
        "user": _user(),
        "volumes": [
            _mount("./monitoring/prometheus.yaml", "/etc/prometheus/prometheus.yaml"),
            _mount("./monitoring/rules.yaml", "/etc/prometheus/rules.yaml"),
            *(
                _mount(f"{files}/{one}", f"/etc/prometheus/secrets/{one}")
                for one in ("prometheus.pem", "prometheus.key", "ca.pem", "admin.key")
            ),
            "prometheus:/prometheus",
        ],
        "ports": ["127.0.0.1:9090:9090"],
        "depends_on": _after(VOLUMES),
        **_hardened(),
    }
    services["grafana"] = {
        "image": GRAFANA_IMAGE,
        "user": _user(),
        "environment": {"GF_SECURITY_ADMIN_PASSWORD__FILE": "/etc/grafana/secrets/admin.key"},
        "volumes": [
            _mount("./monitoring/grafana-datasources.yaml", "/etc/grafana/provisioning/datasources/m.yaml"),
            _mount("./monitoring/grafana-dashboards.yaml", "/etc/grafana/provisioning/dashboards/m.yaml"),
            *(
                _mount(f"./monitoring/{name}", f"/var/lib/grafana/dashboards/{name}")
                for name in boards.board_files()
            ),
            _mount(f"{files}/admin.key", "/etc/grafana/secrets/admin.key"),
            "grafana:/var/lib/grafana",
        ],
        "ports": ["127.0.0.1:3000:3000"],
        "depends_on": {**_after(VOLUMES), "prometheus": {"condition": "service_started"}},
        **_hardened(),
    }
    return services


def _service(settings: DeploySettings, name: str, program: Program, needs: Sequence[str]) -> dict[str, Any]:
    credentials = f"./{SECRETS}"
    mounts: list[Any] = [
        _mount(f"{credentials}/{file}", f"{CREDENTIALS}/{file}")
        for file in ("node.pem", "node.key", "ca.pem")
    ]
    if program.role == "master":
        mounts.append(f"{name}:/var/lib/mooncake")
    if program.role == "node" and settings.ssd_path:
        mounts.append(_mount(f"{settings.ssd_path}/{name}", "/ssd", read_only=False))
    if program.computes or program.role == "gateway":
        mounts.append(_mount(f"${{MOONCAKE_MODELS:-{settings.models_path}}}", "/models"))
    if program.role == "gateway":
        mounts.append(_mount(f"{credentials}/clients.toml", CLIENTS_FILE))
    connects = ("python", "-c", CONNECTS.format(port=next(iter(program.ports.values()))))
    service: dict[str, Any] = {
        "image": program.image,
        "hostname": name,
        "user": _user(),
        "command": list(program.command),
        "environment": dict(program.environment),
        "env_file": [f"{credentials}/admin.env"],
        "volumes": mounts,
        "healthcheck": {
            "test": ["CMD", *(NODE_CHECK if program.role == "node" else connects)],
            "interval": "5s",
            "timeout": "5s",
            "retries": 6,
            "start_period": START_PERIODS.get(program.role, "60s"),
        },
        "stop_grace_period": "120s" if program.role == "gateway" else "60s",
        **_hardened(),
    }
    if needs:
        service["depends_on"] = _after(*needs)
    if program.role == "gateway":
        service["ports"] = [f"{GATEWAY_PORT}:{GATEWAY_PORT}"]
    return service


def _etcd() -> dict[str, Any]:
    return {
        "image": ETCD_IMAGE,
        "command": [
            "etcd",
            "--data-dir=/var/lib/etcd",
            f"--listen-client-urls=http://{EVERYWHERE}:2379",
            "--advertise-client-urls=http://etcd:2379",
        ],
        "user": _user(),
        "volumes": ["etcd:/var/lib/etcd"],
        "healthcheck": {
            "test": ["CMD", "etcdctl", "endpoint", "health"],
            "interval": "5s",
            "timeout": "5s",
            "retries": 12,
        },
        "depends_on": _after(VOLUMES),
        **_hardened(),
    }


def _volumes(settings: DeploySettings, names: Sequence[str]) -> dict[str, Any]:
    """The service that gives each volume to the user of the others, and ends."""
    return {
        "image": settings.image,
        "user": "0:0",
        "command": ["chown", _user(), *(f"/volumes/{name}" for name in names)],
        "volumes": [f"{name}:/volumes/{name}" for name in names],
        "network_mode": "none",
        **_hardened(),
        "cap_add": ["CHOWN"],
        "restart": "no",
    }


def _after(*names: str) -> dict[str, Any]:
    """What a service waits for: the end of the first service, the health of others."""
    ends = {VOLUMES: "service_completed_successfully"}
    return {name: {"condition": ends.get(name, "service_healthy")} for name in names}


def _hardened() -> dict[str, Any]:
    return {
        "read_only": True,
        "tmpfs": ["/tmp"],
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "restart": "unless-stopped",
    }


def _user() -> str:
    """The owner of the credentials on this host: a file of secrets that others may read is refused."""
    return "${MOONCAKE_USER:-10001:10001}"


def _mount(source: str, target: str, *, read_only: bool = True) -> dict[str, Any]:
    """A mount of a file or folder that must exist: docker makes a folder of one that does not, otherwise."""
    found = {"type": "bind", "source": source, "target": target, "bind": {"create_host_path": False}}
    return {**found, "read_only": True} if read_only else found
