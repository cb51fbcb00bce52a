"""Writes trajectories and results of trials with the classes of Harbor.

    pip download --no-deps --only-binary=:all: --python-version 3.12 harbor==0.26.0
    python3.12 -m venv v && v/bin/pip install pydantic toml packaging pyyaml dirhash pathspec shortuuid semver
    v/bin/python tests/importer_dumps/atif.py harbor-0.26.0-py3-none-any.whl tests/importer_dumps/atif

Harbor's own models validate and serialise everything, as its agents and trials do. Tokens of a turn are
numbered so that a value in a wrong place shows. `SOURCE.json` has the version and the sha256 of the wheel.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

WHEEL, OUTPUT = Path(sys.argv[1]), Path(sys.argv[2])
sys.path.insert(0, str(WHEEL))

from harbor.models.agent.context import AgentContext  # noqa: E402
from harbor.models.task.id import LocalTaskId  # noqa: E402
from harbor.models.trajectories import (  # noqa: E402
    Agent,
    ContentPart,
    FinalMetrics,
    ImageSource,
    Metrics,
    Observation,
    ObservationResult,
    Step,
    SubagentTrajectoryRef,
    ToolCall,
    Trajectory,
)
from harbor.models.trial.config import AgentConfig, TaskConfig, TrialConfig  # noqa: E402
from harbor.models.trial.result import (  # noqa: E402
    AgentInfo,
    ExceptionInfo,
    StepResult,
    TrialResult,
)
from harbor.models.verifier.result import VerifierResult  # noqa: E402

PROMPT = [5, 6, 7]
ANSWER = [10, 11]
RESULT = [20, 21, 22]
SECOND = [12, 13, 14]


def agent(**extra: Any) -> Agent:
    return Agent(name="terminus-2", version="2.0.0", model_name="hosted/policy", extra=extra or None)


def metrics(prompt: list[int], completion: list[int], *, extra: dict[str, Any] | None = None) -> Metrics:
    return Metrics(
        prompt_tokens=len(prompt),
        completion_tokens=len(completion),
        prompt_token_ids=prompt,
        completion_token_ids=completion,
        logprobs=[-0.25 * (i + 1) for i in range(len(completion))],
        extra=extra,
    )


def user(message: Any = "Count.") -> dict[str, Any]:
    return {"source": "user", "message": message}


def call(given: Metrics | None, *, content: str | None = "two", **fields: Any) -> dict[str, Any]:
    results = [ObservationResult(source_call_id="c1", content=content)]
    return {
        "source": "agent",
        "message": "Looking.",
        "tool_calls": [ToolCall(tool_call_id="c1", function_name="ls", arguments={"path": "."})],
        "observation": Observation(results=results),
        "metrics": given,
    } | fields


def final(given: Metrics | None, **fields: Any) -> dict[str, Any]:
    return {"source": "agent", "message": "Done.", "metrics": given} | fields


def trajectory(steps: list[dict[str, Any]], **fields: Any) -> Trajectory:
    numbered = [Step(step_id=i, **step) for i, step in enumerate(steps, start=1)]
    values = {"schema_version": "ATIF-v1.7", "agent": agent(temperature=1.0), "session_id": "s"}
    return Trajectory(steps=numbered, final_metrics=FinalMetrics(total_steps=len(steps)), **(values | fields))


def two_turns(**extra: Any) -> list[dict[str, Any]]:
    """A tool's answer lies between two completions; the second prompt continues all tokens."""
    history = PROMPT + ANSWER + RESULT
    return [
        user(),
        call(metrics(PROMPT, ANSWER), llm_call_count=1),
        final(metrics(history, SECOND, extra=extra or None)),
    ]


def rewritten() -> list[dict[str, Any]]:
    """The history is summarised before the third call; a copied and a deterministic step stand between."""
    return [
        user(),
        call(metrics(PROMPT, ANSWER)),
        {"source": "system", "message": "Summarised."},
        final(None, is_copied_context=True),
        call(None, llm_call_count=0),
        final(metrics([5, 40, 41], [15])),
    ]


def delegated() -> Trajectory:
    """A main agent with one subagent of its model and one of another, both embedded."""
    refs = [SubagentTrajectoryRef(trajectory_id=name) for name in ("sub-1", "judge")]
    steps = two_turns()
    steps[1]["observation"] = Observation(results=[ObservationResult(subagent_trajectory_ref=refs)])
    other = Agent(name="judge", version="1", model_name="hosted/other")
    return trajectory(
        steps,
        trajectory_id="main",
        subagent_trajectories=[
            trajectory([user("Help."), final(metrics([8, 9], [16, 17]))], trajectory_id="sub-1"),
            trajectory([user("Judge."), final(None)], trajectory_id="judge", agent=other),
        ],
    )


