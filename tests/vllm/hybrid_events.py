# SPDX-License-Identifier: Apache-2.0
"""Records the KV events of real vLLM for a hybrid model, and how many tokens of each prompt it had cached.

The model is tiny and random: layers with full attention and layers with a sliding window, in groups of their
own. ``scripts/test-vllm --python tests/vllm/hybrid_events.py OUT`` writes the recording, as it is kept in
``tests/data/vllm_hybrid_events.msgpack.gz``: ``[prompt, cached tokens, batches of its events]``. A second
argument is vLLM's retention interval; ``none`` keeps the blocks of every window, not only at ends of prompts.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

WINDOW, BLOCK_TOKENS, NUM_BLOCKS = 512, 128, 30

CONFIG = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "max_position_embeddings": 4096,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "rope_theta": 10000.0,
    "rope_local_base_freq": 10000.0,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "torch_dtype": "float32",
}

Step = tuple[list[int], int, list[bytes]]


def prompts() -> list[list[int]]:
    """Prompts of several sessions that share a beginning: continued, branched off, and evicted in between."""

    def part(name: int, num_blocks: float) -> list[int]:
        return [3 + (name * 131 + at * 17) % 500 for at in range(int(num_blocks * BLOCK_TOKENS))]

    shared = part(1, 3)
    first = [*shared, *part(2, 4.5)]
    longer = [*first, *part(3, 3)]
    branch = [*first[: 5 * BLOCK_TOKENS], *part(4, 2.2)]
    others = [part(10 + number, 8.3) for number in range(4)]
    other = [*shared, *part(5, 1.5)]
    given = [first, first, longer, branch, other, longer, others[0], longer, *others[1:], others[3], longer]
    given += [first, branch, longer, [*longer, *part(6, 1.2)], others[3], first, first, [*first, *part(7, 1)]]
    return [*given, other, [*other, *part(8, 2)], branch, [*branch, *part(9, 0.7)], first]


def record(folder: Path, given: Sequence[Sequence[int]], retention: int | None = 0) -> list[Step]:
    """Run the prompts one by one on vLLM in this process."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    from vllm import LLM, SamplingParams
    from vllm.config import KVEventsConfig
    from vllm.distributed import kv_events
    from vllm.inputs import TokensPrompt

    batches: list[bytes] = []
    encode = msgspec.msgpack.Encoder().encode

    class Recorder(kv_events.NullEventPublisher):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **more: Any) -> None:
            super().__init__(0)

        def publish(self, events: Any) -> None:
            batches.append(encode(events))

    kv_events.EventPublisherFactory.create = Recorder
    (folder / "config.json").write_text(json.dumps(CONFIG))
    llm = LLM(
        str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=1664,
        max_num_batched_tokens=1024,
        num_gpu_blocks_override=NUM_BLOCKS,
        block_size=BLOCK_TOKENS,
        enable_prefix_caching=True,
        prefix_cache_retention_interval=retention,
        distributed_executor_backend="uni",
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="zmq"),
    )
    steps: list[Step] = []
    for prompt in given:
        [answer] = llm.generate(
            [TokensPrompt(prompt_token_ids=list(prompt))],
            SamplingParams(max_tokens=2, temperature=0, detokenize=False, ignore_eos=True),
            use_tqdm=False,
        )
        steps.append((list(prompt), answer.num_cached_tokens or 0, batches.copy()))
        batches.clear()
    return steps


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        kept = None if "none" in sys.argv[2:] else 0
        recording = msgspec.msgpack.encode(record(Path(scratch), prompts(), kept))
        Path(sys.argv[1]).write_bytes(gzip.compress(recording, mtime=0))
