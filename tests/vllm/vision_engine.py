# SPDX-License-Identifier: Apache-2.0
"""One vLLM engine with a vision model and an encoder cache connector, in a process of its own.

``VisionEngine`` is the test's side; run as a program, this file is the other side. It counts the items that
the model's encoder has computed for each answer, in an engine of one rank.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from typing import Any

from tests.vllm.engine import Engine

PROMPT = "w5 w6 w7 w8"
NUM_TOKENS = 6


@dataclass(frozen=True)
class Seen:
    """The answer to a request with an image."""

    token_ids: list[int]
    logprobs: list[list[float]]
    """Logarithms of the probabilities of the five likeliest tokens, per position."""
    num_encoded: int
    """Items that the encoder computed for it."""


class VisionEngine(Engine):
    """A child process; images are drawn from seeds."""

    PROGRAM = "tests.vllm.vision_engine"

    def ask(self, image: int, **more: Any) -> Seen:
        """A greedy completion of ``PROMPT`` with the image of that seed; ``uuid``: a client's name for it.

        ``salt``: the request's cache salt.
        """
        self._send({"image": image, **more})
        return Seen(**self._receive())

    def reset_encoder_cache(self) -> None:
        """As vLLM is called when weights are replaced."""
        self._send({"reset": True})
        assert self._receive() == {"reset": True}


def serve(model: str, connector: dict[str, Any] | None, dtype: str, num_ranks: int) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM's log goes where errors go
    import numpy as np
    from PIL import Image
    from vllm import LLM, SamplingParams
    from vllm.config import ECTransferConfig
    from vllm.model_executor.models.blip2 import Blip2ForConditionalGeneration

    def send(answer: dict[str, Any]) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    num_encoded = 0
    embed = Blip2ForConditionalGeneration.embed_multimodal

    def counted(self: Any, **inputs: Any) -> Any:
        nonlocal num_encoded
        outputs = embed(self, **inputs)
        num_encoded += len(outputs)
        return outputs

    Blip2ForConditionalGeneration.embed_multimodal = counted
    more = {} if connector is None else {"ec_transfer_config": ECTransferConfig(**connector)}
    llm = LLM(
        model=model,
        dtype=dtype,
        max_model_len=256,
        enforce_eager=True,
        tensor_parallel_size=num_ranks,
        distributed_executor_backend="uni" if num_ranks == 1 else "mp",
        disable_log_stats=False,
        num_gpu_blocks_override=16,  # far less than a GiB, because a test runs several engines
        limit_mm_per_prompt={"image": 1},
        **more,
    )
    send({"ready": True})
    sampling = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, logprobs=5, ignore_eos=True)
    for line in sys.stdin:
        request = json.loads(line)
        if request.get("reset"):
            llm.llm_engine.reset_encoder_cache()
            send({"reset": True})
            continue
        if name := request.pop("metric", ""):
            send({"value": sum(getattr(one, "value", 0.0) for one in llm.get_metrics() if one.name == name)})
            continue
        pixels = np.random.default_rng(request["image"]).integers(0, 256, (40, 48, 3), dtype=np.uint8)
        prompt: dict[str, Any] = {"prompt": PROMPT, "multi_modal_data": {"image": Image.fromarray(pixels)}}
        if "uuid" in request:
            prompt["multi_modal_uuids"] = {"image": [request["uuid"]]}
        if "salt" in request:
            prompt["cache_salt"] = request["salt"]
        before = num_encoded
        (output,) = llm.generate([prompt], sampling, use_tqdm=False)
        found = output.outputs[0]
        rows = [sorted(one.logprob for one in position.values()) for position in found.logprobs or ()]
        send({
            "token_ids": list(found.token_ids), "logprobs": rows, "num_encoded": num_encoded - before,
        })  # fmt: skip


if __name__ == "__main__":
    serve(sys.argv[1], json.loads(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
