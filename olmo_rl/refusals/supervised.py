"""Refusals of supervised fine-tuning: keys of chat data where there is none to read."""

from __future__ import annotations

from olmo_rl.config import Config, Recipe, SftFormat
from olmo_rl.refusals.rule import Rule, changed, under


def _reads_datasets(config: Config) -> bool:
    return config.sft.format is SftFormat.datasets


SFT = (
    Rule(
        keys=("sft.path", "recipe"),
        refuses="no effect: chat data are what supervised fine-tuning trains on",
        fix="set recipe=sft, or leave sft.path=null",
        example=("sft.path=chat.jsonl",),
        when=lambda c: c.sft.path is not None and c.recipe not in (Recipe.sft, Recipe.validate),
    ),
    Rule(
        keys=under("sft", "format epochs shuffle_buffer overlong eval_path"),
        refuses="no effect without sft.path: a task's demonstrations are drawn without end",
        fix="name the data with sft.path, or leave it at its default",
        example=("sft.epochs=2", "sft.overlong=drop"),
        when=lambda c: c.sft.path is None,
        select=changed,
    ),
    Rule(
        keys=under("sft", "subset split"),
        refuses="no effect without sft.format=datasets",
        fix="set sft.format=datasets, or leave it at its default",
        example=("recipe=sft", "warm_start.steps=0", "sft.path=chat.jsonl", "sft.split=test"),
        when=lambda c: not _reads_datasets(c),
        select=changed,
    ),
    Rule(
        keys=under("sft", "eval_split"),
        refuses="no effect without sft.format=datasets and sft.eval_path",
        fix="leave sft.eval_split=validation",
        example=("recipe=sft", "sft.path=chat", "sft.eval_split=test"),
        when=lambda c: not _reads_datasets(c) or c.sft.eval_path is None,
        select=changed,
    ),
    Rule(
        keys=under("sft", "eval_samples eval_interval"),
        refuses="no effect without sft.eval_path",
        fix="name held-out conversations with sft.eval_path, or leave it at its default",
        example=("recipe=sft", "sft.path=chat.jsonl", "sft.eval_interval=5"),
        when=lambda c: c.sft.eval_path is None,
        select=changed,
    ),
)