def result(task: str, trial: str, *, rewards: dict[str, Any] | None, **fields: Any) -> TrialResult:
    path = Path("tasks") / task
    return TrialResult(
        task_name=task,
        trial_name=trial,
        trial_uri=f"file:///jobs/{trial}",
        task_id=LocalTaskId(path=path),
        task_checksum="0" * 64,
        config=TrialConfig(
            task=TaskConfig(path=path), trial_name=trial, agent=AgentConfig(name="terminus-2")
        ),
        agent_info=AgentInfo(name="terminus-2", version="2.0.0"),
        agent_result=AgentContext(n_input_tokens=3),
        verifier_result=None if rewards is None else VerifierResult(rewards=rewards),
        id="00000000-0000-0000-0000-000000000001",
        **fields,
    )


def exception(name: str) -> ExceptionInfo:
    return ExceptionInfo(
        exception_type=name,
        exception_message="over",
        exception_traceback="",
        occurred_at="2026-01-01T00:00:00",
    )


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def dump(path: Path, document: Trajectory) -> None:
    write(path, json.dumps(document.to_json_dict(), indent=1))


def main() -> None:
    job = OUTPUT / "job"
    write(job / "result.json", json.dumps({"id": "job", "stats": {}}))
    trials = {
        "count__a": ("count", trajectory(two_turns()), {"reward": 1.0}, {}),
        "count__b": ("count", trajectory(rewritten()), {"reward": 0.0}, {}),
        "sum__a": ("sum", delegated(), {"reward": 0.5}, {}),
        "sum__b": ("sum", trajectory(two_turns()), None, {"exception_info": exception("AgentTimeoutError")}),
    }
    for trial, (task, document, rewards, fields) in trials.items():
        dump(job / trial / "agent" / "trajectory.json", document)
        found = result(task, trial, rewards=rewards, **fields)
        write(job / trial / "result.json", found.model_dump_json(indent=1))
    steps = OUTPUT / "steps"
    judged = [
        StepResult(step_name=n, verifier_result=VerifierResult(rewards={"r": i})) for i, n in enumerate("xy")
    ]
    for name in "xy":
        dump(steps / "t" / "steps" / name / "agent" / "trajectory.json", trajectory(two_turns()))
    found = result("stepped", "t", rewards={"reward": 1.0}, step_results=judged)
    write(steps / "t" / "result.json", found.model_dump_json(indent=1))
    own = {"reward": {"exact": 1, "style": 0.5}, "group_id": "g", "policy_version": 3}
    dump(OUTPUT / "alone.json", trajectory(two_turns(), extra=own))
    routes = [[[t % 8, (t + 1) % 8], [(t + 2) % 8, (t + 4) % 8]] for t in range(10)]
    first = [[[t % 8, (t + 1) % 8], [(t + 2) % 8, (t + 4) % 8]] for t in range(4)]
    routed = two_turns(routed_experts=routes)
    routed[1]["metrics"].extra = {"routed_experts": first}
    dump(OUTPUT / "routed.json", trajectory(routed, extra=own))
    image = ContentPart(type="image", source=ImageSource(media_type="image/png", path="a.png"))
    seen = two_turns()
    seen[0]["message"] = [ContentPart(type="text", text="Look."), image]
    dump(OUTPUT / "image.json", trajectory(seen, extra=own))
    dump(OUTPUT / "text.json", trajectory([user(), final(None)], extra=own))
    counted = Metrics(prompt_tokens=3, completion_tokens=2)
    dump(OUTPUT / "counted.json", trajectory([user(), final(counted)], extra=own))
    dump(
        OUTPUT / "several.json",
        trajectory([user(), final(metrics(PROMPT, ANSWER), llm_call_count=2)], extra=own),
    )
    cold = trajectory(two_turns(), agent=agent(temperature=0.5, llm_kwargs={"top_p": 0.9}), extra=own)
    dump(OUTPUT / "cold.json", cold)
    continued = trajectory(two_turns(), continued_trajectory_ref="trajectory.cont-1.json", extra=own)
    dump(OUTPUT / "continued.json", continued)
    lines = [trajectory(two_turns(), extra=own, session_id=f"s{i}").to_json_dict() for i in range(2)]
    write(OUTPUT / "lines.jsonl", "\n".join(map(json.dumps, lines)))
    name, version = WHEEL.name.split("-")[:2]
    source = {
        "package": name,
        "version": version,
        "sha256": hashlib.sha256(WHEEL.read_bytes()).hexdigest(),
        "classes": sorted({c.__name__ for c in (Trajectory, Step, Metrics, TrialResult, VerifierResult)}),
    }
    write(OUTPUT / "SOURCE.json", json.dumps(source, indent=1))


main()
