# SPDX-License-Identifier: Apache-2.0
"""Keeps the documentation true: generated pages, links, and what pages name.

A page may name a file, a setting, a metric, a command, an endpoint, a log event or a function only if it
exists. Names of other projects are listed in ``FOREIGN``.
"""

from __future__ import annotations

import ast
import asyncio
import json
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from functools import cache
from pathlib import Path

import pytest

from mooncake.cli import metric_declarations
from mooncake.store.node.node import Node, NodeSettings
from mooncake.store.server import MasterServer
from mooncake.store.settings import MasterSettings
from tests import reference_docs

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
GENERATED = {ROOT / page for page in reference_docs.PAGES}
WRITTEN = [page for page in PAGES if page not in GENERATED]
SOURCES = ("mooncake", "native", "tests", "bench", "examples", "aliases", "scripts", ".ci", ".github")
SOURCE_SUFFIXES = {".py", ".pyi", ".cpp", ".h", ".toml", ".txt", ".sh", ".yml", ".yaml", ""}

# What pages name of other projects: vLLM, SGLang, LMCache, checkpoint-engine, modules of the existing package
# that are not here, and protocol constants.
FOREIGN = {
    "/hicache/storage-backend/clear",
    "CLOCK_MONOTONIC",
    "MC_TE_DEVICE",
    "OTEL_TRACES_SAMPLER_ARG",
    "parentbased_traceidratio",
    "MC_TE_PROTOCOL",
    "PS_P2P_STORE_RDMA_DEVICES",
    "checkpoint_engine/p2p_store.py",
    "cli_bench",
    "cli_client",
    "cluster key",
    "cross_encoder_cache",
    "disaggregation-mode",
    "disaggregation/mooncake/conn.py",
    "distributed/device_communicators/mooncake_transfer_engine.py",
    "enable-hierarchical-cache",
    "enable_scheduler_bypass_lookup",
    "external_lookup_client",
    "extra-index-url",
    "fabric_allocator_utils",
    "hicache-mem-layout",
    "hicache-storage-backend-extra-config",
    "index-url",
    "launch_server",
    "mem_cache/embedding_cache_controller.py",
    "mem_cache/storage/mooncake_store/mooncake_store.py",
    "mooncake.MooncakeStoreService/GetPoolStatus",
    "mooncake_client_rpc_",
    "mooncake_connector_v1",
    "mooncake_elastic_buffer",
    "mooncake_ep_buffer",
    "mooncake_ssd_",
    "mooncake_ssd_register",
    "mooncake_ssd_unregister",
    "mooncake_store_l2_adapter",
    "reset_connector",
    "spdk_tgt_create",
    "transfer_timeout",
    "update_weights_",
    "v1/distributed/l2_adapters/mooncake_store_l2_adapter.py",
    "v1/distributed/transfer_channel/impl/mooncake_te_impl.py",
    "v1/lookup_client/mooncake_lookup_client.py",
    "v1/storage_backend/connector/mooncakestore_connector.py",
}


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def without_blocks(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)


