# SPDX-License-Identifier: Apache-2.0
"""``mooncake replay`` and ``mooncake calibrate`` against an endpoint whose answers are known."""

from __future__ import annotations

import email.utils
import json
from pathlib import Path

import pytest

from mooncake import clock
from mooncake.cli.certs import CertsSettings, make
from mooncake.security import Identity, SecuritySettings, install_identity
from mooncake.sim.serving.node_costs import load_costs
from tests.cli.conftest import Run
from tests.cli.replay.openai_double import Served, serving

LOAD = "poisson:rate=200,requests=40,input_tokens=100,output_tokens=5,block_tokens=32"


def test_every_row_is_sent_as_the_trace_says(mooncake: Run, tmp_path: Path) -> None:
    trace, document = tmp_path / "trace.jsonl", tmp_path / "r.json"
    rows = [(0, 600, [1, 2]), (0, 1024, [1, 3]), (0, 600, [1, 2]), (3000, 512, [1])]
    trace.write_text(
        "".join(
            json.dumps({"timestamp": at, "input_length": length, "output_length": 5, "hash_ids": ids}) + "\n"
            for at, length, ids in rows
        )
    )
    served = Served()
    with serving(served) as url:
        done = mooncake("replay", str(trace), "--url", url, "--speedup", "10", "--json", str(document))
    assert done.returncode == 0, done.stderr
    prompts = sorted((body["prompt"] for body in served.bodies), key=len)
    assert [len(prompt) for prompt in prompts] == [512, 600, 600, 1024]
    assert prompts[1] == prompts[2] and prompts[0] == prompts[1][:512] == prompts[3][:512]
    assert prompts[3][512:600] != prompts[1][512:600], "another key, other tokens"
    assert all(body["max_tokens"] == 5 == body["min_tokens"] and body["ignore_eos"] for body in served.bodies)
    [run] = json.loads(document.read_text())["runs"]
    assert run["summary"]["num_done"] == 4
    assert sum(run["requests"]["cached_tokens"]) == 599, "as the answer's usage says"


def test_rejected_and_broken_answers_are_distinguished(mooncake: Run, tmp_path: Path) -> None:
    document = tmp_path / "r.json"
    with serving(Served(reject_every=4)) as url:
        done = mooncake("replay", LOAD, "--url", url, "--json", str(document))
    assert done.returncode == 0, done.stderr
    assert "rejected, 10 times: too much to do" in done.stdout
    assert "Retry-After of the rejected: 7 to 7 s" in done.stdout
    found = json.loads(document.read_text())
    summary = found["runs"][0]["summary"]
    assert (summary["num_done"], summary["num_rejected"], summary["num_failed"]) == (30, 10, 0)
    with serving(Served(reject_every=4, retry_after=None, break_prompt_of=100)) as url:
        spread = LOAD + ",spread=0"
        done = mooncake("replay", spread, "--url", url, "--json", str(document))
    found = json.loads(document.read_text())
    assert found["runs"][0]["summary"]["num_failed"] == 30
    assert found["num_without_retry_after"] == 10
    assert "10 rejections had no Retry-After" in done.stdout
    assert "failed, 30 times" in done.stdout
    [run] = found["runs"]
    assert None not in run["requests"]["e2e_s"], "every request has an end, also one that failed"


def test_objectives_travel_when_they_are_to(mooncake: Run) -> None:
    served = Served()
    few = LOAD.replace("requests=40", "requests=2")
    with serving(served) as url:
        assert mooncake("replay", few, "--url", url, "--slo-ttft", "1.5").returncode == 0
        assert not any("x-slo-ttft-ms" in headers for headers in served.headers)
        assert mooncake("replay", few, "--url", url, "--slo-ttft", "1.5", "--tell-slo").returncode == 0
    sent = [(one["x-slo-ttft-ms"], one["x-slo-tbt-ms"]) for one in served.headers[-2:]]
    assert sent == [("1500", "100")] * 2


