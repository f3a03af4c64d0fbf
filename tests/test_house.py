# SPDX-License-Identifier: Apache-2.0
"""Draws the map of the house and holds the code to it.

Floors, cores and the glossary are facts about the whole tree, so no single module can keep them;
this file does. Change the map here on purpose, with a note in docs/decisions/.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "mooncake"

# Highest floor first. A module imports only from floors below its own, or from its own room.
# Rooms on one floor don't know each other.
FLOORS: list[set[str]] = [
    {"__main__", "vllm_v1_proxy_server"},
    {"compat.programs"},
    {"cli"},
    {"console", "doctor"},
    {"gateway", "sim"},
    {"conductor", "inference", "forensics"},
    {"connectors"},
    {
        "async_store",
        "buffer_pool",
        "dataproto_catalog",
        "engine",
        "http_metadata_server",
        "mooncake_config",
        "mooncake_store_service",
        "structured_object_store",
    },
    {"compat"},
    {"store", "p2p"},
    {"transfer"},
    {"rpc"},
    {"http"},
    {"security"},
    {"kv_events"},
    {"state_table"},
    {"config", "driver", "tracing"},
    {"metrics"},
    {"machine", "clock", "files", "file_limit", "log", "kvlayout"},
    {"recorded_requests"},
    {"setting_types", "prefix", "types", "errors", "installation"},
    {"_native"},
]

# Cores decide and do nothing else (●): no I/O, no clock, no thread, no randomness of their own.
CORES = {
    "setting_types",
    "types",
    "errors",
    "prefix",
    "recorded_requests",
    "kvlayout",
    "machine",
    "state_table",
    "tracing.spans",
    "kv_events",
    "http.connections",
    "rpc.wire",
    "security.principal",
    "security.greeting",
    "security.keys",
    "security.request_signature",
    "transfer.batch",
    "transfer.rails",
    "transfer.descriptor",
    "transfer.topology",
    "p2p.delta",
    "p2p.download",
    "p2p.manifest",
    "p2p.messages",
    "p2p.settings",
    "p2p.swarm_peers",
    "p2p.token_bucket",
    "p2p.upload",
    "store.allocator",
    "store.master.introspection",
    "store.master.catalog",
    "store.master.catalog_events",
    "store.master.snapshot",
    "store.client.effects",
    "store.client.grants",
    "compat.objects.catalog",
    "compat.objects.manifest",
    "compat.store.parallelism",
    "compat.store.partition",
    "compat.store.read_plan",
    "compat.store.tensor_format",
    "store.master.effects",
    "store.ha.election",
    "store.node.task_agent",
    "store.master.eviction",
    "store.ha.standby_replication",
    "files.frames",
    "store.master.hot_replicas",
    "store.node.ssd_index",
    "store.master.kv_events",
    "store.master.master",
    "store.node.membership",
    "store.messages",
    "store.master.lease_bounds",
    "store.master.nodes",
    "store.master.objects",
    "store.client.operations",
    "store.master.put_queue",
    "store.master.verification",
    "store.master.key_scans",
    "store.master.prefix_counts",
    "store.master.placement",
    "store.master.log_records",
    "store.master.object_requests",
    "store.master.jobs",
    "store.ha.role",
    "store.ha.leader_search",
    "store.master.segments",
    "store.settings",
    "store.client.admin",
    "store.client.preallocated",
    "store.master.tasks",
    "store.master.tiering",
    "store.master.request_counters",
    "store.master.tenants",
    "store.master.put",
    "forensics.differences",
    "forensics.findings",
    "forensics.hygiene",
    "forensics.siblings",
    "forensics.volatile_text",
    "console.access",
    "console.cluster_map",
    "console.contents",
    "console.endpoint_answers",
    "console.history",
    "console.overview",
    "console.session_rows",
    "console.waterfall",
    "conductor.admission",
    "cli.alerts",
    "cli.cluster_status",
    "cli.completion",
    "cli.panels",
    "conductor.cache_groups",
    "conductor.prefix_index",
    "conductor.conductor",
    "conductor.prediction",
    "conductor.explanation",
    "conductor.policies",
    "conductor.health",
    "conductor.holder_sets",
    "conductor.kv_handover",
    "conductor.request_lifecycle",
    "conductor.key_table",
    "conductor.leadership",
    "conductor.load",
    "conductor.messages",
    "conductor.replication",
    "conductor.decode_forecast",
    "conductor.publisher_registry",
    "conductor.key_translation",
    "conductor.scaling_signal",
    "conductor.settings",
    "gateway.handoff",
    "connectors.encoder_cache",
    "connectors.encoder_output",
    "connectors.kv_link",
    "connectors.memory",
    "connectors.planner",
    "inference.blocks",
    "inference.pipeline",
    "inference.request",
    "inference.scheduler",
    "cli.supervisor",
    "doctor.checks",
    "doctor.facts",
    "doctor.findings",
}
WORLDLY = {
    "aiohttp",
    "asyncio",
    "fastapi",
    "http",
    "multiprocessing",
    "os",
    "pathlib",
    "requests",
    "select",
    "selectors",
    "signal",
    "socket",
    "subprocess",
    "threading",
    "time",
    "torch",
    "uvicorn",
    "uvloop",
    "zmq",
}

# Modules that are entered from outside (a console script, ``python -m``, a user's import), so that
# no module here needs to import them.
DOORS = {
    *("async_store", "buffer_pool", "mooncake_config"),
    *("dataproto_catalog", "structured_object_store"),
    "__main__",
    "cli",
    "cli.bench.gloo_process",
    "compat.programs.client",
    "compat.programs.master",
    "compat.programs.transfer_engine_bench",
    "compat.transfer.vllm_adaptor",
    "vllm_v1_proxy_server",
    "connectors.lmcache",
    "connectors.vllm.plugin",
    "connectors.sglang",
    "engine",
    "transfer",
    "store",
    "http_metadata_server",
    "mooncake_store_service",
    "sim.__main__",
}


def module_name(path: Path) -> str:
    parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts)


MODULES = {
    module_name(path): path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"
}


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text())


@cache
def for_types_only(module: str) -> frozenset[ast.AST]:
    """What ``mooncake.store`` imports for type checkers only: it exports names of ``compat`` lazily."""
    blocks = [
        node
        for node in tree_of(module).body
        if module == "store" and isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    return frozenset(inner for block in blocks for inner in ast.walk(block))


@cache
def imports_of(module: str) -> frozenset[str]:
    """Modules of this package that ``module`` imports, at any depth of its code, as dotted names."""
    found: set[str] = set()
    for node in ast.walk(tree_of(module)):
        if node in for_types_only(module):
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively; write the whole name"
            name = node.module or ""
            found.add(name)
            found.update(f"{name}.{alias.name}" for alias in node.names)
    inside = {name.removeprefix("mooncake.") for name in found if name.startswith("mooncake.")}
    return frozenset(name for name in inside if name in MODULES or name == "_native")


def foreign_imports_of(module: str) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.Import):
            found.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found - {"mooncake"}


def room(module: str) -> str:
    """Top-level room of a module. ``compat.programs`` is one of its own: it lies above ``cli``."""
    return "compat.programs" if module.startswith("compat.programs") else module.split(".")[0]


def floor(module: str) -> int:
    for number, rooms in enumerate(FLOORS):
        if room(module) in rooms:
            return number
    pytest.fail(f"{module} is on no floor: add its room to FLOORS")


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down(module: str) -> None:
    for target in imports_of(module):
        if room(target) != room(module):
            assert floor(target) > floor(module), f"{module} imports {target}, which is not below it"


@pytest.mark.parametrize("module", sorted(CORES & MODULES.keys()))
def test_cores_touch_nothing(module: str) -> None:
    assert not foreign_imports_of(module) & WORLDLY
    assert not imports_of(module) & {"clock", "driver", "config", "_native"}
    source = MODULES[module].read_text()
    assert not re.search(r"\brandom\.(random|choice|randint|shuffle|sample)\(", source), "pass a Random"


def test_every_core_on_the_map_exists() -> None:
    assert MODULES.keys() >= CORES


def test_sim_imports_cores_never_shells() -> None:
    own = {name for name in MODULES if room(name) == "sim"}
    packages = {name for name, path in MODULES.items() if path.name == "__init__.py"}
    for module in own:
        assert imports_of(module) - own <= CORES | packages, module


def test_only_transports_open_the_cellar() -> None:
    for module in MODULES:
        if "_native" in imports_of(module):
            assert room(module) == "transfer", f"{module} imports _native"


def test_only_inference_knows_torch() -> None:
    """The drop-in store's tensor calls load it by name when they are called, and one module does that."""
    for module in MODULES:
        if "torch" in foreign_imports_of(module) or "transformers" in foreign_imports_of(module):
            assert room(module) in {"inference", "connectors"} or module == "cli.bench.gloo_process", module
        if re.search(r"import_module\(\"torch\W", MODULES[module].read_text()):
            assert module == "compat.store.tensor_memory", module


