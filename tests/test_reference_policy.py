"""The frozen reference of the KL term through the real trainer: which weights, that they stay, what they add
to the gradient, and that a resumed run has them again.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from lightning.pytorch import Callback
from oracle import OracleDocument, group_advantages, log_probability, number, policy_objective
from torch import Tensor
from training_cases import (
    LAYOUT,
    MODEL,
    SMALL_PACKS,
    Run,
    config_of,
    files,
    fit,
    identical,
    largest_difference,
    write_files,
)

from olmo_rl.config import (
    BatchConfig,
    Config,
    KlEstimator,
    LossConfig,
    PolicyConfig,
    RolloutsConfig,
    TaskConfig,
    TrainerConfig,
)
from olmo_rl.data.collate import collate
from olmo_rl.data.packs import RouteMode
from olmo_rl.data.preflight import examine
from olmo_rl.policy.hybrid import HybridDecoder
from olmo_rl.policy.weights import save_weights
from olmo_rl.refusals import refusals
from olmo_rl.training.frozen_reference import fingerprint_of
from olmo_rl.types import Refusal, Sample, Topology

KL = LossConfig(kl=KlEstimator.k2, kl_coef=0.5)


def refuse(config: Config) -> None:
    """What the preflight finds, as a recipe raises it."""
    if reasons := examine(config).reasons:
        raise Refusal(reasons)


def unreferenced(count: int) -> list[list[Sample]]:
    """Collections that carry no log-probs of a reference."""
    return [[replace(sample, ref_logprobs=None) for sample in samples] for samples in files(count)]


def run_of(run_dir: Path, collections: Sequence[Sequence[Sample]], *, steps: int, **sections: Any) -> Config:
    write_files(run_dir, collections)
    fields: dict[str, Any] = {"loss": KL, "packing": SMALL_PACKS, "trainer": TrainerConfig(max_steps=steps)}
    return config_of(run_dir, **(fields | sections))


def initial(seed: int = 0) -> HybridDecoder:
    decoder = HybridDecoder(MODEL, attention="reference")
    decoder.init_weights(seed)
    return decoder


def weights_of(decoder: HybridDecoder) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in decoder.named_parameters()}


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Four updates against the weights that the run starts from."""
    return fit(run_of(tmp_path_factory.mktemp("straight"), unreferenced(4), steps=4))


def kl_of(run: Run) -> list[float]:
    return [event["terms"]["loss/ref_kl"] for event in run.events("optimizer")]


def test_the_divergence_is_0_at_the_first_update_and_grows_from_there(tmp_path: Path) -> None:
    # Routes are live, so policy and reference compute the same.
    run = fit(run_of(tmp_path / "run", unreferenced(3), steps=3, policy=PolicyConfig(replay=False)))
    first, second, third = kl_of(run)
    assert first < 1e-12
    assert min(second, third) > 1e-4
    assert [event["decision"] for event in run.events("scoring")] == ["standalone"] * 3


def test_the_reference_stays_as_it_was_to_the_last_bit_and_is_nowhere_trained_or_saved(straight: Run) -> None:
    reference = straight.module.reference
    assert reference is not None
    assert identical(weights_of(reference.decoder), straight.recorder.weights[0])
    assert not identical(straight.weights, straight.recorder.weights[0])
    assert not any(p.requires_grad for p in reference.decoder.parameters())
    assert all(p.grad is None for p in reference.decoder.parameters())
    trained = {id(p) for group in straight.trainer.optimizers[0].param_groups for p in group["params"]}
    assert trained == {id(p) for p in straight.module.policy.parameters()}
    (checkpoint,) = (Path(straight.config.run_dir) / "checkpoints").iterdir()
    saved = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    names = {name.removeprefix("state_dict.") for name in saved if name.startswith("state_dict.")}
    assert names == {f"decoder.{name}" for name in straight.weights}


