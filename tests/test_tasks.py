"""Problems, held-out splits, verifiers and tokenizers."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from olmo_rl.config import Config, EvaluationConfig, TaskConfig, TaskKind
from olmo_rl.data.tokenizers import ByteTokenizer, load_tokenizer
from olmo_rl.tasks.gym import SEVERAL_ANSWERS
from olmo_rl.tasks.held_out import held_out_sets
from olmo_rl.tasks.kinds import build_task
from olmo_rl.tasks.problems import Problem, is_held_out
from olmo_rl.tasks.prompting import task_of
from olmo_rl.tasks.rewards import resolve_reward
from olmo_rl.types import Refusal
from olmo_rl.user_code import load


def gym(name: str, *, eval_problems: int = 20, **parameters: Any) -> TaskConfig:
    return TaskConfig(
        kind=TaskKind.reasoning_gym, name=name, parameters=parameters, eval_problems=eval_problems
    )


def write_lines(path: Path, *lines: object) -> str:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return str(path)


def capitals(path: Path, *, count: int = 60) -> str:
    return write_lines(path, *({"prompt": f"question {i}?", "answer": f"answer {i}"} for i in range(count)))


def jsonl(path: str, *, verifier: dict[str, Any] | None = None) -> TaskConfig:
    return TaskConfig(kind=TaskKind.jsonl, path=path, verifier=verifier)


# Verifiers that configurations of these tests name.


def prefix_share(response: str, answer: str, *, scale: float = 1.0) -> float:
    return scale * len(os.path.commonprefix([response, answer])) / len(answer)


def cannot_judge(response: str, answer: str) -> float:
    return math.nan


def endless(response: str, answer: str) -> float:
    return math.inf


def wordy(response: str, answer: str) -> str:
    return "good"


def failing(response: str, answer: str) -> float:
    raise KeyError(response)


def test_sums_have_two_digits_a_side_and_right_answers() -> None:
    task = build_task(TaskConfig(), seed=0)
    problems = task.problems(500, seed=1)
    for problem in problems:
        a, b = problem.prompt.removesuffix("=").split("+")
        assert len(a) == len(b) == 2
        assert int(a) + int(b) == int(problem.answer)
    assert task.reward(Problem(id="x", prompt="12+34=", reference="46"), "46") == 1.0


@pytest.mark.parametrize(
    ("response", "worth"),
    [("46", 1.0), (" 46\n", 1.0), ("6", 0.0), ("146", 0.0), ("4 6", 0.0), ("046", 0.0), ("", 0.0)],
)
def test_only_the_exact_sum_is_rewarded(response: str, worth: float) -> None:
    task = build_task(TaskConfig(), seed=0)
    assert task.reward(Problem(id="12+34", prompt="12+34=", reference="46"), response) == worth


def test_training_sums_differ_until_they_run_out_and_are_never_held_out() -> None:
    task = build_task(TaskConfig(), seed=3)
    held_out = {problem.prompt for problem in task.held_out(200)}
    assert len(held_out) == 200
    everything = task.problems(9000, seed=0)
    assert len(everything) == 9000
    different = {problem.prompt for problem in everything}
    assert 0.88 < len(different) / 8100 < 0.92
    assert len({problem.prompt for problem in everything[: len(different)]}) == len(different)
    assert not different & held_out
    # Nor is a held-out pair trained in the other order.
    assert not different & {"{1}+{0}=".format(*prompt.removesuffix("=").split("+")) for prompt in held_out}


def test_draws_follow_both_seeds_and_held_out_problems_neither() -> None:
    first, again, other = (build_task(TaskConfig(), seed=seed) for seed in (0, 0, 1))
    assert first.problems(32, seed=5) == again.problems(32, seed=5)
    assert first.problems(32, seed=5) != first.problems(32, seed=6)
    assert first.problems(32, seed=5) != other.problems(32, seed=5)
    assert first.held_out(50) == other.held_out(50)
    assert first.held_out(10) == first.held_out(50)[:10]


def test_longer_sums_are_sampled() -> None:
    task = build_task(TaskConfig(parameters={"digits": 5}), seed=0)
    problems = task.problems(300, seed=0)
    assert len({problem.prompt for problem in problems}) == 300
    assert all(len(problem.prompt) == 12 for problem in problems)
    assert not {p.prompt for p in problems} & {p.prompt for p in task.held_out(200)}


def test_more_held_out_sums_than_there_are_is_refused_with_the_number() -> None:
    with pytest.raises(Refusal, match=r"task.eval_problems=2000: .* has (6|7|8)\d\d held-out problems"):
        build_task(TaskConfig(), seed=0).held_out(2000)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"digit": 2}, "unknown 'digit', .* 'digits'"),
        ({"digits": 0}, "digits=0"),
        ({"digits": True}, "digits=True"),
        ({"digits": "2"}, "digits='2'"),
    ],
)
def test_wrong_parameters_of_sums_are_refused(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(Refusal, match=message):
        build_task(TaskConfig(parameters=parameters), seed=0)


def test_a_dataset_of_reasoning_gym_is_rewarded_by_exact_answer() -> None:
    task = build_task(gym("chain_sum", max_terms=2, max_digits=1), seed=0)
    problem = task.problems(1, seed=0)[0]
    assert problem.prompt.endswith("\n")
    for response, worth in (
        (problem.answer, 1.0),
        (f" {problem.answer}\n", 1.0),
        (f"I think <answer>7777</answer>, no <answer> {problem.answer} </answer>", 1.0),
        # The dataset's own score gives these a share.
        (f"{problem.answer}3", 0.0),
        (f"1{problem.answer}", 0.0),
        (f"the answer is {problem.answer}", 0.0),
        ("", 0.0),
    ):
        assert task.reward(problem, response) == worth, response


@pytest.mark.parametrize("name", ["coin_flip", "game_of_life_halting", "number_format", "chain_sum"])
def test_near_answers_that_a_dataset_scores_in_full_are_wrong(name: str) -> None:
    task = build_task(gym(name, eval_problems=0), seed=0)
    for problem in task.problems(3, seed=0):
        assert task.reward(problem, problem.answer) == 1.0
        for near in (problem.answer[:-1], f"{problem.answer}.", f"{problem.answer}0"):
            assert task.reward(problem, near) == 0.0


def test_the_list_of_datasets_with_several_answers_names_datasets_and_holds_all_without_an_answer() -> None:
    factory = pytest.importorskip("reasoning_gym.factory")
    assert set(factory.DATASETS) >= SEVERAL_ANSWERS
    for name in ("boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"):
        problem = build_task(gym(name, eval_problems=0), seed=0).problems(1, seed=0)[0]
        assert problem.reference is None
        assert name in SEVERAL_ANSWERS


def test_datasets_with_several_right_answers_accept_each_and_give_no_partial_credit() -> None:
    task = build_task(
        gym("countdown", min_numbers=3, max_numbers=3, operators=["+"], eval_problems=2), seed=0
    )
    problem = task.problems(1, seed=0)[0]
    terms = problem.answer.split(" + ")
    assert task.reward(problem, " + ".join(reversed(terms))) == 1.0
    assert task.reward(problem, " + ".join(terms[:2])) == 0.0
    assert task.reward(problem, "1 + (") == 0.0


@pytest.mark.parametrize(
    "response",
    ["9**9**9**9", "9^(9^9)", "99999999!", "__import__('os').getpid()", "open('x', 'w')", "2**99999999"],
)
def test_text_that_would_run_for_ever_or_do_harm_is_a_wrong_answer(response: str) -> None:
    task = build_task(gym("countdown", eval_problems=0), seed=0)
    assert task.reward(task.problems(1, seed=0)[0], response) == 0.0


def test_a_dataset_without_reference_answers_is_verified_but_cannot_demonstrate() -> None:
    task = build_task(gym("propositional_logic", eval_problems=2), seed=0)
    problem = task.problems(1, seed=0)[0]
    assert task.reward(problem, "") == 0.0
    assert problem.entry is not None
    assert task.reward(problem, problem.entry["metadata"]["example_answer"]) == 1.0
    with pytest.raises(Refusal, match=f"problem {problem.id}: .*warm_start.steps=0"):
        assert problem.answer


def test_training_questions_of_a_small_dataset_never_meet_held_out_ones() -> None:
    config = gym("chain_sum", eval_problems=40, min_terms=2, max_terms=2, min_digits=1, max_digits=1)
    held_out: set[str] = set()
    for seed in range(3):
        task = build_task(config, seed=seed)
        prompts = {problem.prompt for problem in task.held_out(40)}
        assert len(prompts) == 40
        assert not held_out or prompts == held_out
        held_out = prompts
        training = task.problems(150, seed=seed)
        assert len(training) == 150
        assert not {problem.prompt for problem in training} & prompts
    assert build_task(config, seed=0).problems(8, seed=1) == build_task(config, seed=0).problems(8, seed=1)


def test_an_unknown_dataset_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(
        Refusal, match="task.name: unknown 'chain_sums', the nearest known name is 'chain_sum'"
    ):
        build_task(gym("chain_sums"), seed=0)


def test_wrong_dataset_parameters_are_refused() -> None:
    with pytest.raises(Refusal, match="task.parameters of chain_sum: unknown 'max_term', .* 'max_terms'"):
        build_task(gym("chain_sum", max_term=2), seed=0)
    with pytest.raises(Refusal, match="task.parameters of chain_sum: unknown 'seed'"):
        build_task(gym("chain_sum", seed=2), seed=0)
    with pytest.raises(Refusal, match="task.parameters of chain_sum: .*terms"):
        build_task(gym("chain_sum", min_terms=5, max_terms=2), seed=0)


def test_composite_datasets_are_described_by_plain_values() -> None:
    rows = [{"name": name, "weight": 1.0, "config": {}} for name in ("chain_sum", "spell_backward")]
    task = build_task(gym("composite", eval_problems=4, datasets=rows), seed=0)
    problems = task.problems(12, seed=0)
    assert all(task.reward(problem, problem.answer) == 1.0 for problem in problems)


def test_an_exhausted_dataset_is_refused() -> None:
    config = gym("chain_sum", eval_problems=500, min_terms=2, max_terms=2, min_digits=1, max_digits=1)
    with pytest.raises(Refusal, match="task.eval_problems=500: task.name=chain_sum has .* held-out"):
        build_task(config, seed=0).held_out(500)
    with pytest.raises(Refusal, match="no problem is left for training"):
        build_task(config, seed=0).problems(1, seed=0)


def test_lines_are_split_by_a_stable_hash_of_the_prompt(tmp_path: Path) -> None:
    task = build_task(jsonl(capitals(tmp_path / "p.jsonl")), seed=0)
    reserved = [f"question {i}?" for i in range(60) if is_held_out(f"question {i}?")]
    assert 0 < len(reserved) < 20
    assert [problem.prompt for problem in task.held_out(len(reserved))] == reserved
    training = task.problems(60 - len(reserved), seed=0)
    assert {problem.prompt for problem in training} == {f"question {i}?" for i in range(60)} - set(reserved)
    # Beyond that they start over, in another order.
    twice = task.problems(2 * len(training), seed=0)
    assert twice[: len(training)] == training
    assert sorted(p.id for p in twice[len(training) :]) == sorted(p.id for p in training)
    with pytest.raises(Refusal, match="task.eval_problems=200"):
        task.held_out(200)


def test_the_split_does_not_depend_on_the_process() -> None:
    code = (
        "from olmo_rl.tasks.problems import is_held_out; print([i for i in range(99) if is_held_out(str(i))])"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).parent.parent,
        ).stdout
        for seed in ("1", "2")
    }
    assert runs == {f"{[i for i in range(99) if is_held_out(str(i))]}\n"}


def test_lines_are_judged_by_exact_match_unless_a_verifier_is_named(tmp_path: Path) -> None:
    path = capitals(tmp_path / "p.jsonl")
    task = build_task(jsonl(path), seed=0)
    problem = task.problems(1, seed=0)[0]
    assert task.reward(problem, f" {problem.answer}\n") == 1.0
    assert task.reward(problem, problem.answer.upper()) == 0.0
    judged = build_task(jsonl(path, verifier={"_target_": f"{__name__}.prefix_share", "scale": 2.0}), seed=0)
    half = problem.answer[: len(problem.answer) // 2]
    assert judged.reward(problem, half) == pytest.approx(2.0 * len(half) / len(problem.answer))


def test_a_verifier_may_say_that_it_cannot_judge(tmp_path: Path) -> None:
    config = jsonl(capitals(tmp_path / "p.jsonl"), verifier={"_target_": f"{__name__}.cannot_judge"})
    task = build_task(config, seed=0)
    assert math.isnan(task.reward(task.problems(1, seed=0)[0], "x"))


@pytest.mark.parametrize(("name", "shown"), [("endless", "inf"), ("wordy", "'good'")])
def test_a_reward_that_is_no_finite_number_is_refused_by_problem(
    tmp_path: Path, name: str, shown: str
) -> None:
    task = build_task(
        jsonl(capitals(tmp_path / "p.jsonl"), verifier={"_target_": f"{__name__}.{name}"}), seed=0
    )
    problem = task.problems(1, seed=0)[0]
    with pytest.raises(Refusal, match=f"line {problem.id.removeprefix('line-')}: it returned {shown}"):
        task.reward(problem, "x")


def test_an_exception_in_a_verifier_is_not_hidden_and_names_the_problem(tmp_path: Path) -> None:
    task = build_task(
        jsonl(capitals(tmp_path / "p.jsonl"), verifier={"_target_": f"{__name__}.failing"}), seed=0
    )
    problem = task.problems(1, seed=0)[0]
    with pytest.raises(Refusal, match=f"line {problem.id.removeprefix('line-')}: KeyError: 'x'"):
        task.reward(problem, "x")


def leaving(response: str, answer: str, *, code: int) -> float:
    raise SystemExit(code)


@pytest.mark.parametrize("code", [0, 3])
def test_a_verifier_that_ends_the_process_has_failed_by_name(tmp_path: Path, code: int) -> None:
    verifier = {"_target_": f"{__name__}.leaving", "code": code}
    task = build_task(jsonl(capitals(tmp_path / "p.jsonl"), verifier=verifier), seed=0)
    problem = task.problems(1, seed=0)[0]
    reported = rf"line {problem.id.removeprefix('line-')}: it called sys.exit\({code}\)"
    with pytest.raises(Refusal, match=reported):
        task.reward(problem, "x")


@pytest.mark.parametrize(
    ("verifier", "message"),
    [
        ({"target": "a.b"}, "_target_: package.function"),
        ({"_target_": "function"}, "_target_: package.function"),
        ({"_target_": "no_such_package.function"}, "_target_=no_such_package.function: .*No module"),
        ({"_target_": "math.no_such_function"}, "no_such_function"),
        ({"_target_": f"{__name__}.prefix_share", "scales": 1}, "unexpected keyword argument 'scales'"),
    ],
)
def test_a_verifier_that_cannot_be_called_is_refused(
    tmp_path: Path, verifier: dict[str, Any], message: str
) -> None:
    with pytest.raises(Refusal, match=message):
        build_task(jsonl(capitals(tmp_path / "p.jsonl"), verifier=verifier), seed=0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def judge(response, answer:\n", r"SyntaxError: .*: correct .*ending_early\.py, line 1$"),
        ("x = 1\ny = z\n", r"NameError: name 'z' is not defined\): correct .*ending_early\.py, line 2$"),
        ("import sys\nsys.exit(0)\n", r"SystemExit: 0\): correct .*ending_early\.py, line 2$"),
        ("from builtins import max as judge\n", "no signature found for builtin"),
    ],
)
def test_a_module_that_fails_or_ends_at_its_import_is_refused_with_the_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    (tmp_path / "ending_early.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "ending_early", raising=False)
    with pytest.raises(Refusal, match=message):
        resolve_reward({"_target_": "ending_early.judge"}, key="task.verifier")
    sys.modules.pop("ending_early", None)
    if "builtin" not in message:
        with pytest.raises(Refusal, match=message):
            load("ending_early:judge", key="loss.function", takes="a function")


def test_a_verifier_of_a_domain_that_no_line_has_is_refused(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "p.jsonl", {"prompt": "a", "answer": "b", "domain": "math"}, {"prompt": "c", "answer": "d"}
    )
    verifiers = {"maths": {"_target_": f"{__name__}.prefix_share"}}
    with pytest.raises(Refusal, match="task.verifiers.maths: no effect, .*: lines have 'math'$"):
        build_task(TaskConfig(kind=TaskKind.jsonl, path=path, verifiers=verifiers), seed=0)


@pytest.mark.parametrize("mixed", [False, True])
def test_training_leaves_out_every_held_out_set_of_its_dataset(mixed: bool) -> None:
    small = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    entry = {"kind": "reasoning_gym", "name": "chain_sum", "parameters": small}
    own = TaskConfig(kind=TaskKind.mixed, mix={"sums": entry}, eval_problems=10)
    config = Config(
        task=own if mixed else gym("chain_sum", eval_problems=10, **small),
        evaluation=EvaluationConfig(
            sets={"large": entry | {"problems": 60}, "small": entry | {"problems": 20}}
        ),
    )
    task = task_of(config, tokenizer=ByteTokenizer())
    training = {problem.prompt for problem in task.problems(150, seed=0)}
    sets = held_out_sets(config, own=task, tokenizer=ByteTokenizer())
    assert [len(one.problems) for one in sets] == [10, 60, 20]
    for one in sets:
        assert not training & {problem.prompt for problem in one.problems}, one.name


def test_every_malformed_line_is_named(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "p.jsonl",
        {"prompt": "a", "answer": "b", "source": "kept aside"},
        "{not json",
        "",
        [1],
        {"prompt": "a"},
        {"prompt": "a", "answer": 4},
        {"prompt": "", "answer": "b"},
    )
    with pytest.raises(Refusal) as caught:
        build_task(jsonl(path), seed=0)
    reasons = caught.value.reasons
    assert [reason.split(":")[0] for reason in reasons] == [f"{path}, line {n}" for n in (2, 4, 5, 6, 7)]
    for reason, part in zip(
        reasons, ("not JSON", "not an object", "'answer' is missing", "quote it", "empty"), strict=True
    ):
        assert part in reason


def test_lines_that_no_parser_or_tokenizer_takes_are_named(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "p.jsonl",
        {"prompt": "a\ud800", "answer": "b"},
        {"prompt": "a", "answer": "b"},
        "[" * 200_000,
        {"prompt": "a", "answer": "\udfff"},
    )
    with pytest.raises(Refusal) as caught:
        build_task(jsonl(path), seed=0)
    first, second, third = caught.value.reasons
    assert first.startswith(
        f"{path}, line 1: 'prompt' holds half of a surrogate pair (\\ud800) at character 1"
    )
    assert second.startswith(f"{path}, line 3: nested too deeply")
    assert third.startswith(f"{path}, line 4: 'answer' holds half of a surrogate pair (\\udfff)")


def test_bytes_that_are_no_text_are_named_by_line(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt": "a", "answer": "b"}\n{"prompt": "\xff", "answer": "b"}\n')
    with pytest.raises(Refusal, match="line 2"):
        build_task(jsonl(str(path)), seed=0)


def test_missing_and_empty_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="no such file"):
        build_task(jsonl(str(tmp_path / "nowhere.jsonl")), seed=0)
    with pytest.raises(Refusal, match="no problem in it"):
        build_task(jsonl(write_lines(tmp_path / "empty.jsonl")), seed=0)


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_bytes_decode_to_the_text_they_encode(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert all(0 <= i < 256 for i in ids)
    assert tokenizer.decode(ids) == text


def test_cut_characters_and_unknown_ids_decode_to_replacements_and_special_ids_to_nothing() -> None:
    tokenizer = ByteTokenizer()
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (
        256,
        257,
        258,
        259,
    )
    assert tokenizer.decode([257, *"aé".encode()[:2], 258, 256]) == "a\ufffd"
    assert tokenizer.decode([65, 300, 66]) == "A\ufffdB"
    assert load_tokenizer("bytes") == tokenizer


def save_hf_tokenizer(path: Path, *, eos: str | None) -> str:
    tokenizers = pytest.importorskip("tokenizers", reason="needs the hf extra")
    transformers = pytest.importorskip("transformers", reason="needs the hf extra")
    vocabulary = {"<eos>": 0, "1": 1, "2": 2, "+": 3, "<unk>": 4}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    model.decoder = tokenizers.decoders.Fuse()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=model, eos_token=eos, unk_token="<unk>"
    ).save_pretrained(path)
    return str(path)


def test_hugging_face_tokenizers_stand_behind_the_same_calls(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save_hf_tokenizer(tmp_path, eos="<eos>"))
    ids = tokenizer.encode("1+2")
    assert ids == [1, 3, 2]
    assert tokenizer.decode([*ids, tokenizer.eos_id]) == "1+2"
    assert (tokenizer.eos_id, tokenizer.vocab_size) == (0, 5)


def test_tokenizers_that_cannot_serve_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="no end-of-sequence token"):
        load_tokenizer(save_hf_tokenizer(tmp_path / "endless", eos=None))
    path = Path(save_hf_tokenizer(tmp_path / "remote", eos="<eos>")) / "tokenizer_config.json"
    named = {"auto_map": {"AutoTokenizer": ["code.Tokenizer", None]}}
    path.write_text(json.dumps(json.loads(path.read_text()) | named))
    (path.parent / "code.py").write_text("raise SystemExit('code of a model ran')")
    with pytest.raises(Refusal, match=r"remote: tokenizer_config\.json has auto_map=.*code\.Tokenizer"):
        load_tokenizer(str(path.parent))
    (tmp_path / "empty").mkdir()
    with pytest.raises(Refusal, match=r"model\.tokenizer=.*empty"):
        load_tokenizer(str(tmp_path / "empty"))


def test_tasks_and_advantages_import_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import olmo_rl.data.advantages\n"
        "from olmo_rl.config import TaskConfig\n"
        "from olmo_rl.tasks.kinds import build_task\n"
        "print(build_task(TaskConfig(), seed=0).problems(1, seed=0)[0].prompt)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent.parent)
