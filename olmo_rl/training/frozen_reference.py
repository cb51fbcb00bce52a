"""The frozen reference policy of a KL term: which weights, where they are kept, how packs are scored.

One decoder more, sharded like the policy, without gradients and without optimizer state: 4 bytes a weight
over all ranks, beside the 16 of the policy's weights, gradients and Adam state, and one forward more a pack.
It never replays: its routers choose for themselves.

Which weights: those of `loss.reference`, or those that the run starts from. The latter are written once to
`reference/` of the run directory, since a resumed run starts from other weights; checkpoints hold a
fingerprint only. Refused: resuming against other reference weights than before, or without any; a file
without `ref_logprobs` among files that carry them, and `loss.reference` beside them.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from olmo_rl.chosen_checkpoint import resolve_checkpoint
from olmo_rl.config import Config
from olmo_rl.data.inputs import carries_reference
from olmo_rl.data.packs import Pack, RouteMode
from olmo_rl.policy import sharded
from olmo_rl.policy.hybrid import HybridDecoder
from olmo_rl.policy.weights import CHECKPOINT_PREFIX
from olmo_rl.run_directory import SCRATCH, checkpoint_fault, finish_checkpoint
from olmo_rl.training.scoring import score_pack
from olmo_rl.training.strategy import ExpertParallelStrategy
from olmo_rl.types import Refusal, Sample

REFERENCE = "reference"  # directory in the run directory


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FrozenReference:
    """A sharded decoder that nothing trains. No module of the policy's, so that neither optimizer nor
    checkpoints see it. `fingerprint` of its full weights, the same on every topology.
    """

    decoder: HybridDecoder
    fingerprint: str

    def score(self, packs: Iterable[Pack], *, strategy: ExpertParallelStrategy) -> list[Tensor]:
        """Log-probs [S] of the scored slots of every pack, routes live. Every rank scores as many packs."""
        scores = [
            score_pack(pack, strategy=strategy, mode=RouteMode.live, decoder=self.decoder) for pack in packs
        ]
        sharded.reshard(self.decoder)  # the root would stay gathered until the next update
        return scores


def build_reference(
    config: Config,
    *,
    strategy: ExpertParallelStrategy,
    build: Callable[[str | None], HybridDecoder],
    recorded: bool | None = None,
) -> FrozenReference | None:
    """The reference of this run, None where it needs none: no KL term, or files that carry its log-probs.

    `build` makes a sharded decoder with the weights at a path, None: initial ones. `recorded`: whether files
    carry its log-probs, None: the first one shows it. A collective of all ranks.
    """
    if not config.needs_reference:
        return None
    if not config.generates and (carries_reference(config) if recorded is None else recorded):
        return None
    decoder = build(_source(config))
    decoder.requires_grad_(False)
    decoder.eval()
    reference = FrozenReference(decoder=decoder, fingerprint=fingerprint_of(decoder))
    if config.loss.reference is None:
        _keep(reference, config=config, strategy=strategy)
    return reference


def _source(config: Config) -> str | None:
    """The path of the reference weights; None: they are the initial ones of this seed."""
    if config.loss.reference is not None:
        return config.loss.reference
    checkpoint = resolve_checkpoint(config)
    if checkpoint is None:
        return config.init_from
    kept = Path(checkpoint).parent.parent / REFERENCE
    fault = checkpoint_fault(kept)
    if fault is not None:
        raise Refusal(
            f"loss.kl_coef={config.loss.kl_coef} loss.kl_reward_coef={config.loss.kl_reward_coef} "
            f"ckpt_path={config.ckpt_path}: {kept} does not hold the "
            f"weights that this run started from, {fault}: name the reference with loss.reference, or set "
            "both to 0"
        )
    return str(kept)


def _keep(reference: FrozenReference, *, config: Config, strategy: ExpertParallelStrategy) -> None:
    """Write the weights that the run starts from, for those who resume it. A collective of all ranks."""
    final = Path(config.run_dir) / REFERENCE
    resumed = config.ckpt_path is not None
    if strategy.broadcast(resumed and checkpoint_fault(final) is None):
        return
    scratch = final.with_name(final.name + SCRATCH)
    if strategy.global_rank == 0:
        for old in (scratch, final):
            shutil.rmtree(old, ignore_errors=True)
        scratch.mkdir(parents=True)
    strategy.barrier()
    weights = {CHECKPOINT_PREFIX + name: p for name, p in reference.decoder.named_parameters()}
    dcp.save({"state_dict": weights}, checkpoint_id=scratch)
    strategy.barrier()
    if strategy.global_rank == 0:
        finish_checkpoint(scratch, final=final)
    strategy.barrier()


def check_fingerprint(reference: FrozenReference | None, *, expected: str | None, config: Config) -> None:
    """Raise Refusal where the reference changed. `expected`: that of the checkpoint, None where
    its run had no frozen reference.
    """
    if reference is None or expected is None or reference.fingerprint == expected:
        return
    named = "null" if config.loss.reference is None else config.loss.reference
    raise Refusal(
        f"loss.reference={named} ckpt_path={config.ckpt_path}: the checkpoint was trained against another "
        "reference: give the loss.reference of its run, or start a new run with init_from"
    )


def check_recorded(samples: Sequence[Sample], *, frozen: bool) -> None:
    """Raise Refusal for samples whose reference differs from that of the others of the run."""
    odd = [sample.id for sample in samples if (sample.ref_logprobs is None) is not frozen]
    if odd:
        has, others = ("ref_logprobs", "none") if frozen else ("no ref_logprobs", "them")
        raise Refusal(
            f"sample {odd[0]!r} has {has} ({len(odd)} such samples in this step), the first file "
            f"has {others}: the KL term would mix two references. Record ref_logprobs in all or in none"
        )


def fingerprint_of(decoder: nn.Module) -> str:
    """Return a hash of all weights of a decoder, by name: about one second a gigabyte. A collective of all
    ranks, which gathers one parameter at a time.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, parameter in sorted(decoder.named_parameters()):
        digest.update(name.encode())
        values = sharded.whole(parameter).cpu().contiguous().numpy()
        digest.update(values.data)
    return digest.hexdigest()