class Double(Callback):
    """The reference in float64, as `double=True` makes the policy."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.reference.decoder.double()


def documents_of(
    samples: Sequence[Sample], *, policy: HybridDecoder, reference: HybridDecoder
) -> list[OracleDocument]:
    """Every sample alone: replayed routes for the policy, live ones for the reference."""

    def logits(decoder: HybridDecoder, sample: Sample, mode: RouteMode) -> Tensor:
        pack = collate([sample], layout=LAYOUT, topology=Topology(1))
        found = decoder(pack["tokens"], pack.context(mode=mode), None).logits
        assert found is not None
        return found

    rewards, groups = [s.reward for s in samples], [s.group for s in samples]
    documents = []
    for sample, advantage in zip(samples, group_advantages(rewards, groups, normalize=True), strict=True):
        document = OracleDocument(
            tokens=sample.tokens.tolist(),
            logits=logits(policy, sample, RouteMode.replay),
            mask=sample.response_mask.tolist(),
            anchor=[],
            behavior=sample.behavior_logprobs.tolist(),
            reference=[],
            advantage=advantage,
        )
        frozen = replace(document, logits=logits(reference, sample, RouteMode.live).detach())
        for values, source in ((document.anchor, document), (document.reference, frozen)):
            for t in range(len(document.tokens)):
                values.append(number(log_probability(source, t)) if t in document.scored() else 0.0)
        documents.append(document)
    return documents


def test_the_gradient_is_the_oracles_with_a_reference_that_never_replays(tmp_path: Path) -> None:
    collections = unreferenced(2)
    run = fit(run_of(tmp_path / "run", collections, steps=2), double=True, callbacks=[Double()])
    settings = {"kind": "grpo", "clip_low": 0.2, "clip_high": 0.28, "reduction": "token"}
    settings |= {"kl": "k2", "kl_coef": 0.5}
    for update, samples in enumerate(collections):
        policy = initial().double()
        policy.load_state_dict(run.recorder.weights[update])
        loss = policy_objective(
            documents_of(samples, policy=policy, reference=initial().double()), settings=settings
        )
        loss.backward()
        want = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in policy.named_parameters()}
        terms = run.events("optimizer")[update]["terms"]
        assert terms["loss/total"] == pytest.approx(number(loss), rel=1e-11)
        assert terms["loss/ref_kl"] > 1e-3, "replayed routes differ from live ones"
        assert largest_difference(run.recorder.gradients[update], want) < 1e-11


@pytest.mark.parametrize("recorded", [False, True])
def test_rewards_count_the_divergence_that_the_oracle_finds(tmp_path: Path, recorded: bool) -> None:
    """Two updates: the reference stays the initial weights, its routes are live, and files may carry it."""
    collections = files(2) if recorded else unreferenced(2)
    config = run_of(tmp_path / "run", collections, steps=2, loss=LossConfig(kl_reward_coef=0.25))
    run = fit(config, double=True, callbacks=[] if recorded else [Double()])
    for update, samples in enumerate(collections):
        frozen = initial().double()
        documents = documents_of(samples, policy=frozen, reference=frozen)
        divergences = [
            sum(
                document.behavior[t]
                - (document.reference[t] if sample.ref_logprobs is None else float(sample.ref_logprobs[t]))
                for t in document.scored()
            )
            for document, sample in zip(documents, samples, strict=True)
        ]
        rewards = [s.reward - 0.25 * d for s, d in zip(samples, divergences, strict=True)]
        expected = group_advantages(rewards, [s.group for s in samples], normalize=True)
        found = {sample.id: sample.advantage for sample in run.recorder.batches[update].samples}
        assert [found[sample.id] for sample in samples] == pytest.approx(expected, abs=1e-5)
        row = run.rows[update]
        assert row["reward/kl"] == pytest.approx(sum(divergences) / len(samples), abs=1e-5)
        assert row["reward/mean"] == pytest.approx(sum(s.reward for s in samples) / len(samples))
        assert "loss/kl" not in run.events("optimizer")[update]["terms"]


def test_a_resumed_run_has_the_reference_of_its_start_and_not_the_weights_it_resumes(
    straight: Run, tmp_path: Path
) -> None:
    config = run_of(tmp_path / "run", unreferenced(4), steps=2)
    fit(config)
    resumed = fit(replace(config, ckpt_path="last", trainer=TrainerConfig(max_steps=4)))
    assert resumed.module.reference is not None
    assert straight.module.reference is not None
    assert resumed.module.reference.fingerprint == straight.module.reference.fingerprint
    assert identical(resumed.weights, straight.weights)
    assert kl_of(resumed) == kl_of(straight)
    # Another directory that resumes the same checkpoint has the same reference, and keeps it.
    other = replace(
        config,
        run_dir=str(tmp_path / "other"),
        ckpt_path=str(tmp_path / "run" / "checkpoints" / "step-2"),
        trainer=TrainerConfig(max_steps=3),
    )
    fit(other)
    again = fit(replace(other, ckpt_path="last", trainer=TrainerConfig(max_steps=4)))
    assert identical(again.weights, straight.weights)


def test_resuming_against_other_weights_or_none_is_refused_by_name(tmp_path: Path) -> None:
    config = run_of(tmp_path / "run", unreferenced(4), steps=2)
    fit(config)
    last = replace(config, ckpt_path="last", trainer=TrainerConfig(max_steps=4))
    moved = replace(last, loss=replace(KL, reference=str(tmp_path / "run" / "checkpoints" / "step-2")))
    with pytest.raises(Refusal, match=r"loss\.reference=.*step-2.* trained against another reference"):
        fit(moved)
    shutil.rmtree(tmp_path / "run" / "reference")
    with pytest.raises(Refusal, match=r"run/reference does not hold the weights .* loss\.reference"):
        fit(last)
    assert fit(replace(last, loss=LossConfig())).trainer.global_step == 4


def test_named_weights_are_the_reference(straight: Run, tmp_path: Path) -> None:
    own, other = tmp_path / "own.safetensors", tmp_path / "other.safetensors"
    save_weights(weights_of(initial(0)), own)
    save_weights(weights_of(initial(1)), other)
    runs = {
        path: fit(
            run_of(tmp_path / path.stem, unreferenced(2), steps=2, loss=replace(KL, reference=str(path)))
        )
        for path in (own, other)
    }
    assert kl_of(runs[own]) == kl_of(straight)[:2]
    assert kl_of(runs[other])[0] > 5 * kl_of(straight)[0]
    assert not (tmp_path / "own" / "reference").exists(), "they lie where they are named"
    missing = replace(KL, reference=str(tmp_path / "run"))
    config = replace(run_of(tmp_path / "run", unreferenced(1), steps=1), loss=missing)
    assert [line.partition("=")[0] for line in refusals(replace(config, run_dir=""))] == ["loss.reference"]
    with pytest.raises(Refusal, match=r"loss\.reference=.*neither a \.safetensors file nor a checkpoint"):
        fit(config)


def test_log_probs_that_a_file_carries_are_used_and_no_model_is_loaded(tmp_path: Path) -> None:
    run = fit(run_of(tmp_path / "run", files(1), steps=1))
    assert run.module.reference is None
    assert not (tmp_path / "run" / "reference").exists()
    assert kl_of(run)[0] > 0.1, "the recorded values are far from the policy"


def test_files_that_mix_two_references_are_refused_naming_sample_and_file(
    tmp_path: Path,
) -> None:
    one, two = files(2)
    mixed = [replace(s, ref_logprobs=None) if i == 3 else s for i, s in enumerate(one)]
    with pytest.raises(Refusal, match=r"collection-00000\.parquet: sample 'f0-3' has no ref_logprobs"):
        fit(run_of(tmp_path / "inside", [mixed], steps=1))
    without = [replace(s, ref_logprobs=None) for s in two]
    for name, collections, words in (
        ("first", [one, without], "sample 'f1-0' has no ref_logprobs"),
        ("second", [without, one], "sample 'f0-0' has ref_logprobs"),
    ):
        config = run_of(tmp_path / name, collections, steps=2)
        with pytest.raises(Refusal, match=r"carries ref_logprobs, .* does not: loss\.kl_coef=0\.5"):
            refuse(config)
        with pytest.raises(Refusal, match=words):
            fit(config)
    (tmp_path / "weights.safetensors").touch()
    named = replace(KL, reference=str(tmp_path / "weights.safetensors"))
    with pytest.raises(Refusal, match=r"loss\.reference=.*no effect, .*00000\.parquet carries ref_logprobs"):
        fit(run_of(tmp_path / "named", [one], steps=1, loss=named))


def test_a_reference_of_the_local_engine_agrees_with_the_policy_that_generates(tmp_path: Path) -> None:
    config = config_of(
        tmp_path / "run",
        loss=KL,
        task=TaskConfig(eval_problems=0),
        rollouts=RolloutsConfig(group_size=4, max_new_tokens=6),
        batch=BatchConfig(samples_per_step=16),
        trainer=TrainerConfig(max_steps=1),
    )
    run = fit(config)
    assert run.module.reference is not None
    assert kl_of(run)[0] < 1e-9  # replayed routes are those that live top-k chooses


def test_the_fingerprint_tells_weights_apart() -> None:
    assert fingerprint_of(initial(0)) == fingerprint_of(initial(0)) != fingerprint_of(initial(1))
