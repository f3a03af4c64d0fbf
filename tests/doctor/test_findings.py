# SPDX-License-Identifier: Apache-2.0
"""Every finding says what it means, why it matters and what mends it, and names only settings that exist."""

from __future__ import annotations

import re
from pathlib import Path

from mooncake.doctor.findings import RULES, Link, Severity, finding

ROOT = Path(__file__).parents[2]


def test_every_rule_is_whole_sentences() -> None:
    for code, rule in RULES.items():
        assert re.fullmatch(r"[a-z]+(_[a-z]+)*", code)
        for text in (rule.meaning, rule.why, rule.remedy):
            assert text.endswith("."), (code, text)
            assert text[0].isupper() or text[0] in "`/v", (code, text)


def test_every_link_and_severity_is_used() -> None:
    assert {rule.link for rule in RULES.values()} == {*Link}
    assert {rule.severity for rule in RULES.values()} == {*Severity}


def test_remedies_name_settings_of_ours_that_exist() -> None:
    known = (ROOT / "docs/configuration.md").read_text() + (ROOT / "docs/reference/commands.md").read_text()
    engines = {
        *("--block-size", "--dtype", "--kv-cache-dtype", "--prefix-caching-hash-algo", "--page-size"),
        *("--enable-prompt-tokens-details", "--enable-cache-report", "--no-enable-prefix-caching"),
        *("--disable-radix-cache", "--kv-events-config", "--kv-transfer-config", "--shm-size", "--ipc"),
    }
    for code, rule in RULES.items():
        for flag in re.findall(r"`(--[a-z-]+[a-z])", rule.remedy):
            assert flag in engines or flag in known, f"{code}: {flag}"


def test_a_finding_has_its_rule_s_text() -> None:
    found = finding("disk_slow", "/ssd", "10 MB/s")
    rule = RULES["disk_slow"]
    assert (found.severity, found.link, found.why, found.remedy) == (
        rule.severity,
        rule.link,
        rule.why,
        rule.remedy,
    )
