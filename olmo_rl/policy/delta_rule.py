"""The gated delta rule of Kimi Delta Attention: the recurrence, one step, and the chunked form over a pack.

Per head, with a state S [K, V] that starts at 0 in every document:

    S_t = (I - b_t k_t k_t^T) Diag(exp g_t) S_(t-1) + b_t k_t v_t^T        o_t = S_t^T q_t / sqrt(K)

(Kimi Linear, arXiv 2510.26692). Documents are isolated exactly: form and chunk size never depend on a pack's
contents, and no exponential of a positive number is ever taken, however strong the decay. Refuses nothing.

Shapes: T tokens of a pack, D documents, N chunks, C = 16 tokens of a chunk, H heads, K key channels, V value
channels, B sequences of a decode batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK = 16  # tokens; fixed, because a size chosen from the data would couple documents


def kda_recurrent(
    q: Tensor,
    *,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    boundaries: Sequence[int],
    parents: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Token by token, as the formula reads. q, k, g [T, H, K], v [T, H, V], beta [T, H] -> o [T, H, V] and
    the final state of every document [D, H, K, V], in the inputs' dtype. `parents` [D]: the document whose
    final state each one starts from, -1 for zeros; None: all start from zeros.
    """
    outputs: list[Tensor] = []
    states: list[Tensor] = []
    for d, (start, stop) in enumerate(zip(boundaries, boundaries[1:], strict=False)):
        state = q.new_zeros(q.shape[1], q.shape[2], v.shape[2])
        if parents is not None and parents[d] >= 0:
            state = states[parents[d]]
        for t in range(start, stop):
            state = state * g[t].exp()[:, :, None]
            read = torch.einsum("hk,hkv->hv", k[t], state)
            state = state + torch.einsum("hk,hv->hkv", k[t], beta[t][:, None] * (v[t] - read))
            outputs.append(torch.einsum("hk,hkv->hv", q[t], state) / math.sqrt(q.shape[2]))
        states.append(state)
    return torch.stack(outputs), torch.stack(states)