def test_every_module_is_imported_by_another() -> None:
    imported = {target for module in MODULES for target in imports_of(module)}
    packages = {name.rpartition(".")[0] for name in MODULES}
    entered_by_name = _modules_named_in_strings()
    lonely = MODULES.keys() - imported - DOORS - packages - entered_by_name
    assert not lonely, f"no module imports {sorted(lonely)}"


def _modules_named_in_strings() -> set[str]:
    """Modules imported by name when they are needed: subcommands, transports, lazy public names."""
    names: set[str] = set()
    for module in MODULES:
        for node in ast.walk(tree_of(module)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                names.update(re.findall(r"^mooncake\.([a-z0-9_.]+)(?::\w+)?$", node.value))
    return names


def test_every_module_opens_with_what_it_owns() -> None:
    for module in MODULES:
        docstring = ast.get_docstring(tree_of(module))
        assert docstring, f"{module} has no opening paragraph"


def test_readme_tree_is_true() -> None:
    """Each ``path  # what`` line of the README's tree exists, and no room is missing from it."""
    readme = (ROOT / "README.md").read_text()
    tree = re.search(r"<!-- tree -->\n```\n(.*?)```", readme, re.S)
    assert tree, "README.md has no tree"
    named: set[str] = set()
    parents: list[str] = []
    for line in tree.group(1).splitlines():
        match = re.match(r"(\s*)([\w./{},*-]+)", line)
        if not match:
            continue
        depth = len(match.group(1)) // 2
        parents[depth:] = [match.group(2).rstrip("/")]
        path = "/".join(parents)
        named.add(path)
        assert (ROOT / path).exists(), f"README names {path}, which does not exist"
    rooms = {
        f"mooncake/{path.name}"
        for path in PACKAGE.iterdir()
        if path.suffix == ".py" or (path.is_dir() and (path / "__init__.py").exists())
    }
    missing = rooms - named
    assert not missing, f"README's tree lacks {sorted(missing)}"


def test_glossary_owners_are_true() -> None:
    """Each term's owner exists and defines a name that is the term."""
    glossary = (ROOT / "docs" / "glossary.md").read_text()
    rows = re.findall(r"^\| ([^|]+) \| `([\w/.]+)`(?: `(\w+)`)? \|", glossary, re.M)
    assert len(rows) >= 15
    for term, path, name in rows:
        owner = ROOT / path
        assert owner.exists(), f"{term}: {path} does not exist"
        if name:
            assert re.search(rf"\b{name}\b", owner.read_text()), f"{term}: {path} does not define {name}"


FORBIDDEN_NAMES = {"utils", "util", "common", "manager", "helper", "helpers", "misc", "v1", "v2"}


def test_no_room_for_leftovers() -> None:
    for module in MODULES:
        assert not set(module.split(".")) & FORBIDDEN_NAMES, module


def test_tests_mirror_modules() -> None:
    """A test file in a room's folder is named after a module there, or tests the room as a whole."""
    lonely = []
    for path in sorted((ROOT / "tests").glob("*/**/test_*.py")):
        rooms = path.relative_to(ROOT / "tests").parts[:-1]
        if rooms[0] not in {room(name) for name in MODULES}:
            continue
        subject = path.stem.removeprefix("test_")
        folder = ".".join(rooms)
        candidates = {
            f"{folder}.{subject}",
            f"{folder}.transports.{subject}",
        }
        whole_room = {
            "commands",
            "invariants",
            "packaging",
            "parity",
            "processes",
            "scenarios",
            "sweep",
            "bad_input",
            "surface",
            "ssd",
            "root_fs_dir",
            "tls",
            "programs",
            "elected_masters",
            "simulate",
        }
        if not candidates & MODULES.keys() and subject not in whole_room:
            lonely.append(str(path.relative_to(ROOT)))
    assert not lonely, f"they mirror no module: {lonely}"


# Cores without a test file of their own, and why: what they hold is decided or checked elsewhere. The list
# only shrinks: a new core comes with its tests.
UNTESTED = {
    "conductor.messages": "records without behaviour, checked by every test of the conductor",
    "conductor.settings": "fields and their defaults, checked by tests/test_config.py",
    "connectors.kv_link": "a contract; tests/contract/test_connectors.py holds every implementation to it",
    "machine": "a contract; tests/test_driver.py runs it, and every core's tests keep it",
    "setting_types": "words in annotations, checked by tests/test_config.py",
    "store.master.effects": "records without behaviour, checked by every test of the master",
    "store.client.effects": "records without behaviour, checked by tests/store/client/test_operations.py",
    "store.messages": "records without behaviour, checked by tests/store/client/test_operations.py",
    "store.settings": "fields and their defaults, checked by tests/test_config.py",
    "types": "nouns without behaviour",
}
MOST_UNTESTED = 10


def mirror(core: str) -> Path:
    """Where the tests of a core are."""
    *rooms, name = core.split(".")
    return ROOT.joinpath("tests", *rooms, f"test_{name}.py")


def test_every_core_has_its_tests() -> None:
    missing = [core for core in sorted(CORES) if core not in UNTESTED and not mirror(core).exists()]
    assert not missing, f"no test file mirrors {missing}"


def test_what_needs_no_tests_is_a_list_that_shrinks() -> None:
    assert len(UNTESTED) <= MOST_UNTESTED, "a new core comes with its tests"
    for core in UNTESTED:
        assert core in CORES, f"{core} is no longer a core: take it off the list"
        assert not mirror(core).exists(), f"{core} has its tests now: take it off the list"


def quick_files() -> list[str]:
    """The tests that `make quick` runs: of every core, but those that take a second to import torch."""
    files = [mirror(core) for core in sorted(CORES)]
    has_torch = re.compile(r"^\s*import torch|importorskip\(\"torch\"|import_module\(\"torch", re.M)
    return [
        str(path.relative_to(ROOT))
        for path in [*files, Path(__file__)]
        if path.exists() and not has_torch.search(path.read_text())
    ]


def test_tests_import_no_bench() -> None:
    """A bench may start what tests start; a test that needs a bench would fail with it."""
    for path in sorted((ROOT / "tests").rglob("*.py")):
        imported = re.findall(r"^\s*(?:from|import) (bench\b[\w.]*)", path.read_text(), re.M)
        assert not imported or path.parent.name == "bench", f"{path.relative_to(ROOT)} imports {imported}"
