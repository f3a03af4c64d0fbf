# SPDX-License-Identifier: Apache-2.0
"""A request: its prompt and parameters, its progress, and the times of its stages.

It owns the meaning of the sampling parameters and of a request's counters. It does not know
blocks' contents, steps and tensors; the scheduler moves it from state to state by ``STATE_MOVES``, which
docs/reference/state-machines.md draws.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib

from mooncake.connectors.kv_link import PushSource
from mooncake.errors import InvalidArgument
from mooncake.http.worker_stats import StageStats
from mooncake.inference.pipeline import PromptPassage
from mooncake.prefix import BlockHash, block_hashes, root_hash
from mooncake.state_table import StateTable, move


class RequestState(enum.StrEnum):
    WAITING = "waiting"
    LOOKING = "looking"
    """Holds blocks; the lookup of its prompt in the external cache is under way."""
    LOADING = "loading"
    """Holds blocks; the external cache writes into them. It runs when all have arrived, or, while no other
    request is there, when their first layer has."""
    RUNNING = "running"
    FINISHED = "finished"


LOOK_UP, NOT_LOOKED_UP, NOTHING_FOUND, FOUND = "looked up", "not looked up", "nothing found", "found"
LOADED, FIRST_LAYER_LOADED, LOAD_FAILED, PUSH_FAILED, PREEMPTED, FINISHED = (
    "loaded",
    "first layer loaded, alone",
    "load failed",
    "push failed",
    "preempted",
    "finished",
)
STATE_MOVES: StateTable[RequestState] = StateTable(
    "request of an inference engine",
    RequestState,
    {
        (RequestState.WAITING, LOOK_UP): move(RequestState.LOOKING),
        (RequestState.WAITING, NOT_LOOKED_UP): move(RequestState.RUNNING),
        (RequestState.LOOKING, NOTHING_FOUND): move(RequestState.RUNNING),
        (RequestState.LOOKING, FOUND): move(RequestState.LOADING),
        (RequestState.LOADING, LOADED): move(RequestState.RUNNING),
        (RequestState.LOADING, FIRST_LAYER_LOADED): move(RequestState.RUNNING),
        (RequestState.LOADING, LOAD_FAILED): move(RequestState.RUNNING),
        (RequestState.RUNNING, LOAD_FAILED): move(RequestState.RUNNING),
        (RequestState.LOADING, PUSH_FAILED): move(RequestState.LOOKING),
        (RequestState.RUNNING, PUSH_FAILED): move(RequestState.LOOKING),
        (RequestState.RUNNING, PREEMPTED): move(RequestState.WAITING),
        **{
            (state, FINISHED): move(RequestState.FINISHED)
            for state in RequestState
            if state is not RequestState.FINISHED
        },
    },
)


class FinishReason(enum.StrEnum):
    STOP = "stop"
    """An end-of-sequence or stop token was generated."""
    LENGTH = "length"
    """max_tokens, the model's context or the whole cache is used up."""
    ABORT = "abort"
    ERROR = "error"
    MOVED = "moved"
    """Another worker continues the answer, with the KV that this one pushes, if it does."""


@dataclasses.dataclass(frozen=True, slots=True)
class SamplingParams:
    """Rules for choosing tokens and for stopping. Raises InvalidArgument when a field is out of range."""

    max_tokens: int = 16
    """Most tokens of the whole answer, those generated elsewhere included."""
    min_tokens: int = 0
    """The answer does not end within this many tokens: no end-of-sequence or stop token is sampled in them,
    and no stop string looked for."""
    temperature: float = 1.0
    """0 takes the most likely token."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probabilities sum to this."""
    top_k: int = 0
    """Keep this many tokens; 0 keeps all."""
    seed: int | None = None
    """Equal seeds give equal draws; None takes a seed from the request's id."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer. The engine knows only tokens; the generator makes text and finds these."""
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    """Whether the stop string, or the token, that ends the answer is part of its text."""
    skip_special_tokens: bool = True
    """Whether special tokens are left out of the text."""
    ignore_eos: bool = False
    logprobs: int | None = None
    """None: no log probabilities; n: those of the sampled token and of the n most likely ones."""

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise InvalidArgument("max_tokens", self.max_tokens, "at least 1")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise InvalidArgument("min_tokens", self.min_tokens, f"0 to max_tokens ({self.max_tokens})")
        if not 0 <= self.temperature <= 100:
            raise InvalidArgument("temperature", self.temperature, "0 to 100")
        if not 0 < self.top_p <= 1:
            raise InvalidArgument("top_p", self.top_p, "above 0, up to 1")
        if self.top_k < 0:
            raise InvalidArgument("top_k", self.top_k, "0 (all) or more")
        if self.logprobs is not None and not 0 <= self.logprobs <= 20:
            raise InvalidArgument("logprobs", self.logprobs, "0 to 20")
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise InvalidArgument("seed", self.seed, "a signed 64-bit integer")


