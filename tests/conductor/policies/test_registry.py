# SPDX-License-Identifier: Apache-2.0
"""Every name that the setting allows is a policy that chooses among the given instances."""

from __future__ import annotations

from typing import get_args, get_type_hints

import pytest

from mooncake.conductor.policies.registry import POLICIES
from mooncake.conductor.settings import SchedulingSettings
from tests.conductor.clusters import cluster, every, job


def test_names_are_those_of_the_setting() -> None:
    allowed = get_args(get_type_hints(SchedulingSettings, include_extras=False)["scheduling"])
    assert {*allowed} == POLICIES.keys()


@pytest.mark.parametrize("name", POLICIES)
def test_both_policies_choose_among_the_given_instances(name: str) -> None:
    for policy in POLICIES[name]:
        four = cluster(0.1, 0.2, 0.0, 0.3)
        for offered in ([0, 1, 2, 3], [1, 3], [3]):
            choice = policy(four, job(900, 0, 300, 0), every("abcd")[offered])
            assert choice.slot in offered and choice.reason
