"""The local engine: batched sampling from an unsharded copy of the current weights, with routes and
log-probs.

All sequences of a batch start at position 0 and advance together, prompt tokens forced: no pads, no masks.
Sequences with equal prompts share one row of the decoding state until their first tokens are drawn, so that
each prompt is read once; the head is computed where a token is drawn. A sequence of T tokens is read up to
its last but one, so that it has exactly T-1 rows of routes. Decoding state lives inside one call of
`generate`: nothing computed with old weights outlives `publish`.

Reported log-probs are those of the model's distribution at the temperature of sampling over the whole
vocabulary, whatever top-p chose the token: that is what the trainer scores, so the two can be compared.

Refused: an empty prompt, a sequence that could exceed `model.max_seq_len`, sampling settings out of range,
published weights whose names or shapes are not the model's.

Shapes: B sequences of a batch, S rows of its decoding state, M the longest possible sequence, V vocabulary,
L routed layers, K experts per token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from olmo_rl.config import ModelConfig
from olmo_rl.hf.names import refuse_mismatches
from olmo_rl.policy.hybrid import HybridDecoder
from olmo_rl.policy.sampling import Sampling, StopTokens, choose_tokens, stop_ids, uniforms_of
from olmo_rl.types import Refusal

# Sequences that have ended are computed on until they are this share of the batch; dropping them copies the
# state.
_COMPACT_SHARE = 0.25


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One prompt to be continued. `id` seeds its random numbers: give every sample of a group its own."""

    id: str
    tokens: Sequence[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """A finished sequence: `tokens` int32 [T] with prompt and stop token, `logprobs` float32 of the generated
    tokens, `routes` [T-1, L, K] in the narrowest signed integer type (None for a dense model),
    `finish_reason` stop | length. `token_versions` int32, like `logprobs`: the weights that wrote each token,
    None where that is not known; `policy_version` is the oldest.
    """

    id: str
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    routes: NDArray[np.integer] | None
    finish_reason: str
    policy_version: int
    token_versions: NDArray[np.int32] | None = None


class LocalEngine:
    """Owns one unsharded decoder. `version` is the policy version of its weights, None before the first
    `publish`.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        max_state_bytes: int = 2**30,
    ) -> None:
        """`max_state_bytes` bounds the decoding state: more requests than fit are generated batch by
        batch. Dropping and branching sequences copies it: for a moment a batch holds up to twice as much.
        """
        self.version: int | None = None
        self._config, self._device, self._dtype = config, device, dtype
        self._max_state_bytes = max_state_bytes
        with torch.device(device):
            model = HybridDecoder(
                config, attention="torch"
            )  # decoding attends to caches; the backend plays no part
        self._model = model.to(dtype).eval().requires_grad_(False)
        if dtype.itemsize < 4:
            for module in self._model.modules():
                if getattr(module, "keep_float32", False):
                    module.to(torch.float32)
        self._parameters = dict(self._model.named_parameters())

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return self._config.vocab_size

    @property
    def max_seq_len(self) -> int:
        """Tokens that a prompt and its response may have together."""
        return self._config.max_seq_len

    @torch.no_grad()
    def publish(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Take over full weights by name. Everything is checked before the first copy: a refused publish
        leaves weights and version as they were.
        """
        refuse_mismatches(
            {name: parameter.shape for name, parameter in self._parameters.items()},
            {name: tensor.shape for name, tensor in weights.items()},
            where="publish",
        )
        for name, parameter in self._parameters.items():
            parameter.copy_(weights[name])
        self.version = version

    @torch.inference_mode()
    def generate(
        self,
        requests: Sequence[Request],
        *,
        max_new_tokens: int,
        stop_token: StopTokens = None,
        temperature: float = 1.0,
        top_p: float = 1.0,
        greedy: bool = False,
        seed: int,
        draw: int | None = None,
        dropped: Callable[[], Set[str]] | None = None,
    ) -> list[Generation]:
        """Continue every request, results in their order. Random numbers depend on (seed, draw, request id,
        step) alone, `draw` None standing for the version: batches and their order change a result by rounding
        only. `dropped`: asked at every token for the ids of requests that nobody waits for any more; their
        results are meaningless.
        """
        assert self.version is not None, "publish weights before generating"
        sampling = Sampling(
            max_new_tokens=max_new_tokens,
            stop_tokens=stop_ids(stop_token),
            temperature=temperature,
            top_p=top_p,
            greedy=greedy,
            seed=seed,
            draw=self.version if draw is None else draw,
        )
        assert greedy or len({request.id for request in requests}) == len(requests), (
            "equal ids draw equal numbers"
        )
        self._check_lengths(requests, max_new_tokens=max_new_tokens)
        # Neighbours in length share a batch; the order of the results is the requests'.
        order = sorted(range(len(requests)), key=lambda i: len(requests[i].tokens))
        results: dict[int, Generation] = {}
        size = self.batch_size(requests, max_new_tokens=max_new_tokens)
        for start in range(0, len(order), size):
            chosen = order[start : start + size]
            batch = _Batch([requests[i] for i in chosen], sampling=sampling, device=self._device)
            self._decode(batch, dropped=dropped)
            results.update(zip(chosen, batch.results(self._config, version=self.version), strict=True))
        return [results[i] for i in range(len(requests))]

    def _decode(self, batch: _Batch, *, dropped: Callable[[], Set[str]] | None) -> None:
        state = self._model.init_state(
            batch.state_rows, length=batch.longest, device=self._device, dtype=self._dtype
        )
        for position in range(batch.longest - 1):
            heads = batch.heads(position)
            logits, routes = self._model.step(
                batch.current(position), position=position, state=state, heads=heads
            )
            batch.advance(logits, routes=routes, position=position)
            if dropped is not None:
                batch.drop(dropped())
            if batch.open_count == 0:
                return
            kept = batch.next_layout(position + 1)
            if kept is not None:
                state = [{name: x.index_select(0, kept) for name, x in layer.items()} for layer in state]

    def _check_lengths(self, requests: Sequence[Request], *, max_new_tokens: int) -> None:
        limit = self._config.max_seq_len
        reasons = [
            f"request {r.id}: the prompt is empty, and a first token has nothing to be drawn from"
            for r in requests
            if not len(r.tokens)
        ]
        reasons += [
            f"request {r.id}: {len(r.tokens)} prompt tokens and rollouts.max_new_tokens={max_new_tokens} "
            f"exceed model.max_seq_len={limit}: shorten one or raise the other"
            for r in requests
            if len(r.tokens) + max_new_tokens > limit
        ]
        if reasons:
            raise Refusal(reasons)

    def batch_size(self, requests: Sequence[Request], *, max_new_tokens: int) -> int:
        """The number of sequences of the requests' greatest length that fit into `max_state_bytes`, at least
        one.
        """
        longest = max((len(request.tokens) for request in requests), default=1) + max_new_tokens
        state = self._model.init_state(1, length=longest, device=torch.device("meta"), dtype=self._dtype)
        row = sum(x.numel() * x.element_size() for layer in state for x in layer.values())
        return max(1, self._max_state_bytes // max(1, row))


class _Batch:
    """Sequences that advance together. `rows` int64 are the sequences still in the decoding batch; buffers
    keep all. `lanes` int64, as `rows`: the row of the decoding state that each sequence reads from.
    """

    def __init__(self, requests: Sequence[Request], *, sampling: Sampling, device: torch.device) -> None:
        self._requests, self._sampling = requests, sampling
        self._prompts = torch.tensor([len(request.tokens) for request in requests], device=device)
        self._limits = self._prompts + sampling.max_new_tokens
        self.longest = max(len(request.tokens) for request in requests) + sampling.max_new_tokens
        lengths = [len(request.tokens) for request in requests]
        self._first, self._last = min(lengths), max(lengths)  # tokens of the shortest and the longest prompt
        tokens = np.zeros((len(requests), self.longest), dtype=np.int64)
        for row, request in zip(tokens, requests, strict=True):
            row[: len(request.tokens)] = request.tokens
        self._tokens = torch.from_numpy(tokens).to(device)
        self._logprobs = torch.zeros(tokens.shape, dtype=torch.float32, device=device)
        self._uniforms: Tensor | None = None
        if not sampling.greedy:
            ids = [request.id for request in requests]
            self._uniforms = uniforms_of(ids, sampling=sampling).to(device)
        self._routes: list[tuple[Tensor, Tensor, Tensor]] = []  # rows, lanes, experts [S, L, K]
        self._lengths = self._limits.clone()
        self._stopped = torch.zeros(len(requests), dtype=torch.bool, device=device)
        self.rows = torch.arange(len(requests), device=device)
        leaders: dict[tuple[int, ...], int] = {}
        first = [leaders.setdefault(tuple(request.tokens), i) for i, request in enumerate(requests)]
        counts = Counter(first)
        # Lengths of the prompts of several sequences: there each sequence gets a row of the state.
        self._branching = {lengths[leader] for leader, count in counts.items() if count > 1}
        self._leaders, self.lanes = torch.tensor(first, device=device).unique(return_inverse=True)
        self._open = torch.ones(len(requests), dtype=torch.bool, device=device)
        self.open_count = len(requests)

    @property
    def state_rows(self) -> int:
        """Rows of the decoding state."""
        return len(self._leaders)

    def current(self, position: int) -> Tensor:
        """int64 [S]: the tokens to read at `position`."""
        return self._tokens[self._leaders, position]

    def heads(self, position: int) -> Tensor | None:
        """int64 [H]: the rows of the state after whose token at `position` one is drawn; None for all."""
        if position + 1 >= self._last:
            return None
        if position + 1 < self._first:
            return self._leaders[:0]
        return (self._prompts[self._leaders] <= position + 1).nonzero()[:, 0]

    def advance(self, logits: Tensor, *, routes: Tensor | None, position: int) -> None:
        """Take the logits [H, V] after `position`: draw tokens where prompts have ended, close what has
        ended. `routes`: [S, L, K].
        """
        if routes is not None:
            self._routes.append((self.rows, self.lanes, routes))
        target = position + 1
        if target < self._first:
            return
        drawing, of = self._drawing(target)
        rows = self.rows[drawing]
        uniforms = None
        if self._uniforms is not None:
            drawn = (target - self._prompts[rows]).clamp(max=self._uniforms.shape[1] - 1)
            uniforms = self._uniforms[rows, drawn]
        logprobs = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), dim=-1)
        if of is not None:
            logprobs = logprobs[of]
        tokens = choose_tokens(
            logprobs, uniforms=uniforms, temperature=self._sampling.temperature, top_p=self._sampling.top_p
        )
        if self._sampling.temperature != 1.0:
            logprobs = torch.log_softmax(logprobs / self._sampling.temperature, dim=-1)
        self._tokens[rows, target] = tokens
        self._logprobs[rows, target] = logprobs.gather(1, tokens[:, None])[:, 0].float()
        is_open = self._open[drawing]
        stopped = torch.zeros_like(is_open)
        for stop_token in self._sampling.stop_tokens:
            stopped |= is_open & (tokens == stop_token)
        self._lengths[rows[stopped]] = target + 1
        self._stopped[rows[stopped]] = True
        self._open[drawing] = is_open & ~stopped & (target + 1 < self._limits[rows])
        self.open_count = int(self._open.sum())

    def _drawing(self, target: int) -> tuple[Tensor, Tensor | None]:
        """The sequences that draw a token at `target`, as places in `rows`, and the row of each in the
        logits; None where that is its own place.
        """
        if target >= self._last:
            alone = self.state_rows == len(self.rows)
            return torch.arange(len(self.rows), device=self.rows.device), None if alone else self.lanes
        of_lane = (self._prompts[self._leaders] <= target).cumsum(0) - 1
        drawing = (self._prompts[self.rows] <= target).nonzero()[:, 0]
        return drawing, of_lane[self.lanes[drawing]]

    def drop(self, ids: Set[str]) -> None:
        """Close the sequences of these requests."""
        if ids:
            gone = [self._requests[row].id in ids for row in self.rows.tolist()]
            self._open &= ~torch.tensor(gone, device=self._open.device)
            self.open_count = int(self._open.sum())

    def next_layout(self, position: int) -> Tensor | None:
        """Give sequences that begin to differ at `position` a row of the state each, and drop ended ones
        where enough have ended or the state is copied anyway: the rows [S] of the present state that the next
        one consists of, None where it stays as it is.
        """
        full = self.open_count > (1 - _COMPACT_SHARE) * len(self.rows)
        if full and position not in self._branching:
            return None
        kept = self._open.nonzero()[:, 0]
        self.rows, lanes, self._open = self.rows[kept], self.lanes[kept], self._open[kept]
        places = torch.arange(len(kept), device=kept.device)
        first = places.new_full((self.state_rows,), len(kept)).scatter_reduce(0, lanes, places, "amin")
        together = position < self._prompts[self.rows]
        leading, self.lanes = torch.where(together, first[lanes], places).unique(return_inverse=True)
        self._leaders = self.rows[leading]
        return lanes[leading]

    def results(self, config: ModelConfig, *, version: int) -> list[Generation]:
        """Every sequence cut at its own end."""
        tokens = self._tokens.to(torch.int32).cpu().numpy()
        logprobs = self._logprobs.cpu().numpy()
        lengths, stopped = self._lengths.tolist(), self._stopped.tolist()
        routes = self._gathered_routes(config.num_experts)
        return [
            Generation(
                id=request.id,
                tokens=tokens[i, :length].copy(),
                logprobs=logprobs[i, len(request.tokens) : length].copy(),
                routes=None if routes is None else routes[i, : length - 1].copy(),
                finish_reason="stop" if stopped[i] else "length",
                policy_version=version,
            )
            for i, (request, length) in enumerate(zip(self._requests, lengths, strict=True))
        ]

    def _gathered_routes(self, num_experts: int) -> NDArray[np.integer] | None:
        """[B, steps, L, K]; rows after a sequence's end are meaningless."""
        if not self._routes:
            return None
        dtype = next(
            d for d in (torch.int8, torch.int16, torch.int32) if num_experts - 1 <= torch.iinfo(d).max
        )
        layers, top_k = self._routes[0][2].shape[1:]
        out = torch.zeros(
            len(self._requests), len(self._routes), layers, top_k, dtype=dtype, device=self._tokens.device
        )
        for step, (rows, lanes, ids) in enumerate(self._routes):
            out[rows, step] = ids.to(dtype)[lanes]
        return out.cpu().numpy()