def spans(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", without_blocks(text))


def block_lines(text: str) -> list[str]:
    return [
        line for block in re.findall(r"^```\w*\n(.*?)^```", text, re.M | re.S) for line in block.splitlines()
    ]


@cache
def source_text() -> str:
    """Every source file and the generated pages, in one string."""
    paths = [path for folder in SOURCES for path in sorted((ROOT / folder).rglob("*"))]
    paths += [*ROOT.glob("*.toml"), *ROOT.glob("*.txt"), ROOT / "Makefile", *sorted(GENERATED)]
    readable = [
        path
        for path in paths
        if path.is_file()
        and (path.suffix in SOURCE_SUFFIXES or path in GENERATED)
        and "__pycache__" not in path.parts
        and path != Path(__file__)
    ]
    return "\n".join(path.read_text(errors="replace") for path in readable)


@cache
def source_words() -> frozenset[str]:
    return frozenset(re.findall(r"\w+", source_text()))


@cache
def file_names() -> frozenset[str]:
    return frozenset(path.name for folder in (*SOURCES, "docs") for path in (ROOT / folder).rglob("*.*"))


# Generated pages


@pytest.mark.parametrize("page", reference_docs.PAGES)
def test_generated_page_is_what_the_code_says(page: str) -> None:
    assert (ROOT / page).read_text() == reference_docs.PAGES[page](), "run scripts/docs and commit the pages"


@pytest.mark.parametrize("page", reference_docs.SECTIONS)
def test_generated_part_of_a_page_is_what_the_code_says(page: str) -> None:
    assert (ROOT / page).read_text() == reference_docs.with_section(page), "run scripts/docs"


def test_every_settings_class_is_documented() -> None:
    """Classes that ``config.load`` fills have a table in configuration.md or in environment.md."""
    documented = {name.partition(":")[2] for name in reference_docs.EMBEDDED_SETTINGS}
    tables = set(re.findall(r"^## \[(\w+)\]", (ROOT / "docs/configuration.md").read_text(), re.M))
    for path, tree in reference_docs.trees().items():
        for call in ast.walk(tree):
            match call:
                case ast.Call(args=[ast.Name(id=name), *_]) if metric_declarations.called_name(
                    call
                ) == "load" and name.endswith("Settings"):
                    role = name.removesuffix("Settings").lower()
                    assert name in documented or role in tables, f"{path} loads {name}, which no page lists"


def test_every_command_is_explained() -> None:
    from mooncake.cli.commands import COMMANDS, TRACE_COMMANDS

    known = {words.split()[0] for words in reference_docs.commands()}
    for name in [*(one.name for one in COMMANDS), *(one[0] for one in TRACE_COMMANDS)]:
        assert name in known, f"mooncake {name} is not on docs/reference/commands.md"
    for words, command in reference_docs.commands().items():
        assert reference_docs.flat(command.help), f"mooncake {words} has no help text"


@pytest.mark.parametrize("words", reference_docs.commands())
def test_the_help_of_every_command_can_be_printed(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A bracket that is read as the end of a style would end the program instead."""
    from mooncake.cli import main

    with pytest.raises(SystemExit) as exit:
        main([*words.split(), "--help"])
    assert exit.value.code == 0
    assert f"mooncake {words} " in " ".join(capsys.readouterr().out.split())


def test_every_endpoint_has_a_server_on_the_page() -> None:
    listed = [module for side in reference_docs.HTTP_SIDES for module in side.modules]
    assert set(reference_docs.endpoints()) == set(listed), (
        "HTTP_SIDES in tests/reference_docs.py follows the routes"
    )


def test_every_endpoint_has_a_meaning() -> None:
    """The handler's docstring has it."""
    for module, found in reference_docs.endpoints().items():
        for one in found:
            assert one.text, f"mooncake/{module}: {one.handler} of {one.path} has no docstring"


def test_every_metric_has_a_name_and_a_meaning_that_can_be_read() -> None:
    for path, tree in reference_docs.trees().items():
        constants = metric_declarations.local_texts_of(tree) | metric_declarations.constants_of(tree)
        loops = metric_declarations.loops_over_constants(tree, constants)
        for call in ast.walk(tree):
            if not isinstance(call, ast.Call) or len(call.args) < 2:
                continue
            if all(isinstance(argument, ast.Name) for argument in call.args[:2]):
                continue  # a function that passes both on; its callers are read
            if metric_declarations.called_name(call) in metric_declarations.KINDS:
                found = metric_declarations.named_metrics(call, constants, loops)
                assert found and all(text for _, text in found), (
                    f"{path}:{call.lineno} declares no known metric"
                )


# Where an event's name is a variable that the generator can't follow; the names are found where they arise.
EVENTS_BY_VARIABLE = {"mooncake/store/server.py", "mooncake/transfer/completion_queue.py"}


def test_every_log_event_has_a_name_that_can_be_read() -> None:
    """Outside the drop-in, whose sentences are those of the existing package, an event is a literal name."""
    for path, tree in reference_docs.trees().items():
        if path.startswith("mooncake/compat/") or path in EVENTS_BY_VARIABLE:
            continue
        constants, forwarders = metric_declarations.constants_of(tree), reference_docs.event_arguments(tree)
        forwarded = {
            node
            for function in ast.walk(tree)
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) and function.name in forwarders
            for node in ast.walk(function)
        }
        for call, name, _, _ in reference_docs.event_calls_in(tree, forwarders):
            texts = metric_declarations.texts_of(name, constants)
            if isinstance(name, ast.Name) and not texts and call in forwarded:
                continue
            assert texts, f"{path}:{call.lineno} logs an event without a literal name"
            for text in texts:
                assert reference_docs.EVENT_NAME.fullmatch(text), f"{path}:{call.lineno} logs {text!r}"


# Links and names


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", without_blocks(page.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_relative_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", without_blocks(page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{name_of(page)} links to {link}"
        if anchor:
            assert anchor in anchors(target), f"{name_of(page)} links to {link}: no such heading"


PATH = re.compile(r"[\w./-]+\.(?:py|pyi|cpp|h|md|toml|txt|yml|yaml)|[\w.-]+(?:/[\w.-]+)+/?")


def paths_in(page: Path) -> Iterator[str]:
    for span in spans(page.read_text()):
        first = span.split()[0] if span.split() else ""
        if PATH.fullmatch(first) and first not in FOREIGN and not first.startswith("-"):
            yield first


@pytest.mark.parametrize("page", WRITTEN, ids=name_of)
def test_files_that_a_page_names_exist(page: Path) -> None:
    """A path counts from the checkout, the package, the tests, docs/ or the page; a bare name is a file's."""
    bases = (ROOT, ROOT / "mooncake", ROOT / "tests", ROOT / "docs", page.parent)
    for path in paths_in(page):
        exists = any((base / path).exists() for base in bases)
        assert exists or ("/" not in path and path in file_names()), f"{name_of(page)} names {path}"


@pytest.mark.parametrize("page", WRITTEN, ids=name_of)
def test_identifiers_that_a_page_names_exist(page: Path) -> None:
    """Metrics, log events, fields, variables and functions: each ``name_with_underscores`` in backquotes."""
    for span in spans(page.read_text()):
        if PATH.fullmatch(span.split()[0] if span.split() else ""):
            continue
        for found in re.finditer(r"[*…>.]*(?<![\w-])([A-Za-z]*_\w+)[*…<]*", span):
            name, is_part = found.group(1), found.group(0) != found.group(1)
            is_part = is_part or name.startswith("_") or name.endswith("_")
            exists = name in source_words() or (is_part and name.strip("_") in source_text())
            assert exists or name in FOREIGN, f"{name_of(page)} names {name}, which no source file has"


@pytest.mark.parametrize("page", WRITTEN, ids=name_of)
def test_flags_and_commands_that_a_page_names_exist(page: Path) -> None:
    known = {tuple(words.split()) for words in reference_docs.commands()}
    groups = {words[0] for words in known if len(words) > 1}
    singles = {words[0] for words in known}
    text = page.read_text()
    for line in [*spans(text), *block_lines(text)]:
        for flag in re.findall(r"(?<![\w-])--([a-z][a-z0-9-]+)", line):
            words = {flag.replace("-", "_"), flag.removeprefix("no-").replace("-", "_")}
            exists = f"--{flag}" in source_text() or flag in source_text() or words & source_words()
            assert exists or flag in FOREIGN, f"{name_of(page)} names --{flag}"
        for called in re.findall(r"(?:^|bin/)mooncake ([a-z][a-z0-9-]*(?: [a-z][a-z-]*)?)", line):
            if called in FOREIGN:
                continue
            first, *rest = called.split()
            assert first in singles, f"{name_of(page)} names the command mooncake {called}"
            if first in groups and rest:
                assert (first, rest[0]) in {words[:2] for words in known}, (
                    f"{name_of(page)}: mooncake {called}"
                )


@pytest.mark.parametrize("page", WRITTEN, ids=name_of)
def test_endpoints_that_a_page_names_exist(page: Path) -> None:
    for span in spans(page.read_text()):
        for path in re.findall(r"^(?:[A-Z]+ )?(/[a-z0-9_/{}.-]+)", span):
            assert path in source_text() or path in FOREIGN, f"{name_of(page)} names {path}"


def test_the_index_lists_every_page() -> None:
    index = ROOT / "docs" / "index.md"
    links = re.findall(r"\]\(([^)#\s]+)\)", index.read_text())
    listed = {(index.parent / link).resolve() for link in links if ":" not in link}
    pages = {page for page in PAGES if page != index and page.parent.name != "decisions"}
    missing = sorted(name_of(page) for page in pages if page.resolve() not in listed)
    assert not missing, f"docs/index.md does not list {missing}"
    assert "docs/index.md" in (ROOT / "README.md").read_text()


def test_every_decision_is_listed_by_its_title() -> None:
    folder = ROOT / "docs" / "decisions"
    listed = re.findall(r"^\d+\. \[(.*)\]\((.*)\)$", (folder / "README.md").read_text(), re.M)
    found = [
        (re.sub(r"^# \d+\. ", "", page.read_text().splitlines()[0]), page.name)
        for page in sorted(folder.glob("[0-9]*.md"))
    ]
    assert listed == found


# Requests through the code


MOST_STOPS = 14
STORIES = ("A chat request", "A put", "A block of vLLM")


def names_defined_in(path: Path) -> set[str]:
    """Classes, functions, methods (``Class.method``), constants of a module; all words of a native file."""
    text = path.read_text()
    if path.suffix != ".py":
        return set(re.findall(r"\w+", text))
    found: set[str] = set()
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {
                f"{node.name}.{inner.name}"
                for inner in node.body
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef)
            }
            found |= {
                f"{node.name}.{target.id}"
                for inner in node.body
                if isinstance(inner, ast.Assign)
                for target in inner.targets
                if isinstance(target, ast.Name)
            }
    return found | set(metric_declarations.constants_of(tree))


@pytest.mark.parametrize("page", WRITTEN, ids=name_of)
def test_names_that_follow_a_file_are_defined_in_it(page: Path) -> None:
    """A file and, right behind it in backquotes, a name: ``a/b.py`` ``Class.method``. One or several."""
    text = without_blocks(page.read_text())
    for path, names in re.findall(r"`([\w./-]+\.(?:py|cpp|h))`((?: (?:and )?`[\w.]+`)+)", text):
        found = next((base / path for base in (ROOT, ROOT / "mooncake") if (base / path).exists()), None)
        assert found is not None, f"{name_of(page)} names {path}"
        for name in re.findall(r"`([\w.]+)`", names):
            assert name in names_defined_in(found), f"{name_of(page)}: {path} does not define {name}"


@pytest.mark.parametrize("story", STORIES)
def test_a_request_is_followed_in_few_stops(story: str) -> None:
    section = (ROOT / "CONTRIBUTING.md").read_text().split(f"## {story}\n")[1].split("\n## ")[0]
    stops = re.findall(r"^\d+\. (.*)$", section, re.M)
    assert 5 <= len(stops) <= MOST_STOPS
    for stop in stops:
        assert re.match(r"`(mooncake|native)/[\w/]+\.(py|cpp)` `[\w.]+`: ", stop), stop


# Examples


def examples_in(page: Path) -> list[str]:
    """Python blocks behind the mark ``<!-- runs -->``."""
    return re.findall(r"^<!-- runs -->\n```python\n(.*?)^```", page.read_text(), re.M | re.S)


EXAMPLES = [
    pytest.param(example, id=f"{name_of(page)}-{number}")
    for page in WRITTEN
    for number, example in enumerate(examples_in(page))
]


@pytest.fixture
async def master() -> AsyncIterator[str]:
    """Address of a master with one node."""
    server = MasterServer(MasterSettings(port=0))
    port = await server.start()
    node = Node(NodeSettings(master=f"127.0.0.1:{port}", pool_size_bytes=8 << 20))
    await node.start()
    await asyncio.wait_for(node.mounted.wait(), 10)
    yield f"127.0.0.1:{port}"
    await node.close()
    await server.close()


def test_there_are_examples() -> None:
    marks = sum(page.read_text().count("<!-- runs -->") for page in WRITTEN)
    assert len(EXAMPLES) == marks >= 4, "a mark stands directly before its block"


@pytest.mark.processes
@pytest.mark.parametrize("example", EXAMPLES)
async def test_examples_run_as_they_are_written(example: str, master: str, tmp_path: Path) -> None:
    """With the address of a master in the place of the usual one, and a trace in the working directory."""
    rows = [
        {"timestamp": 500 * number, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2 + number]}
        for number in range(20)
    ]
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    program = example.replace("127.0.0.1:50051", master)
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
