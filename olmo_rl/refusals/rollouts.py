"""Refusals about where collections come from: files, the local engine, serving engines, and serving one."""

from __future__ import annotations

from olmo_rl.config import Config, PublicationKind, Recipe, Source
from olmo_rl.refusals.rule import Rule, below, changed, outside_from, under


def engines(config: Config) -> bool:
    """Whether collections come from serving engines."""
    return config.rollouts.source in (Source.vllm, Source.sglang)


ROLLOUTS = (
    Rule(
        keys=("rollouts", "rollouts.path"),
        refuses="files to read are not named",
        fix="set rollouts.path to a file, or to a directory with one collection per file",
        example=("rollouts=files",),
        when=lambda c: c.rollouts.source is Source.files and c.rollouts.path is None,
        planning=True,
    ),
    Rule(
        keys=("rollouts", "rollouts.path"),
        refuses="a source that generates reads no files",
        fix="choose rollouts=files, or leave rollouts.path=null",
        example=("rollouts.path=somewhere",),
        when=lambda c: c.generates and c.rollouts.path is not None,
        planning=True,
    ),
    Rule(
        keys=(
            "rollouts.group_size",
            "rollouts.max_new_tokens",
            "rollouts.temperature",
            "rollouts.top_p",
            "rollouts.max_attempts",
        ),
        refuses="no effect with rollouts=files: nothing is generated",
        fix="leave it at its default, or choose rollouts=local",
        example=("rollouts=files", "rollouts.group_size=16"),
        when=lambda c: not c.generates,
        select=changed,
    ),
    Rule(
        keys=("rollouts.collections",),
        refuses="no effect without recipe=rollout: trainer.max_steps ends a run",
        fix="leave it at 1, or set recipe=rollout",
        example=("rollouts.collections=2",),
        when=lambda c: c.recipe not in (Recipe.rollout, Recipe.validate),
        select=changed,
    ),
    Rule(
        keys=("recipe", "rollouts"),
        refuses="recorded collections are there already, nothing is generated",
        fix="choose rollouts=local",
        example=("recipe=rollout", "rollouts=files"),
        when=lambda c: c.recipe is Recipe.rollout and not c.generates,
    ),
    Rule(
        keys=("recipe", "rollouts"),
        refuses="only recorded samples can be scored",
        fix="choose rollouts=files",
        example=("recipe=score",),
        when=lambda c: c.recipe is Recipe.score and c.generates,
    ),
    Rule(
        keys=("rollouts", "rollouts.urls"),
        refuses="engines to ask are not named",
        fix="give their addresses: rollouts.urls=[http://host:8000]",
        example=("rollouts=vllm",),
        when=lambda c: engines(c) and not c.rollouts.urls,
    ),
    Rule(
        keys=("rollouts.urls",),
        refuses="not addresses of HTTP servers, or the same one twice",
        fix="give http://host:port or https://host:port for each, once",
        example=("rollouts=vllm", "rollouts.urls=[localhost:8000]"),
        when=lambda c: (
            engines(c)
            and (
                not all(url.startswith(("http://", "https://")) for url in c.rollouts.urls)
                or len(set(c.rollouts.urls)) < len(c.rollouts.urls)
            )
        ),
    ),
    Rule(
        keys=under("rollouts", "urls served_model concurrency timeout_seconds retries publication"),
        refuses="no effect: no serving engine is asked",
        fix="leave it at its default, or choose rollouts=vllm or rollouts=sglang",
        example=("rollouts.urls=[http://host:8000]",),
        when=lambda c: not engines(c),
        select=changed,
    ),
    Rule(
        keys=("rollouts.publication", "rollouts"),
        refuses="vLLM takes broadcasts through a communicator of its own, which is not spoken here",
        fix="choose rollouts.publication=directory, or rollouts=sglang",
        example=("rollouts=vllm", "rollouts.urls=[http://host:8000]", "rollouts.publication=collective"),
        when=lambda c: (
            c.rollouts.source is Source.vllm and c.rollouts.publication is PublicationKind.collective
        ),
    ),
    Rule(
        keys=("rollouts.engine_ranks",),
        refuses="no effect: nothing is broadcast to engines",
        fix="leave it at 1, or choose rollouts=sglang rollouts.publication=collective",
        example=("rollouts=sglang", "rollouts.urls=[http://host:30000]", "rollouts.engine_ranks=2"),
        when=lambda c: c.rollouts.publication is PublicationKind.directory,
        select=changed,
    ),
    Rule(
        keys=("rollouts.engine_ranks",),
        refuses="no number of processes",
        fix="give the number of GPUs of one engine, at least 1",
        example=(
            "rollouts=sglang",
            "rollouts.urls=[http://host:30000]",
            "rollouts.publication=collective",
            "rollouts.engine_ranks=0",
        ),
        select=below(1),
    ),
    Rule(
        keys=("serve.host", "serve.port"),
        refuses="no effect without recipe=serve",
        fix="leave it at its default",
        example=("serve.port=9000",),
        when=lambda c: c.recipe is not Recipe.serve,
        select=changed,
    ),
    Rule(
        keys=("serve.port",),
        refuses="no port",
        fix="give 0 (any free one) to 65535",
        example=("recipe=serve", "serve.port=70000"),
        select=outside_from(0, 65536),
    ),
)