def test_prediction_stands_beside_what_was_measured(mooncake: Run, tmp_path: Path) -> None:
    document = tmp_path / "r.json"
    costs = ["--costs", "llama3-70b-8xH100", "--cluster", "1P1D"]
    with serving(Served()) as url:
        done = mooncake("replay", LOAD, "--url", url, "--predict", *costs, "--json", str(document))
    assert done.returncode == 0, done.stderr
    found = json.loads(document.read_text())
    assert [run["name"] for run in found["runs"]] == ["predicted", "measured"]
    assert found["accuracy"]["num_compared"] == 40
    ours, theirs = (run["requests"]["ttft_s"] for run in found["runs"])
    mean = sum(theirs) / 40
    wanted = sum(abs(one - other) for one, other in zip(ours, theirs, strict=True)) / 40 / mean
    assert found["accuracy"]["ttft_error"] == pytest.approx(wanted, rel=1e-3)
    assert "errors of the prediction over 40 requests" in done.stdout
    assert "predicted for 1P1D with policy overlap and admission goodput" in done.stdout


@pytest.mark.parametrize("decode", ["p", "d"])
def test_calibration_writes_a_file_that_simulates(mooncake: Run, tmp_path: Path, decode: str) -> None:
    file = tmp_path / "costs.toml"
    served = Served(answer_headers={"x-mooncake-prefill": "p", "x-mooncake-decode": decode})
    with serving(served) as url:
        words = ["--length", "16", "32", "64", "--batch", "1", "2", "--rounds", "1"]
        done = mooncake("calibrate", "--url", url, "--out", str(file), *words)
    assert done.returncode == 0, done.stderr
    costs = load_costs(str(file))
    assert costs.title == "double" and costs.kv_bytes_per_token == 46_080
    assert costs.prefill.seconds(0, 64) > 0 and costs.decode.seconds(1, 64) > 0
    assert costs.decode_makes_first_token == (decode == "d")
    lengths = {len(body["prompt"]) for body in served.bodies}
    assert lengths == {16, 32, 64}
    assert mooncake("simulate", LOAD, "--costs", str(file), "--policy", "load").returncode == 0


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["replay", LOAD, "--url", "127.0.0.1:1"], "--url is '127.0.0.1:1'"),
        (["replay", LOAD, "--url", "http://127.0.0.1:1"], "http://127.0.0.1:1 does not answer"),
        (["replay", LOAD, "--speedup", "-1"], "--speedup is -1.0"),
        (["replay", LOAD, "--predict", "--costs", "abacus"], "costs is 'abacus'"),
        (["replay", LOAD, "--cluster", "4P4D"], "--cluster is '4P4D'; allowed: left out without --predict"),
        (["replay", LOAD, "--policy", "load"], "--policy is 'load'"),
        (["calibrate", "--url", "http://127.0.0.1:1"], "does not answer"),
        (["calibrate", "--length", "16", "32"], "at least three"),
    ],
)
def test_bad_input_is_one_line(mooncake: Run, words: list[str], named: str) -> None:
    done = mooncake(*words)
    assert done.returncode in (1, 2)
    assert "ssl:default" not in done.stderr
    assert named in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


def test_nothing_is_shown_of_answers_that_did_not_come(mooncake: Run, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 64, "output_length": 5, "hash_ids": [0]}\n' * 3)
    with serving(Served(reject_every=1)) as url:
        done = mooncake("replay", LOAD.replace("requests=40", "requests=3"), "--url", url)
    row = next(line.split() for line in done.stdout.splitlines() if line.split()[:1] == ["measured"])
    assert row == ["measured", "3", "0", "(0.0%)", "0.00", "-", "-", "-", "-"]
    with serving(Served(break_prompt_of=64)) as url:
        done = mooncake("replay", str(trace), "--url", url)
    assert done.returncode == 1 and done.stderr == "error: no request was answered\n", done


