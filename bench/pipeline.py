# SPDX-License-Identifier: Apache-2.0
"""Prefill by a group of workers, each with some of the layers and one core, beside one worker with one core.

Command: ``python -m bench.pipeline`` (``--stages 3``, ``--tokens 4096``). The workers are processes that are
pinned to a core each and compute with one thread; rounds alternate between the group and the single worker,
and every prompt is new. The tokens of both must be equal. Beside wall time, which other programs disturb and
which means nothing where there are fewer cores than stages, is the time *by processor time*: that of the
chunks, as they were planned, passing through the stages, if each stage takes the processor time that it was
measured to take. ``--short`` measures short prompts instead, many in a row, because each takes little. What
it can't show: stages on several machines, whose hidden states cross a network.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import tempfile
from pathlib import Path
from random import Random

import torch

from bench.report import measured, options
from mooncake.cli.ports import free_ports
from mooncake.inference.gguf import resolve_model
from mooncake.inference.model import ModelConfig
from mooncake.inference.pipeline import ChunkPlan, balanced_counts, layer_ranges, pass_through
from mooncake.inference.prefill_group import GroupSettings, chunk_plan
from mooncake.inference.weights import expected_shapes, load_model, read_config
from tests.group_processes import HOST, GroupProcesses, WorkerProcess, prompt_of, stopped_at_end

ROUNDS = 3
LONGEST_S = 3600.0
"""Timeout of one answer; other programs may have most of the cores."""

SHORT_TOKENS = (64, 256)
SHORT_PROMPTS = 12
"""Short prompts of a round: the kernel counts processor time in hundredths of a second."""

BLOCK_TOKENS, MAX_ROWS = 32, 512
"""Defaults of ``mooncake worker``."""


def weights_bytes(config: ModelConfig, layers: range) -> int:
    """Bytes of the float32 weights that a stage computes with: its layers, and the head in the last one.

    The embedding stays in the file, which is mapped.
    """
    total = 0
    for name, shape in expected_shapes(config).items():
        is_own = any(name.startswith(f"model.layers.{layer}.") for layer in layers)
        is_head = name == ("model.embed_tokens.weight" if config.has_tied_embeddings else "lm_head.weight")
        if is_own or (is_head and layers.stop == config.num_layers):
            total += 4 * torch.Size(shape).numel()
    return total


def by_processor_time(plan: ChunkPlan, num_tokens: int, stages_s: list[float]) -> float:
    """Seconds until the last chunk leaves, if each stage takes this long for all chunks together."""
    free_at, start, whole, leaves_at = [0.0] * len(stages_s), 0, plan.work(0, num_tokens), 0.0
    for end in plan.cuts(0, num_tokens):
        share = plan.work(start, end) / whole
        leaves_at, start = pass_through(free_at, 0.0, [share * seconds for seconds in stages_s]), end
    return leaves_at


@dataclasses.dataclass
class Comparison:
    """Seconds per prompt in each round, of the single worker and of the group."""

    wall: tuple[list[float], list[float]] = dataclasses.field(default_factory=lambda: ([], []))
    processor: tuple[list[float], list[float]] = dataclasses.field(default_factory=lambda: ([], []))
    stages_s: list[list[float]] = dataclasses.field(default_factory=list)
    """Processor seconds of each stage."""

    def add_round(
        self,
        alone: WorkerProcess,
        group: GroupProcesses,
        plan: ChunkPlan,
        prompts: list[list[int]],
    ) -> None:
        """Send prompts of equal length to both, one by one."""
        before = [alone.processor_s(), *(stage.processor_s() for stage in group.stages)]
        walls: tuple[list[float], list[float]] = ([], [])
        for prompt in prompts:
            tokens, alone_s = alone.ask(prompt, 1, timeout_s=LONGEST_S)
            same, group_s = group.first.ask(prompt, 1, timeout_s=LONGEST_S)
            assert tokens == same, f"the two disagree: {tokens} and {same}"
            walls[0].append(alone_s)
            walls[1].append(group_s)
        after = [alone.processor_s(), *(stage.processor_s() for stage in group.stages)]
        spent = [(end - begin) / len(prompts) for begin, end in zip(before, after, strict=True)]
        for found, seconds in zip(self.wall, walls, strict=True):
            found.append(statistics.median(seconds))
        self.processor[0].append(spent[0])
        self.processor[1].append(by_processor_time(plan, len(prompts[0]), spent[1:]))
        self.stages_s.append(spent[1:])

    @property
    def best_stages_s(self) -> list[float]:
        """Processor seconds of the stages in the round with the least of all together."""
        return min(self.stages_s, key=sum)


def main() -> None:
    parser = options(__doc__, "bench.pipeline")
    parser.add_argument("--stages", type=int, default=2, help="workers of the group (default 2)")
    parser.add_argument("--tokens", type=int, default=4096, help="length of the prompt (default 4096)")
    parser.add_argument("--short", action="store_true", help=f"prompts of {SHORT_TOKENS} tokens instead")
    parser.add_argument("--rounds", type=int, help=f"rounds, {ROUNDS} by default; the best is shown")
    args = parser.parse_args()
    lengths = SHORT_TOKENS if args.short else (1024 if args.quick else args.tokens,)
    rounds = args.rounds or (1 if args.quick else ROUNDS)
    num_stages = args.stages
    name = ("pipeline-short" if args.short else "pipeline") + (f"-{num_stages}" if num_stages > 2 else "")
    which = "--short" if args.short else f"--tokens {lengths[0]}"
    command = f"python -m bench.pipeline --stages {num_stages} {which} --rounds {rounds}"
    with measured(name, args, command) as result, tempfile.TemporaryDirectory() as folder:
        model = resolve_model("smollm2")
        config = read_config(model)
        ranges = layer_ranges(config.num_layers, num_stages)
        limits = GroupSettings((HOST,) * (num_stages - 1), "", BLOCK_TOKENS, MAX_ROWS, 1)
        plan = chunk_plan(load_model(model, layers=ranges[0]), limits)
        cores = sorted(os.sched_getaffinity(0))
        flags = ("--model", str(model), "--served-model-name", "smollm2", "--kv-cache-size", "256MiB")
        port = free_ports(HOST, 1, Random())[0]
        pinned = [cores[stage % len(cores)] for stage in range(num_stages)]
        alone = WorkerProcess("single", Path(folder), port, *flags, core=cores[-1])
        group = GroupProcesses(Path(folder), num_stages, *flags, cores=pinned)
        with stopped_at_end(alone, group):
            alone.wait_until_ready()
            group.restart_ended()
            memory = result.table(
                "process",
                "layers",
                "weights MB",
                "of the whole",
                "anonymous memory MB",
                title="memory",
                note="weights: layers and head in float32, without the embedding, which is mapped",
            )
            whole = weights_bytes(config, range(config.num_layers))
            rows = [("single", range(config.num_layers), alone)]
            rows += [(f"stage {n}", ranges[n], stage) for n, stage in enumerate(group.stages)]
            for row, layers, process in rows:
                size = weights_bytes(config, layers)
                share = f"{size / whole:.2f}"
                memory.add(row, len(layers), size / 1e6, share, process.memory_bytes() / 1e6)
            Comparison().add_round(alone, group, plan, [prompt_of(128, 100)])  # warms up
            found = {length: Comparison() for length in lengths}
            for seed in range(1, rounds + 1):
                for length, comparison in found.items():
                    num_prompts = SHORT_PROMPTS if args.short else 1
                    first = 1000 * length + num_prompts * seed
                    prompts = [prompt_of(length, first + number) for number in range(num_prompts)]
                    comparison.add_round(alone, group, plan, prompts)
        for length, comparison in found.items():
            table = result.table(
                ("time of", 0),
                ("one worker s", 2 + args.short),
                (f"group of {num_stages} s", 2 + args.short),
                ("ratio", 2),
                title=f"prefill of {length} tokens, SmolLM2-135M-Instruct, float32, one core each",
                note=f"medians of {SHORT_PROMPTS} prompts one after another, best round"
                if args.short
                else "",
            )
            for row, (one, other) in (("wall", comparison.wall), ("processor", comparison.processor)):
                best = min(one), min(other)
                table.add(row, *best, best[0] / best[1], samples={"one worker": one, "group": other})
            stages_s = comparison.best_stages_s
            shown = ", ".join(f"{seconds:.{2 + args.short}f}" for seconds in stages_s)
            num_chunks = len(plan.cuts(0, length))
            counts = [len(layers) for layers in ranges]
            result.note(
                f"{length} tokens: {num_chunks} chunks; processor seconds of the stages: {shown}; "
                f"best layers by these: {balanced_counts(counts, stages_s)}"
            )
        result.note(f"tokens were equal in {rounds} rounds; cores here: {len(cores)}")


if __name__ == "__main__":
    main()
