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
    {"cli"},
    {"gateway", "sim"},
    {"conductor", "inference"},
    {"connectors"},
    {"http_metadata_server", "mooncake_store_service"},
    {"async_store", "buffer_pool", "mooncake_config"},
    {"store", "engine"},
    {"transfer"},
    {"rpc"},
    {"security"},
    {"web"},
    {"config", "driver", "metrics"},
    {"machine", "clock", "connections", "files", "log", "kvlayout"},
    {"marks", "prefix", "types", "errors"},
    {"_native"},
]

# Cores decide and do nothing else (●): no I/O, no clock, no thread, no randomness of their own.
CORES = {
    "marks",
    "types",
    "errors",
    "prefix",
    "kvlayout",
    "machine",
    "connections",
    "rpc.wire",
    "security.certificates",
    "security.greeting",
    "security.keys",
    "security.signed",
    "security.standing",
    "transfer.batch",
    "transfer.rails",
    "transfer.segment",
    "transfer.topology",
    "store.advances",
    "store.allocator",
    "store.applying",
    "store.asking",
    "store.catalog",
    "store.copying",
    "store.changes",
    "store.columns",
    "store.compat.parallelism",
    "store.compat.partition",
    "store.compat.ranges",
    "store.compat.tensorwire",
    "store.durable",
    "store.effects",
    "store.election",
    "store.errands",
    "store.eviction",
    "store.follow",
    "store.framing",
    "store.grants",
    "store.hot",
    "store.index",
    "store.kvevents",
    "store.master",
    "store.membership",
    "store.messages",
    "store.lasting",
    "store.mounting",
    "store.objects",
    "store.operations",
    "store.patterns",
    "store.pinning",
    "store.putqueue",
    "store.verification",
    "store.walks",
    "store.placement",
    "store.quotas",
    "store.reading",
    "store.records",
    "store.removing",
    "store.replication",
    "store.role",
    "store.search",
    "store.segments",
    "store.settings",
    "store.space",
    "store.steering",
    "store.stock",
    "store.tasks",
    "store.tiers",
    "store.tally",
    "store.tenants",
    "store.writing",
    "store.written",
    "conductor.admission",
    "conductor.assumed",
    "conductor.balance",
    "conductor.conductor",
    "conductor.costs",
    "conductor.eventwire",
    "conductor.explain",
    "conductor.fetching",
    "conductor.fit",
    "conductor.goodput",
    "conductor.health",
    "conductor.holders",
    "conductor.index",
    "conductor.judging",
    "conductor.keytable",
    "conductor.lenders",
    "conductor.lengths",
    "conductor.links",
    "conductor.load",
    "conductor.match",
    "conductor.messages",
    "conductor.misses",
    "conductor.past",
    "conductor.policies",
    "conductor.population",
    "conductor.predict",
    "conductor.price",
    "conductor.registry",
    "conductor.select",
    "conductor.seqhash",
    "conductor.settings",
    "conductor.translate",
    "conductor.verdict",
    "gateway.protocols",
    "connectors.link",
    "connectors.memory",
    "connectors.planning",
    "connectors.tensors",
    "inference.blocks",
    "inference.request",
    "inference.scheduler",
    "inference.step",
    "cli.supervise",
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
# nobody in the house needs to import them.
DOORS = {
    *("async_store", "buffer_pool", "mooncake_config"),
    "__main__",
    "cli",
    "cli.compat.client",
    "cli.compat.master",
    "cli.engine_bench",
    "vllm_v1_proxy_server",
    "connectors.lmcache",
    "connectors.plugin",
    "connectors.sglang",
    "engine",
    "transfer",
    "store",
    "http_metadata_server",
    "mooncake_store_service",
    "sim.__main__",
    "sim.hitrate",
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
def imports_of(module: str) -> frozenset[str]:
    """Modules of this package that ``module`` imports, at any depth of its code, as dotted names."""
    found: set[str] = set()
    for node in ast.walk(tree_of(module)):
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
    return module.split(".")[0]


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
    for module in own:
        assert imports_of(module) - own <= CORES | {"machine", "store", "transfer"}, module


def test_only_transports_open_the_cellar() -> None:
    for module in MODULES:
        if "_native" in imports_of(module):
            assert module.startswith("transfer."), f"{module} imports _native"


def test_only_inference_knows_torch() -> None:
    """The drop-in store's tensor calls load it by name when they are called, and one module does that."""
    for module in MODULES:
        if "torch" in foreign_imports_of(module) or "transformers" in foreign_imports_of(module):
            assert room(module) in {"inference", "connectors"}, module
        if re.search(r"import_module\(\"torch\W", MODULES[module].read_text()):
            assert module == "store.compat.tensor_memory", module


def test_nobody_is_imported_by_nobody() -> None:
    imported = {target for module in MODULES for target in imports_of(module)}
    packages = {name.rpartition(".")[0] for name in MODULES}
    entered_by_name = _modules_named_in_strings()
    lonely = MODULES.keys() - imported - DOORS - packages - entered_by_name
    assert not lonely, f"nobody imports {sorted(lonely)}"


def _modules_named_in_strings() -> set[str]:
    """Modules imported by name when they are needed: subcommands, transports, lazy public names."""
    names: set[str] = set()
    for module in MODULES:
        for node in ast.walk(tree_of(module)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                names.update(re.findall(r"^mooncake\.([a-z_.]+)(?::\w+)?$", node.value))
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
    for path in sorted((ROOT / "tests").glob("*/test_*.py")):
        folder = path.parent.name
        if folder not in {room(name) for name in MODULES}:
            continue
        subject = path.stem.removeprefix("test_")
        candidates = {
            f"{folder}.{subject}",
            *(f"{folder}.{mid}.{subject}" for mid in ("transports", "metadata")),
        }
        whole_room = {"processes", "parity", "invariants", "scenarios", "sweep", "packaging"}
        assert candidates & MODULES.keys() or subject in whole_room, f"{path.name} mirrors no module"


# Cores without a test file of their own, and why: what they hold is decided or checked elsewhere. The list
# only shrinks: a new core comes with its tests.
UNTESTED = {
    "conductor.messages": "records without behaviour, checked by every test of the conductor",
    "conductor.settings": "fields and their defaults, checked by tests/test_config.py",
    "conductor.verdict": "records without behaviour, checked by tests/conductor/test_admission.py",
    "connectors.link": "a contract; tests/contract/test_connectors.py holds every implementation to it",
    "inference.step": "records without behaviour, checked by tests/inference/test_scheduler.py",
    "machine": "a contract; tests/test_driver.py runs it, and every core's tests keep it",
    "marks": "words in annotations, checked by tests/test_config.py",
    "store.effects": "records without behaviour, checked by every test of the master",
    "store.messages": "records without behaviour, checked by tests/store/test_operations.py",
    "store.settings": "fields and their defaults, checked by tests/test_config.py",
    "types": "nouns without behaviour",
}
MOST_UNTESTED = 11


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
        assert core in CORES, f"{core} is no core any more: take it off the list"
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
