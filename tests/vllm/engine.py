# SPDX-License-Identifier: Apache-2.0
"""One vLLM engine, in one process, on one core; and the process that runs it for a test.

``Engine`` is the test's side; run as a program, this file is the other side, which answers lines of JSON. An
engine in its own process can be killed as in a cluster, and starts in half the time of a server.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.vllm_server import QUIET

BLOCK_TOKENS = 128
"""vLLM's own choice on a CPU."""


def a_prompt(subject: str, num_items: int = 40) -> str:
    """Some hundred tokens that begin with ``subject``, so that no block of it is another subject's."""
    items = " ".join(f"Item {number} of the list is {number * 7 % 101}." for number in range(num_items))
    return f"The secret word is {subject}. {items} The secret word is"


@dataclass(frozen=True)
class Answered:
    text: str
    token_ids: list[int]
    num_prompt: int
    num_cached: int


class Engine:
    """A child process with a vLLM engine in it."""

    PROGRAM = "tests.vllm.engine"

    def __init__(
        self,
        model: Path,
        log: Path,
        connector: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        core: int = 0,
        dtype: str = "float32",
        num_ranks: int = 1,
    ) -> None:
        environ = {**os.environ, **QUIET, "VLLM_CPU_OMP_THREADS_BIND": str(core), **(environment or {})}
        if num_ranks > 1:  # processes of their own, which vLLM would pin to cores of their own
            environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
        environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        self._log = log
        arguments = [str(model), json.dumps(connector), dtype, str(num_ranks)]
        with log.open("a") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", self.PROGRAM, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env=environ,
                text=True,
                start_new_session=True,
            )

    def wait_until_ready(self) -> Engine:
        assert self._receive() == {"ready": True}
        return self

    def complete(self, prompt: str, max_tokens: int = 16, **more: Any) -> Answered:
        """A greedy completion; ``more`` are fields of vLLM's SamplingParams."""
        self._send({"prompt": prompt, "max_tokens": max_tokens, **more})
        return Answered(**self._receive())

    def forget(self) -> None:
        """Empty the engine's own prefix cache."""
        self._send({"forget": True})
        assert self._receive() == {"forgotten": True}

    def metric(self, name: str) -> float:
        """The sum of a counter's samples."""
        self._send({"metric": name})
        return float(self._receive()["value"])

    def kill(self) -> None:
        """SIGKILL to it and to its ranks' processes."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(30)

    def close(self) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        self.kill()

    def _send(self, request: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)

    def _receive(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(
                f"the engine ended with {self._process.wait(30)}:\n{self._log.read_text()[-6000:]}"
            )
        return json.loads(line)


def serve(model: str, connector: dict[str, Any] | None, dtype: str, num_ranks: int) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM's log goes where errors go
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    def send(answer: dict[str, Any]) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    more = {} if connector is None else {"kv_transfer_config": KVTransferConfig(**connector)}
    llm = LLM(
        model=model,
        dtype=dtype,
        max_model_len=2048,
        enforce_eager=True,
        tensor_parallel_size=num_ranks,
        distributed_executor_backend="uni" if num_ranks == 1 else "mp",
        disable_log_stats=False,
        **more,
    )
    send({"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        if request.pop("forget", False):
            send({"forgotten": bool(llm.reset_prefix_cache())})
            continue
        if name := request.pop("metric", ""):
            send({"value": sum(getattr(one, "value", 0.0) for one in llm.get_metrics() if one.name == name)})
            continue
        prompt = request.pop("prompt")
        (output,) = llm.generate(prompt, SamplingParams(temperature=0, **request), use_tqdm=False)
        found = output.outputs[0]
        send(
            {
                "text": found.text,
                "token_ids": list(found.token_ids),
                "num_prompt": len(output.prompt_token_ids),
                "num_cached": output.num_cached_tokens or 0,
            }
        )


if __name__ == "__main__":
    serve(sys.argv[1], json.loads(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