def kda_step(q: Tensor, *, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """One token of every sequence, `state` [B, H, K, V] updated in place. q, k, g [B, H, K], v [B, H, V],
    beta [B, H] -> o [B, H, V]. Reads the state once: o = (q exp g)^T S_(t-1) + (q . k) delta.
    """
    decay = g.exp()
    rows = torch.stack([k * decay, q * decay], dim=2) @ state  # [B, H, 2, V]
    delta = beta[:, :, None] * (v - rows[:, :, 0])
    state.mul_(decay[..., None])
    flat = state.view(-1, *state.shape[2:])
    flat.baddbmm_(k.reshape(-1, k.shape[-1], 1), delta.reshape(-1, 1, delta.shape[-1]))
    return (rows[:, :, 1] + (q * k).sum(-1, keepdim=True) * delta) / math.sqrt(q.shape[-1])


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkTable:
    """The ragged table of chunks: `slots` int64 [T] places each token in the rows of [N x C]. A chunk starts
    from the state of the one before it in its segment, the first one of a segment from the last of its
    parent: `counts[c]` chunks have c others before them, and `ends[c]` of these, the leading ones, others
    behind them. Chunks are ordered by c, then by the longest way on, so that what goes on in step c is one
    block. `entry` int64 [N - counts[0]]: which of the ends each later chunk starts from; None where the ends
    have one chunk behind them each, in this order, as in a forest of roots.
    """

    slots: Tensor
    counts: tuple[int, ...]
    ends: tuple[int, ...]
    entry: Tensor | None


def chunk_table(
    boundaries: Sequence[int], *, device: torch.device, parents: Sequence[int] | None = None
) -> ChunkTable:
    """The table of one pack, from its boundaries and the parents of its segments alone."""
    edges = np.asarray(boundaries, dtype=np.int64)
    starts, lengths = edges[:-1], edges[1:] - edges[:-1]
    chunks = -(-lengths // CHUNK)
    before, behind = _chunks_around(chunks, parents=parents)
    first = np.cumsum(chunks) - chunks  # the number of each segment's first chunk
    index = np.arange(chunks.sum()) - np.repeat(first, chunks)
    step = np.repeat(before, chunks) + index
    way_on = np.repeat(chunks + behind, chunks) - index - 1
    order = np.lexsort((-way_on, step))
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    counts = np.bincount(step)
    ends = np.bincount(step[way_on > 0], minlength=len(counts))
    offset = np.arange(edges[-1]) - np.repeat(starts, lengths)
    slots = place[np.repeat(first, lengths) + offset // CHUNK] * CHUNK + offset % CHUNK
    entry = None
    if parents is not None:
        earlier = np.arange(-1, len(order) - 1)
        up = np.asarray(parents, dtype=np.int64)
        earlier[first] = np.where(up < 0, -1, first[up] + chunks[up] - 1)
        end = np.cumsum(ends) - ends - (np.cumsum(counts) - counts)  # of step c: place -> number of the end
        later = earlier[order[counts[0] :]]
        entry = torch.from_numpy(place[later] + end[step[later]]).to(device, non_blocking=True)
    return ChunkTable(
        slots=torch.from_numpy(slots).to(device, non_blocking=True),
        counts=tuple(counts.tolist()),
        ends=tuple(ends.tolist()),
        entry=entry,
    )


def _chunks_around(
    chunks: NDArray[np.int64], *, parents: Sequence[int] | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """[D] each: chunks of the path before every segment, and of the longest path behind it."""
    before, behind = np.zeros_like(chunks), np.zeros_like(chunks)
    if parents is None:
        return before, behind
    for s, parent in enumerate(parents):
        if parent >= 0:
            before[s] = before[parent] + chunks[parent]
    for s in range(len(parents) - 1, -1, -1):
        if parents[s] >= 0:
            behind[parents[s]] = max(behind[parents[s]], chunks[s] + behind[s])
    return before, behind


def _to_chunks(x: Tensor, table: ChunkTable) -> Tensor:
    """[T, H, X] -> [N, H, C, X], zero in the rows that no token fills."""
    tokens, heads, width = x.shape
    rows = x.new_zeros(sum(table.counts) * CHUNK, heads * width)
    rows.index_copy_(0, table.slots, x.reshape(tokens, heads * width))
    return rows.view(-1, CHUNK, heads, width).transpose(1, 2).contiguous()


def _to_tokens(x: Tensor, table: ChunkTable) -> Tensor:
    """[N, H, C, X] -> [T, H, X]."""
    rows = x.transpose(1, 2).reshape(-1, x.shape[1], x.shape[3])
    return rows.index_select(0, table.slots)


class _Level(NamedTuple):
    """Values of one halving of the chunk that the backward pass uses: the right halves' rows and the left
    halves' columns before they were extended, and the decay of the left and right half.
    """

    rows: Tensor  # [N, H, blocks, 2, s, K]
    columns: Tensor  # [N, H, blocks, s, K]
    left: Tensor  # [N, H, blocks, 1, K]
    right: Tensor  # [N, H, blocks, 1, K]


def _scores(rows: Tensor, columns: Tensor, decay: Tensor) -> tuple[Tensor, list[_Level], Tensor]:
    """Products inside a chunk below the diagonal: for i > j, row_i Diag(exp(G_i - G_j)) column_j, for two
    kinds of rows.

    A chunk is split at its midpoint recursively, and a pair meets in the block whose midpoint m lies between:
    the row carries exp(G_i - G_m), the column exp(G_m - G_j). Both are products of decays, never above 1, so
    nothing overflows however strong the decay. `rows` [N, H, 2, C, K] must already carry the decay of their
    own token. In place, `rows` become row_i exp(G_i), `columns` column_j exp(G_end - G_j). Returns scores
    [N, H, 2, C, C], the levels, exp(G_end).
    """
    n, h, _, _, width = rows.shape
    scores = rows.new_zeros(n, h, 2, CHUNK, CHUNK)
    levels = []
    total = decay
    size = 1
    while size < CHUNK:
        blocks = CHUNK // (2 * size)
        pair_rows = rows.view(n, h, 2, blocks, 2, size, width)[:, :, :, :, 1].transpose(2, 3)
        pair_columns = columns.view(n, h, blocks, 2, size, width)[:, :, :, 0]
        left, right = total.view(n, h, blocks, 2, 1, width).unbind(3)
        level = _Level(rows=pair_rows.contiguous(), columns=pair_columns.contiguous(), left=left, right=right)
        product = level.rows.view(n, h, blocks, 2 * size, width) @ level.columns.mT
        _corners(scores, size=size).copy_(product.view(n, h, blocks, 2, size, size))
        pair_rows.mul_(left[:, :, :, None])
        pair_columns.mul_(right)
        total = left * right
        levels.append(level)
        size *= 2
    return scores, levels, total.view(n, h, width)


def _corners(scores: Tensor, *, size: int) -> Tensor:
    """View [N, H, blocks, 2, s, s] of the lower left corners of the diagonal blocks of 2 s tokens."""
    n, h, _, _, _ = scores.shape
    blocks = CHUNK // (2 * size)
    corner = scores.view(n, h, 2, blocks, 2, size, blocks, 2, size)[:, :, :, :, 1, :, :, 0]
    return corner.diagonal(dim1=3, dim2=5).permute(0, 1, 5, 2, 3, 4)


def _scores_backward(d_scores: Tensor, d_rows: Tensor, d_columns: Tensor, levels: list[_Level]) -> None:
    """Turn, in place, gradients with respect to the rows and columns that `_scores` leaves behind into
    gradients with respect to those it was given. Gradients of the decays follow from them (see
    `_ChunkedDelta.backward`).
    """
    n, h, _, _, width = d_rows.shape
    for level in reversed(levels):
        blocks, _, size = level.rows.shape[2:5]
        d_product = _corners(d_scores, size=size).reshape(n, h, blocks, 2 * size, size)
        pair_rows = d_rows.view(n, h, 2, blocks, 2, size, width)[:, :, :, :, 1].transpose(2, 3)
        pair_columns = d_columns.view(n, h, blocks, 2, size, width)[:, :, :, 0]
        pair_rows.mul_(level.left[:, :, :, None]).add_(
            (d_product @ level.columns).view(n, h, blocks, 2, size, width)
        )
        pair_columns.mul_(level.right).add_(d_product.mT @ level.rows.view(n, h, blocks, 2 * size, width))


class _Step(NamedTuple):
    """One step c >= 1 of the recurrence: its `chunks`, their places among the later chunks (`here`), the
    chunks `before` that it goes on from, and these as numbers of ends.
    """

    chunks: slice
    here: slice
    before: slice
    ends: slice


def _steps(counts: Sequence[int], ends: Sequence[int]) -> list[_Step]:
    steps, start, end = [], 0, 0
    for count, following, going_on in zip(counts, counts[1:], ends, strict=False):
        chunks = slice(start + count, start + count + following)
        here = slice(chunks.start - counts[0], chunks.stop - counts[0])
        steps.append(_Step(chunks, here, slice(start, start + going_on), slice(end, end + going_on)))
        start, end = start + count, end + going_on
    return steps


def _previous(steps: list[_Step], *, device: torch.device) -> Tensor:
    """int64: the chunks that others go on from, as ends are numbered."""
    return torch.cat([torch.arange(s.before.start, s.before.stop, device=device) for s in steps])


def _entered(states: Tensor, entry: Tensor | None, here: slice) -> Tensor:
    """The states in which later chunks start."""
    return states[here] if entry is None else states.index_select(0, entry[here])


class _ChunkedDelta(torch.autograd.Function):
    """The delta rule over a table of chunks. Inside a chunk entered with state S, with A and P the scores
    below the diagonal of (b k) and q against k (P with its diagonal, where no decay acts):

        (I + A) Z = b v - (b k exp G) S
        o = P Z + (q exp G) S
        S' = Diag(exp G_end) S + (k exp(G_end - G))^T Z

    The gradient of G needs no term of its own: every occurrence is q_i exp(G_i), b_i k_i exp(G_i) or k_j
    exp(-G_j), so it is the sum over these roles of value times gradient. Written out by hand because autograd
    spends three times as long moving memory.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        counts: tuple[int, ...],
        ends: tuple[int, ...],
        entry: Tensor | None,
    ) -> Tensor:
        """q, k, g [N, H, C, K], v [N, H, C, V], beta [N, H, C, 1] -> o [N, H, C, V]; q is already scaled."""
        decay = g.exp()
        rows = q.new_empty(*q.shape[:2], 2, *q.shape[2:])
        torch.mul(beta * k, decay, out=rows[:, :, 0])
        torch.mul(q, decay, out=rows[:, :, 1])
        columns = k.clone()
        scores, levels, total = _scores(rows, columns, decay)
        solve, read = scores.unbind(2)
        read.diagonal(dim1=2, dim2=3).copy_((q * k).sum(-1))
        values = torch.linalg.solve_triangular(solve, beta * v, upper=False, unitriangular=True)
        later = slice(counts[0], None)
        erase = torch.linalg.solve_triangular(
            solve[later], -rows[later, :, 0], upper=False, unitriangular=True
        )
        states = v.new_empty(sum(ends), v.shape[1], k.shape[3], v.shape[3])  # at the end of each end
        for chunks, here, before, end in _steps(counts, ends):
            state = columns[before].mT @ values[before]
            if before.start:
                inner = slice(before.start - counts[0], before.stop - counts[0])
                state.addcmul_(total[before, :, :, None], _entered(states, entry, inner))
            states[end] = state
            values[chunks] += erase[here] @ _entered(states, entry, here)
        out = read @ values
        out[later] += rows[later, :, 1] @ _entered(states, entry, slice(None))
        ctx.counts, ctx.ends = counts, ends
        flat = (x for level in levels for x in level)
        ctx.save_for_backward(
            q, k, v, beta, decay, rows, columns, scores, total, values, erase, states, entry, *flat
        )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, beta, decay, rows, columns, scores, total, values, erase, *rest = ctx.saved_tensors
        states, entry, *flat = rest
        levels = [_Level(*flat[i : i + 4]) for i in range(0, len(flat), 4)]
        counts, later = ctx.counts, slice(ctx.counts[0], None)
        solve, read = scores.unbind(2)
        d_values = read.mT @ d_out
        d_entered = rows[later, :, 1].mT @ d_out[later]
        # What goes on several times gets the sum of its gradients.
        d_ends = d_entered if entry is None else torch.zeros_like(states)
        d_columns, d_rows = torch.zeros_like(columns), torch.zeros_like(rows)
        d_total = torch.zeros_like(total)
        steps = _steps(counts, ctx.ends)
        for chunks, here, before, end in reversed(steps):
            d_here = d_entered[here]
            d_here += erase[here].mT @ d_values[chunks]
            d_state = d_ends[end]
            if entry is not None:
                d_state.index_add_(0, entry[here] - end.start, d_here)
            d_values[before] += columns[before] @ d_state
            if before.start:
                earlier = d_entered[before.start - counts[0] : before.stop - counts[0]]
                earlier.addcmul_(total[before, :, :, None], d_state)
        entered = _entered(states, entry, slice(None))
        # Z solves (I + A) Z = Y: the gradient of Y is the transposed solve, that of A its product with Z.
        d_input = torch.linalg.solve_triangular(solve.mT, d_values, upper=True, unitriangular=True)
        d_scores = torch.stack([(d_input @ values.mT).neg_(), d_out @ values.mT], dim=2)
        d_rows[later, :, 0] = (d_input[later] @ entered.mT).neg_()
        d_rows[later, :, 1] = d_out[later] @ entered.mT
        if steps:
            previous = _previous(steps, device=q.device)
            d_columns[previous] = values[previous] @ d_ends.mT
            # A first chunk is entered with state 0, so that its decay has no gradient.
            inner = previous[ctx.ends[0] :]
            d_total[inner] = (entered[inner - counts[0]] * d_ends[ctx.ends[0] :]).sum(-1)
        d_end = (columns * d_columns).sum(2) + total * d_total
        _scores_backward(d_scores, d_rows, d_columns, levels)
        d_rows *= decay[:, :, None]  # now with respect to b k and q
        d_key, d_query = d_rows.unbind(2)
        by_key = k * d_key
        d_beta = by_key.sum(-1, keepdim=True) + (v * d_input).sum(-1, keepdim=True)
        d_prefix = by_key.mul_(beta).addcmul_(q, d_query).addcmul_(k, d_columns, value=-1)
        d_prefix[:, :, -1] += d_end
        d_g = d_prefix.new_ones(CHUNK, CHUNK).triu_() @ d_prefix  # sums from each token to the chunk's end
        d_read = d_scores[:, :, 1].diagonal(dim1=2, dim2=3)[..., None]
        d_columns.addcmul_(beta, d_key).addcmul_(d_read, q)
        return d_query.addcmul_(d_read, k), d_columns, beta * d_input, d_g, d_beta, None, None, None


def kda_chunked(q: Tensor, *, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, table: ChunkTable) -> Tensor:
    """The recurrence over a pack in parallel over chunks. q, k, g [T, H, K], v [T, H, V], beta [T, H] -> o
    [T, H, V] in v's dtype; computed in float32, or float64 where v has it. `g` must not be positive.
    """
    dtype = torch.promote_types(v.dtype, torch.float32)
    scaled = q.to(dtype) * (1 / math.sqrt(q.shape[-1]))
    inputs = (scaled, k.to(dtype), v.to(dtype), g.to(dtype), beta.to(dtype)[:, :, None])
    out = _ChunkedDelta.apply(*(_to_chunks(x, table) for x in inputs), table.counts, table.ends, table.entry)
    return _to_tokens(out, table).to(v.dtype)