def test_an_endpoint_without_models_is_named(mooncake: Run) -> None:
    with serving(Served(models=())) as url:
        assert "names no model" in mooncake("replay", LOAD, "--url", url).stderr


def test_a_broken_row_is_found_before_anything_is_sent(mooncake: Run, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}\n{"x"\n')
    served = Served()
    with serving(served) as url:
        done = mooncake("replay", str(trace), "--url", url)
    assert done.returncode == 2 and "row 2" in done.stderr
    assert not served.bodies


def sent(text: str, **more: object) -> bytes:
    return json.dumps({"choices": [{"text": text}], **more}).encode()


@pytest.mark.parametrize(
    ("served", "reason"),
    [
        (
            Served(failure=(503, "<h1>Dienst nicht verf\xfcgbar</h1>".encode("latin-1"))),
            "nicht verf\ufffdgbar",
        ),
        (Served(failure=(500, b'{"error": "out of memory"}')), "failed, 2 times: out of memory"),
        (Served(events=(b'{"error": "overloaded", "error_type": "x"}',)), "failed, 2 times: overloaded"),
        (Served(events=(b'{"error": {"message": "a worker died"}}',)), "failed, 2 times: a worker died"),
        (Served(events=(b"5",)), "an event that is none of a completion"),
        (Served(events=(b'{"choices": [5]}',)), "an event that is none of a completion"),
        (Served(events=(b'{"choices": [], "usage": "little"}',)), "an event that is none of a completion"),
        (Served(events=(b"half an eve",)), "an event that is none of a completion"),
    ],
)
def test_an_odd_answer_is_a_failed_request_and_not_the_end(
    mooncake: Run, served: Served, reason: str
) -> None:
    with serving(served) as url:
        done = mooncake("replay", LOAD.replace("requests=40", "requests=2"), "--url", url)
    assert done.returncode == 1 and done.stderr == "error: no request was answered\n", done
    assert reason in done.stdout and len(served.bodies) == 2


def test_a_server_without_token_ids_is_believed_how_many_came(mooncake: Run, tmp_path: Path) -> None:
    document = tmp_path / "r.json"
    usage = sent("", usage={"completion_tokens": 5})
    few = LOAD.replace("requests=40", "requests=2") + ",spread=0"
    for events in (
        (*[sent("a")] * 2, sent(""), *[sent("a")] * 2, usage),  # one token is part of a character
        (sent("whole answer"), usage),
        (sent(""), usage),
        [sent("a")] * 5,  # no usage either: an event is a token
    ):
        with serving(Served(events=(*events, b"[DONE]"))) as url:
            done = mooncake("replay", few, "--url", url, "--json", str(document))
        assert done.returncode == 0, done
        [run] = json.loads(document.read_text())["runs"]
        assert run["summary"]["num_done"] == 2 and None not in run["requests"]["ttft_s"]
    fewer = sent("", usage={"completion_tokens": 4})
    with serving(Served(events=(*[sent("a")] * 5, fewer, b"[DONE]"))) as url:
        done = mooncake("replay", few, "--url", url)
    assert "failed, 2 times: 4 of 5 tokens came" in done.stdout


def test_a_row_without_an_answer_gets_one_token_as_in_the_simulator(mooncake: Run, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 600, "output_length": 0, "hash_ids": [0, 1]}\n')
    document, served = tmp_path / "r.json", Served()
    costs = ["--costs", "llama3-70b-8xH100", "--cluster", "1P1D"]
    with serving(served) as url:
        done = mooncake("replay", str(trace), "--url", url, "--predict", *costs, "--json", str(document))
    assert done.returncode == 0, done.stderr
    assert [body["max_tokens"] for body in served.bodies] == [1]
    for run in json.loads(document.read_text())["runs"]:
        assert run["summary"]["num_done"] == 1 and run["requests"]["num_output"] == [1]


def test_a_prediction_that_cannot_be_judged_is_not_called_right(mooncake: Run, tmp_path: Path) -> None:
    document = tmp_path / "r.json"
    costs = ["--costs", "llama3-70b-8xH100", "--cluster", "1P1D", "--json", str(document)]
    with serving(Served(reject_every=1)) as url:
        done = mooncake("replay", LOAD, "--url", url, "--predict", *costs)
    assert "over 0 requests: TTFT -, TBT -" in done.stdout and "hit rate -, goodput -" in done.stdout
    accuracy = json.loads(document.read_text())["accuracy"]
    errors = ("ttft_error", "tbt_error", "hit_rate_error", "goodput_error")
    assert [accuracy[name] for name in errors] == [None] * 4
    one_token = LOAD.replace("output_tokens=5", "output_tokens=1") + ",spread=0"
    with serving(Served()) as url:
        done = mooncake("replay", one_token, "--url", url, "--predict", *costs)
    assert json.loads(document.read_text())["accuracy"]["tbt_error"] is None, "there are no intervals"
    assert ", TBT - (" in done.stdout


def test_a_date_in_retry_after_is_a_time_to_wait(mooncake: Run) -> None:
    date = email.utils.formatdate(clock.wall() + 86_400, usegmt=True)
    few = LOAD.replace("requests=40", "requests=2")
    for retry_after, shown in (
        (date, "86"),
        ("-3", "0 to 0 s"),
        ("Thu, 01 Jan 1970 00:00:00 GMT", "0 to 0 s"),
    ):
        with serving(Served(reject_every=1, retry_after=retry_after)) as url:
            done = mooncake("replay", few, "--url", url)
        assert f"Retry-After of the rejected: {shown}" in done.stdout, done
    with serving(Served(reject_every=1, retry_after="soon")) as url:
        assert "2 rejections had no Retry-After" in mooncake("replay", few, "--url", url).stdout


@pytest.mark.parametrize("command", [("replay", LOAD), ("calibrate",)], ids=" ".join)
@pytest.mark.parametrize(
    ("status", "code", "named"),
    [
        (401, 2, "/v1/models answers 401: this key is not known; pass --api-key"),
        (500, 1, "/v1/models answers 500: this key is not known"),
        (404, 1, "names no model; give one with --model"),
    ],
)
def test_a_refused_list_of_models_says_why(
    mooncake: Run, command: tuple[str, ...], status: int, code: int, named: str
) -> None:
    with serving(Served(failing_models=status)) as url:
        done = mooncake(*command, "--url", url)
    assert done.returncode == code and named in done.stderr, done
    assert len(done.stderr.splitlines()) == 1


def test_a_server_that_does_not_stream_cannot_be_calibrated(mooncake: Run, tmp_path: Path) -> None:
    file = tmp_path / "costs.toml"
    for events in (
        (sent("whole answer"), sent("", usage={"completion_tokens": 4}), b"[DONE]"),
        (sent("whole answer"), b"[DONE]"),
    ):
        served = Served(events=events)
        with serving(served) as url:
            done = mooncake("calibrate", "--url", url, "--out", str(file))
        assert done.returncode == 1 and "sends all tokens of an answer in one event" in done.stderr, done
        assert len(served.bodies) == 8, "it is found before anything is measured"
    assert not file.exists()


def test_a_gateway_that_requires_certificates_gets_ours(mooncake: Run, tmp_path: Path) -> None:
    make(CertsSettings(folder=tmp_path))
    files = SecuritySettings(str(tmp_path / "node.pem"), str(tmp_path / "node.key"), str(tmp_path / "ca.pem"))
    install_identity(identity := Identity(files))
    few = LOAD.replace("requests=40", "requests=2")
    try:
        with serving(Served(), identity.server_tls) as url:
            assert url.startswith("https://")
            done = mooncake("replay", few, "--url", url)
    finally:
        install_identity(None)
    assert done.returncode == 0, done.stderr
