"""A step's result in words: metrics by name, and the events of the contract log."""

from __future__ import annotations

from collections import Counter
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from olmo_rl.data.packs import Step
from olmo_rl.training.step import StepResult


def metrics_of(result: StepResult) -> dict[str, float]:
    """Known values by the documented metric names; facts of collection and plan come beside them."""
    totals, sums = result.totals, result.totals.sums
    metrics: dict[str, float | None] = {
        name: value for name, value in sums.items() if name.startswith("loss/")
    }
    metrics |= {
        "grad/norm": result.grad_norm,
        **{f"grad/norm_{part}": norm for part, norm in result.grad_norms.items()},
        **result.update_norms,
        "optim/lr": result.lr,
        "throughput/real_tokens_per_second": sums["count/tokens"] / result.seconds,
        "throughput/padded_tokens_per_second": sums["count/padded_tokens"] / result.seconds,
        "time/update_s": result.seconds,
        **{f"time/{phase}_s": seconds for phase, seconds in result.phases.items()},
        "memory/peak_allocated_gib": result.peak_gib,
    }
    metrics |= _rank_metrics(result)
    if result.step.plan is not None and result.step.plan.rows is not None:
        metrics |= {
            "throughput/rows_per_second": sums["count/rows"] / result.seconds,
            "packing/unshared_routes": sums["count/unshared_routes"],
        }
    if "sum/gap" in sums:
        metrics |= {
            "mismatch/mean": totals.mean_gap,
            "mismatch/p99": totals.p99_gap,
            "mismatch/kl": totals.divergence,
            "policy/entropy": totals.entropy,
            "batch/masked_share": masked_share(result.step),
            "loss/max_log_ratio": totals.max_log_ratio,
            "loss/max_ratio": totals.max_ratio,
        }
    if result.lag is not None:
        metrics |= {"rollouts/lag": result.lag[0], "rollouts/max_lag": float(result.lag[1])}
    if sums["replay/rows"] > 0:
        metrics |= {"replay/coverage": route_coverage(result.step), "replay/overlap": totals.overlap}
    if totals.expert_entropies:
        metrics |= {
            "replay/expert_entropy": sum(totals.expert_entropies) / len(totals.expert_entropies),
            "replay/expert_entropy_min": min(totals.expert_entropies),
        }
    return {name: value for name, value in metrics.items() if value is not None}


def _rank_metrics(result: StepResult) -> dict[str, float | None]:
    """How unlike ranks are, where there are several: when they began the update, and their CPU seconds."""
    began, busy = result.totals.began, result.totals.busy
    if len(began) < 2:
        return {}
    return {
        "ranks/start_skew_s": max(began) - min(began),
        "ranks/last_to_start": float(began.index(max(began))),
        "ranks/busiest_over_mean": max(busy) / (sum(busy) / len(busy)) if sum(busy) > 0 else None,
        "ranks/busiest": float(busy.index(max(busy))),
    }


def events_of(result: StepResult, *, rank: int = 0) -> dict[str, dict[str, Any]]:
    """Values of the contract log by event. Rank 0 has the clocks of all ranks too."""
    step, totals, sums = result.step, result.totals, result.totals.sums
    versions = Counter(sample.policy_version for sample in step.samples)
    events: dict[str, dict[str, Any]] = {"packing": _packing(step)}
    events["scoring"] = {
        "decision": result.decision.value,
        "mean_abs": totals.mean_drift,
        "max_abs": None if totals.mean_drift is None else totals.max_drift,
    }
    events["replay"] = {
        "rows": int(sums["replay/rows"]),
        "mismatches": int(sums["replay/mismatches"]),
        "coverage": route_coverage(step),
        "overlap": totals.overlap,
        "expert_entropy": list(totals.expert_entropies),
    }
    events["optimizer"] = {
        "terms": {name: value for name, value in sums.items() if name.startswith("loss/")},
        "max_log_ratio": totals.max_log_ratio,
        "max_ratio": totals.max_ratio,
        "grad_norm": result.grad_norm,
        "lr": result.lr,
        "policy_versions": [min(versions), max(versions)],
        "samples_by_version": {str(version): count for version, count in sorted(versions.items())},
        "reference": result.reference,
        "local_scored_tokens": sum(int(pack["loss_mask"].sum()) for pack in step.packs),
        "global_scored_tokens": step.normalisers.tokens,
        "global_responses": step.normalisers.responses,
        "scoring": result.decision.value,
        "grad_norms": result.grad_norms,
        "stepped": result.stepped,
    }
    if rank == 0 and "sum/gap" in sums:
        counts = enumerate(totals.gap_counts)
        events["mismatch"] = {"counts": [[edge, count] for edge, count in counts if count]}
    clocks = {"began": list(totals.began), "busy": list(totals.busy)} if rank == 0 else {}
    events["time"] = {"update_s": result.seconds, "seconds": _seconds(result), **clocks}
    return events | _balance_events(result)


