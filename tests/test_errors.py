# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import inspect
import socket

import aiohttp
import pytest

from mooncake import errors


def test_invalid_argument_names_field_value_and_range() -> None:
    error = errors.InvalidArgument("port", 70_000, "0 to 65535")
    assert str(error) == "port is 70000; allowed: 0 to 65535"
    assert (error.field, error.value, error.allowed) == ("port", 70_000, "0 to 65535")


def test_a_huge_value_is_cut_in_the_message() -> None:
    assert len(str(errors.InvalidArgument("prompt", "x" * 10_000, "shorter"))) < 200


def test_codes_are_unique_and_the_docstring_draws_every_class() -> None:
    classes = [
        value
        for _, value in inspect.getmembers(errors, inspect.isclass)
        if issubclass(value, errors.MooncakeError)
    ]
    assert len({value.code for value in classes}) == len(classes)
    assert errors.__doc__ is not None
    for value in classes:
        assert value.__name__ in errors.__doc__


async def test_a_refused_connection_is_worded_without_its_library() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        async with aiohttp.ClientSession() as session:
            with pytest.raises(aiohttp.ClientConnectorError) as caught:
                await session.get(f"http://127.0.0.1:{closed.getsockname()[1]}/")
    assert "ssl:default" in str(caught.value)
    assert errors.cause_of(caught.value).startswith("Connect call failed")
    assert errors.cause_of(ValueError("text")) == "text" and errors.cause_of(ValueError()) == "ValueError"


def test_a_refusal_is_a_value() -> None:
    refusal = errors.Refusal("no_space", "the pool is full")
    assert refusal == errors.Refusal("no_space", "the pool is full")
    assert str(refusal) == "no_space: the pool is full"
    assert not isinstance(refusal, BaseException)