@dataclasses.dataclass(slots=True)
class Timings:
    """Instants of one request, in seconds on the engine's monotonic clock; None until reached."""

    arrival: float
    admitted: float | None = None
    started: float | None = None
    """Start of its first step."""
    first_token: float | None = None
    finished: float | None = None


@dataclasses.dataclass(slots=True)
class AnswerWeights:
    """The weights that compute one answer, shared by its requests: one for each prompt and choice."""

    digest: str = ""
    """Empty until the engine takes the first of the requests, unless another worker has begun the answer."""


MAX_MARKS = 64
"""Most marks of a request; later ones are left out."""


@dataclasses.dataclass(slots=True)
class Mark:
    """An interval of the work on a request that is traced, on the engine's monotonic clock."""

    name: str
    began: float
    ended: float | None = None
    attributes: dict[str, str | int | float | bool] = dataclasses.field(default_factory=dict)


class Request:
    """One prompt to be answered, and everything the scheduler knows about it."""

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        sampling: SamplingParams | None = None,
        *,
        salt: str = "",
        priority: int = 0,
        num_prior_output_tokens: int = 0,
        save_tail: bool = False,
        max_external_tokens: int | None = None,
        weights: AnswerWeights | None = None,
        push_source: PushSource | None = None,
        push_id: str = "",
    ) -> None:
        """``num_prior_output_tokens``: number of trailing prompt tokens that are an answer begun elsewhere.

        ``save_tail`` (prefill role) stores the prompt's partial last block too, and holds the final
        output back until everything is stored. Lower ``priority`` goes first. At most
        ``max_external_tokens`` leading tokens come from the external cache. ``weights``: those of the answer
        that this is a part of; None: it is a whole answer, which any weights may compute. A decode request's
        KV is pushed by ``push_source``, a prefill request's to the worker that requests the transfer
        ``push_id``. Raises InvalidArgument.
        """
        self.id = request_id
        self.sampling = sampling or SamplingParams()
        self.salt = salt
        self.priority = priority
        self.save_tail = save_tail
        self.max_external_tokens = max_external_tokens
        self.push_source = push_source
        """None once its blocks have arrived, or will not."""
        self.push_id = push_id
        """Empty once it is certain that not all of its blocks can be pushed."""
        self.num_pushed_blocks = 0
        """Leading blocks whose push has begun."""
        self.is_leaving = False
        """Whether another worker continues it from its next token on, which is not sampled here."""
        self.was_pushed = False
        """Whether its external cached tokens were pushed by another worker."""
        self.num_prior_output_tokens = num_prior_output_tokens
        self.weights = weights or AnswerWeights()
        """An engine that has other weights refuses the request."""
        self.num_prompt_tokens = len(prompt_token_ids)
        self.num_push_tokens = self.num_prompt_tokens
        """Leading tokens whose KV ``push_id`` has: the prompt, or all when another worker continues it."""
        if not prompt_token_ids:
            raise InvalidArgument("prompt", prompt_token_ids, "at least one token")
        if not 0 <= num_prior_output_tokens < min(self.num_prompt_tokens, self.sampling.max_tokens):
            allowed = f"0 to {min(self.num_prompt_tokens, self.sampling.max_tokens) - 1}"
            raise InvalidArgument("num_prior_output_tokens", num_prior_output_tokens, allowed)
        self.token_ids = list(prompt_token_ids)
        """Tokens of the prompt, then of the output."""

        self.state = RequestState.WAITING
        self.timings = Timings(arrival=0.0)
        self.sequence = 0
        """Order of arrival, assigned by the scheduler."""
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None

        self.block_ids: list[int] = []
        self.num_computed_tokens = 0
        """Leading tokens whose keys and values are in the blocks."""
        self.num_published_blocks = 0
        """Leading blocks that the prefix index knows, as these blocks or as other requests' duplicates."""
        self.num_saved_blocks = 0
        """Leading blocks that have been offered to the external cache, or came from there."""
        self.is_tail_saved = False
        self.num_local_cached_tokens = 0
        self.num_external_cached_tokens = 0
        """Leading tokens that this admission found in this worker, then those found in the external cache."""
        self.awaits_token = False
        """Whether its next token is being computed by a step that is not finished (in a pipeline)."""
        self.looked_up_at = 0.0
        """Time of this admission's lookup in the external cache."""
        self.num_local_hit_tokens = 0
        self.num_external_hit_tokens = 0
        """The same counts of the first admission, for usage reports; set at the first token."""
        self.num_preemptions = 0

        self.passage: PromptPassage | None = None
        """Passage of its prompt through the stages of a prefill group, as far as chunks have ended."""
        self.stages: list[StageStats] = []
        """The same by stage, once it has its first token."""

        self.marks: list[Mark] | None = None
        """What was done for it and when; None where it is not traced."""

        self._root = b""
        self._hashes: list[BlockHash] = []
        self.tail_hash: BlockHash | None = None
        """Hash of the whole prompt when its last block is partial."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def is_begun(self) -> bool:
        """Whether tokens were computed since it was admitted."""
        return self.num_computed_tokens > self.num_local_cached_tokens + self.num_external_cached_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_output_tokens(self) -> int:
        """Tokens of the answer so far, those generated elsewhere included."""
        return len(self.token_ids) - self.num_prompt_tokens + self.num_prior_output_tokens

    @property
    def rank(self) -> tuple[int, int]:
        """Sort key; the smallest goes first and is preempted last."""
        return (self.priority, self.sequence)

    @property
    def sampling_seed(self) -> int:
        """The seed of every draw; derived from the id when the parameters have none."""
        if self.sampling.seed is not None:
            return self.sampling.seed
        return int.from_bytes(hashlib.sha256(self.id.encode()).digest()[:8], "little", signed=True)

    def mark(self, name: str, began: float, /, **attributes: str | int | float | bool) -> Mark | None:
        """Begin an interval of its trace; None where it is not traced."""
        if self.marks is None or len(self.marks) >= MAX_MARKS:
            return None
        found = Mark(name, began, attributes=attributes)
        self.marks.append(found)
        return found

    def move(self, event: str) -> None:
        """Enter the state that follows ``event``."""
        self.state = STATE_MOVES.next(self.state, event)

    def hash_blocks(self, block_tokens: int) -> list[BlockHash]:
        """Hashes of all full blocks of the tokens so far; sets ``tail_hash`` the first time."""
        if not self._root:
            self._root = root_hash(self.salt)
            hashes = block_hashes(self.token_ids, block_tokens, self._root, include_partial=True)
            if self.num_prompt_tokens % block_tokens:
                self.tail_hash = hashes.pop()
            self._hashes = hashes
        num_full = self.num_tokens // block_tokens
        if len(self._hashes) < num_full:
            parent = self._hashes[-1] if self._hashes else self._root
            rest = self.token_ids[len(self._hashes) * block_tokens : num_full * block_tokens]
            self._hashes += block_hashes(rest, block_tokens, parent)
        return self._hashes

    def prompt_hash(self, block_tokens: int) -> BlockHash:
        """The hash of the whole prompt."""
        hashes = self.hash_blocks(block_tokens)
        return self.tail_hash or hashes[self.num_prompt_tokens // block_tokens - 1]

    def pushed_hash(self, block_tokens: int) -> BlockHash:
        """The hash of the tokens whose KV is pushed: the receiver's ``prompt_hash``."""
        if self.num_push_tokens == self.num_prompt_tokens:
            return self.prompt_hash(block_tokens)
        hashes = self.hash_blocks(block_tokens)
        num_full = self.num_push_tokens // block_tokens
        tail = self.token_ids[num_full * block_tokens : self.num_push_tokens]
        if not tail:
            return hashes[num_full - 1]
        return block_hashes(tail, block_tokens, self.parent_hash(num_full), include_partial=True)[-1]

    def parent_hash(self, index: int) -> BlockHash:
        """The hash of the prefix that block ``index`` continues."""
        return self._hashes[index - 1] if index else self._root

    def __repr__(self) -> str:
        return (
            f"Request({self.id} {self.state} computed={self.num_computed_tokens}/{self.num_tokens}"
            f" output={self.num_output_tokens}/{self.sampling.max_tokens} blocks={len(self.block_ids)})"
        )