def warn_of_mismatch(result: StepResult, *, update: int) -> None:
    """One line on rank 0 where the dispatcher counted something else than was planned."""
    balance = result.totals.balance
    if balance is not None and not balance["equal"]:
        rank_zero_warn(
            f"update {update}: {balance['mismatch']} expert loads differ from the plan, first "
            f"{balance['where'][0]}: routes changed after planning"
        )


def _packing(step: Step) -> dict[str, Any]:
    real = [pack.real_tokens for pack in step.packs]
    samples = {sample.id: sample for sample in step.samples}
    numbers = {group: number for number, group in enumerate(dict.fromkeys(s.group for s in step.samples))}
    filled = real if step.plan is None or step.plan.rows is None else [pack.real_rows for pack in step.packs]
    return {
        "samples": sum(len(pack.ids) for pack in step.packs),
        "packs": len(step.packs),
        "real_tokens": sum(real),
        "padded_tokens": sum(pack.num_rows for pack in step.packs),
        "max_pack_tokens": max(filled),
        "token_budget": step.budget,
        "fill": sum(filled) / (len(step.packs) * step.budget),
        "samples_per_pack": [len(pack.ids) for pack in step.packs],
        "sample_ids": [list(pack.ids) for pack in step.packs],
        "lengths": [[len(samples[id]) for id in pack.ids] for pack in step.packs],
        "groups": [[numbers[samples[id].group] for id in pack.ids] for pack in step.packs],
        "rows": [pack.num_rows for pack in step.packs],
        "plan": "planned" if step.schedule is None else step.schedule.origin,
    }


def _balance_events(result: StepResult) -> dict[str, dict[str, Any]]:
    schedule, balance = result.step.schedule, result.totals.balance
    events: dict[str, dict[str, Any]] = {}
    if schedule is not None and (schedule.plan.search is not None or schedule.plan.lending is not None):
        events["expert_schedule"] = schedule.event(ids=[sample.id for sample in result.step.samples])
    if schedule is not None and balance is not None:
        shares = schedule.plan.rows is not None  # then work by samples is not work by rows
        events["expert_balance"] = balance | {
            "token_work": None if shares else schedule.after.token_work,
            "pair_work": None if shares else schedule.after.pair_work,
            "columns": schedule.after.packs_per_rank,
            "update_s": result.seconds,
        }
    return events


def route_coverage(step: Step) -> float:
    """Share of rows that need a recorded route and have one (every document's tail is synthetic and not
    counted).
    """
    needed = sum(len(sample) - 1 for sample in step.samples)
    have = sum(0 if sample.routes is None else len(sample.routes) for sample in step.samples)
    return have / needed if needed else 1.0


def masked_share(step: Step) -> float | None:
    """Share of the generated tokens of a step that enter no loss; None where nothing was generated."""
    generated = sum(int(sample.response_mask.sum()) for sample in step.samples)
    return 1 - step.normalisers.tokens / generated if generated else None


def _seconds(result: StepResult) -> dict[str, float]:
    """This rank's seconds by phase, with those before the update that belong to its row."""
    facts = result.step.facts
    before = {
        "rollout": facts.get("time/rollout_s", 0.0),
        "plan": facts.get("time/plan_ms", 0.0) / 1000,
        "collate": facts.get("time/collate_s", 0.0),
    }
    return {name: seconds for name, seconds in (before | result.phases).items() if seconds > 0}
