from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tepo.core.errors import InputError
from tepo.tasks import TaskConfig, load_problems, load_task
from tepo.tasks.problem import normalised

DATA = os.environ.get("TEPO_DATA")
shared = pytest.mark.skipif(not DATA, reason="TEPO_DATA does not name the folder of shared data")


def lines(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def rows(count: int) -> list[dict[str, Any]]:
    return [{"question": f"What is {number} + 1?", "answer": str(number + 1)} for number in range(count)]


@shared
@pytest.mark.parametrize(
    ("name", "count", "first", "last"),
    [
        ("benchmarks/gsm8k.jsonl", 1319, "18", "14"),
        ("benchmarks/math500.jsonl", 500, "\\left( 3, \\frac{\\pi}{2} \\right)", "106^\\circ"),
        ("benchmarks/amc23.jsonl", 40, "27", "8"),
        ("benchmarks/aime24.jsonl", 30, "204", "902"),
        ("benchmarks/aime25.jsonl", 30, "70", "240"),
        ("benchmarks/hmmt_2024.jsonl", 30, "29", "\\dfrac{9\\sqrt{410}}{5}"),
        ("benchmarks/minerva_math.jsonl", 272, "1.6", "10.1"),
        ("benchmarks/olympiadbench.jsonl", 675, "2", "11"),
        ("train/gsm8k_train.jsonl", 7473, "72", "50"),
        ("train/math_train.json", 7470, "0", "\\left( \\frac{8}{5}, -\\frac{35}{2} \\right)"),
    ],
)
def test_public_benchmarks_load_with_no_column_configured(name: str, count: int, first: str, last: str) -> None:
    said: list[str] = []
    problems = load_problems(f"{DATA}/{name}", say=said.append)
    assert (len(problems), problems[0].answer, problems[-1].answer) == (count, first, last)
    assert len({problem.id for problem in problems}) == count
    assert all(problem.answer and problem.question for problem in problems)
    assert "(guessed)" in said[0]
    assert f"{count} problems" in said[-1]
    assert problems[0].messages[-1]["content"].startswith(problems[0].question)
    assert "\\boxed{}" in problems[0].messages[-1]["content"]


@shared
def test_values_that_need_care() -> None:
    olympiad = {problem.id: problem for problem in load_problems(f"{DATA}/benchmarks/olympiadbench.jsonl")}
    assert olympiad["olympiadbench/1664"].answer == "$69$,$84$"
    amc = load_problems(f"{DATA}/benchmarks/amc23.jsonl", limit=16)
    assert amc[-1].answer == "-1"
    gsm8k = load_problems(f"{DATA}/benchmarks/gsm8k.jsonl")
    assert not [problem.answer for problem in gsm8k if "," in str(problem.answer)]
    said: list[str] = []
    load_problems(f"{DATA}/train/math_train.json", say=said.append)
    assert "math_train: 4 of 7474 rows dropped: no question or no reference answer" in said
    assert said[-1].endswith("7470 problems, 7469 distinct questions")


@shared
def test_a_training_file_is_split_without_a_shared_question() -> None:
    task = load_task(TaskConfig(source=f"{DATA}/train/math_train.json", held_out=250), seed=3)
    assert (len(task.held_out), task.train.size) == (250, 7469 - 250)
    held_out = {normalised(problem.question) for problem in task.held_out}
    assert len(held_out) == 250
    assert not held_out & {normalised(task.train.problem(draw).question) for draw in range(7469 - 250)}


def test_duplicate_questions_are_trained_on_once(tmp_path: Path) -> None:
    source = lines(
        tmp_path / "twice.jsonl", [*rows(30), *({**row, "question": row["question"].upper()} for row in rows(30))]
    )
    task = load_task(TaskConfig(source=source, held_out=10))
    assert (len(task.held_out), task.train.size) == (10, 20)
    assert "60 problems, 30 distinct questions: 10 held out, 20 to train on" in task.report


def test_a_held_out_file_takes_its_questions_from_training(tmp_path: Path) -> None:
    source = lines(tmp_path / "train.jsonl", rows(30))
    test = lines(tmp_path / "test.jsonl", [{"problem": row["question"], "solution": "\\boxed{7}"} for row in rows(5)])
    task = load_task(TaskConfig(source=source, held_out_source=test))
    assert (len(task.held_out), task.train.size) == (5, 25)
    assert {problem.answer for problem in task.held_out} == {"7"}
    assert "held out: 5 problems, 5 distinct questions" in task.report
    arithmetic = load_task(
        TaskConfig(
            source="arithmetic",
            held_out_source=lines(tmp_path / "sums.jsonl", [{"question": "12 + 5", "answer": 17}]),
            options={"digits": [2, 1]},
        )
    )
    assert [problem.question for problem in arithmetic.held_out] == ["12 + 5"]
    assert "12 + 5" not in {arithmetic.train.problem(draw).question for draw in range(2430)}
    assert arithmetic.held_out[0].messages[0]["content"].endswith("\n12 + 5 =")


def test_worked_examples_come_from_the_training_side(tmp_path: Path) -> None:
    source = lines(tmp_path / "train.jsonl", rows(30))
    prompt = {"few_shot": 2, "template": "Q: {question}\nA:", "separator": "\n\n"}
    task = load_task(TaskConfig.model_validate({"source": source, "held_out": 5, "prompt": prompt, "chat": False}))
    blocks = task.held_out[0].messages[0]["content"].split("\n\n")
    shown = {block.split("\n")[0].removeprefix("Q: ") for block in blocks[:2]}
    asked = {task.train.problem(draw).question for draw in range(23)} | {item.question for item in task.held_out}
    assert (task.train.size, len(asked)) == (23, 28)
    assert not shown & asked
    assert blocks[2] == f"Q: {task.held_out[0].question}\nA:"
    assert blocks[0].split("\n")[1].startswith("A: ")


def test_the_layout_of_verl_is_known(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    records = [
        {
            "data_source": "gsm8k",
            "prompt": [{"role": "system", "content": "Think."}, {"role": "user", "content": row["question"]}],
            "reward_model": {"style": "rule", "ground_truth": row["answer"]},
            "extra_info": {"index": number, "split": "train"},
        }
        for number, row in enumerate(rows(12))
    ]
    parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "train.parquet")
    problems = load_problems(str(tmp_path / "train.parquet"))
    assert problems[3].id == "train/3"
    assert (problems[3].question, problems[3].answer) == ("What is 3 + 1?", "4")
    assert problems[3].messages == (
        {"role": "system", "content": "Think."},
        {"role": "user", "content": "What is 3 + 1?"},
    )
    assert problems[3].metadata["data_source"] == "gsm8k"
    changed = TaskConfig.model_validate(
        {"source": str(tmp_path / "train.parquet"), "prompt": {"system": "Not used.", "template": "{question}!"}}
    )
    assert load_problems(changed)[3].messages[0]["content"] == "Think."
    assert load_problems(changed)[3].messages[1]["content"] == "What is 3 + 1?!"


def test_csv_json_folders_and_saved_datasets(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('id,problem,answer\nx,"1, 2 and?",3\ny,what,4\n', encoding="utf-8")
    problems = load_problems(str(tmp_path / "a.csv"))
    assert [(item.id, item.question, item.answer) for item in problems] == [
        ("a/x", "1, 2 and?", "3"),
        ("a/y", "what", "4"),
    ]
    (tmp_path / "b.json").write_text(json.dumps({"version": 1, "data": rows(3)}), encoding="utf-8")
    assert len(load_problems(str(tmp_path / "b.json"))) == 3
    folder = tmp_path / "folder"
    folder.mkdir()
    lines(folder / "train-00000-of-00002.jsonl", rows(2))
    lines(folder / "train-00001-of-00002.jsonl", rows(3))
    lines(folder / "test-00000-of-00001.jsonl", rows(4))
    assert len(load_problems(str(folder))) == 5
    assert len(load_problems(TaskConfig(source=str(folder), split="test"))) == 4
    with pytest.raises(InputError, match="no file of the split 'dev'; the files are of test, train"):
        load_problems(TaskConfig(source=str(folder), split="dev"))


def test_a_saved_dataset_is_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list(rows(4))
    datasets.DatasetDict({"train": data, "test": data.select([0])}).save_to_disk(str(tmp_path / "saved"))
    assert len(load_problems(str(tmp_path / "saved"))) == 4
    assert len(load_problems(TaskConfig(source=str(tmp_path / "saved"), split="test"))) == 1
    with pytest.raises(InputError, match="the splits are test, train"):
        load_problems(TaskConfig(source=str(tmp_path / "saved"), split="dev"))


def test_separators_that_json_allows_inside_a_string_do_not_end_a_line(tmp_path: Path) -> None:
    path = tmp_path / "odd.jsonl"
    path.write_text(
        json.dumps({"question": "a\u2028b\x85c", "answer": "1"}, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    assert load_problems(str(path))[0].question == "a\u2028b\x85c"
    table = tmp_path / "odd.csv"
    table.write_text('question,answer\r\na\u2028b,1\r\n"c\nd",2\r\n', encoding="utf-8", newline="")
    assert [problem.question for problem in load_problems(str(table))] == ["a\u2028b", "c\nd"]


def test_configured_columns_and_formats(tmp_path: Path) -> None:
    source = lines(tmp_path / "own.jsonl", [{"q": "2+2?", "meta": {"gold": "so #### 1,004"}, "name": "n1"}])
    columns = {"question": "q", "answer": "meta.gold", "id": "name"}
    settings = {"source": source, "columns": columns, "answer_format": "gsm8k"}
    problem = load_problems(TaskConfig.model_validate(settings))[0]
    assert (problem.id, problem.question, problem.answer) == ("own/n1", "2+2?", "1004")
    plain = load_problems(TaskConfig.model_validate(settings | {"answer_format": "plain"}))[0]
    assert plain.answer == "so #### 1,004"


def test_answers_of_other_types_become_text(tmp_path: Path) -> None:
    values = [27.0, 2.5, 3, True, ["1", 2.0], {"x": 1}]
    source = lines(tmp_path / "types.jsonl", [{"problem": f"p{n}", "answer": v} for n, v in enumerate(values)])
    answers = [problem.answer for problem in load_problems(source)]
    assert answers == ["27", "2.5", "3", "True", "1, 2", '{"x": 1}']


def test_ids_that_repeat_are_replaced_by_row_numbers(tmp_path: Path) -> None:
    source = lines(tmp_path / "same.jsonl", [{"id": 1, **row} for row in rows(3)])
    assert [problem.id for problem in load_problems(source)] == ["same/0", "same/1", "same/2"]


def test_a_limit_takes_the_first_rows(tmp_path: Path) -> None:
    source = lines(tmp_path / "many.jsonl", rows(50))
    assert [item.answer for item in load_problems(source, limit=3)] == ["1", "2", "3"]
    assert len(load_problems(TaskConfig(source=source, limit=8))) == 8
    assert load_task(TaskConfig(source=source, limit=8, held_out=2)).train.size == 6


def test_prompts_over_the_limit_are_dropped_and_counted(tmp_path: Path) -> None:
    source = lines(tmp_path / "many.jsonl", rows(50))
    task = load_task(TaskConfig(source=source, held_out=10))
    short = task.within(lambda problem: len(problem.question), len("What is 0 + 1?"))
    kept = [problem for problem in short.held_out if len(problem.question) <= 14]
    assert short.train.size is not None
    assert short.train.size + len(short.held_out) == 10
    assert kept == list(short.held_out)
    assert f"dropped: {40 - short.train.size} to train on; {10 - len(kept)} held out" in short.report


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("empty.jsonl", "", r"empty\.jsonl: the file is empty"),
        ("blank.jsonl", "\n\n", r"blank\.jsonl: the file is empty"),
        ("broken.jsonl", '{"question": "a", "answer": "1"}\n{"question": "b",\n', r"broken\.jsonl, line 2, column"),
        ("list.jsonl", "[1, 2]\n", r"list\.jsonl, line 1: expected an object"),
        ("broken.json", "[{]", r"broken\.json, line 1, column 3: broken JSON"),
        ("text.json", '"text"', "expected a list of objects"),
        ("entries.json", '[{"question": "a", "answer": "1"}, 5]', "entry 1 is not an object but '5'"),
        ("short.csv", "question,answer\na,1\nb\n", r"short\.csv, line 3: 1 fields, but the header names 2"),
        ("long.csv", "question,answer\na,1,2\n", r"long\.csv, line 2: 3 fields, but the header names 2"),
        ("bad.parquet", "not parquet", "not a readable Parquet file"),
        ("other.txt", "x", r"unknown kind of file; expected one of \.csv, \.json, \.jsonl, \.parquet"),
        (
            "none.jsonl",
            '{"text": "a", "tag": 1}\n',
            r"no column looks like the question .* it has text, tag\. Say which",
        ),
        (
            "half.jsonl",
            '{"question": "a", "tag": 1}\n',
            r"no column looks like the answer .* task\.columns\.answer=NAME",
        ),
        ("null.jsonl", '{"question": "a", "answer": null}\n', "none of the 1 rows has a question"),
    ],
)
def test_faulty_files_are_named_with_the_place(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=message):
        load_problems(str(tmp_path / name))


def test_text_that_is_not_utf8_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "latin.jsonl").write_bytes(b'{"question": "a", "answer": "1"}\n{"question": "\xe9"}\n')
    with pytest.raises(InputError, match=r"latin\.jsonl, line 2: not UTF-8"):
        load_problems(str(tmp_path / "latin.jsonl"))


def test_a_missing_file_names_its_nearest_sibling(tmp_path: Path) -> None:
    lines(tmp_path / "gsm8k_train.jsonl", rows(1))
    with pytest.raises(InputError, match=r"no file .*gsm8k_tran\.jsonl'\. Did you mean '.*gsm8k_train\.jsonl'\?"):
        load_problems(str(tmp_path / "gsm8k_tran.jsonl"))
    with pytest.raises(InputError, match=r"The folder has: gsm8k_train\.jsonl"):
        load_problems(str(tmp_path / "xxxxxxxx.csv"))
    with pytest.raises(InputError, match="does not exist either"):
        load_problems(str(tmp_path / "nowhere" / "a.jsonl"))


def test_a_missing_column_lists_the_columns(tmp_path: Path) -> None:
    source = lines(tmp_path / "a.jsonl", rows(2))
    settings = {"source": source, "columns": {"question": "questoin"}}
    with pytest.raises(InputError, match=r"no column 'questoin'; it has question, answer\. Did you mean 'question'"):
        load_problems(TaskConfig.model_validate(settings))


def test_a_number_of_worked_examples_needs_a_training_side(tmp_path: Path) -> None:
    settings = {"source": lines(tmp_path / "a.jsonl", rows(9)), "prompt": {"few_shot": 2}}
    with pytest.raises(InputError, match="a benchmark has none; give the examples themselves"):
        load_problems(TaskConfig.model_validate(settings))


def test_configuration_faults_are_refused() -> None:
    for fields, message in (
        ({"prompt": {"template": "no placeholder"}}, "template must contain"),
        ({"held_out": -1}, "held_out must be 0 or more"),
        ({"sources": "x"}, "sources"),
        ({"mixture": [{"mixture": [{}]}]}, "list all parts side by side"),
        ({"mixture": [{"max_prompt_tokens": 5}]}, "set it on the task"),
        ({"source": "a.jsonl", "mixture": [{"source": "arithmetic"}]}, "described by its parts"),
    ):
        with pytest.raises(ValueError, match=message):
            TaskConfig.model_validate(fields)


def test_mixtures_share_no_question_with_any_held_out_problem(tmp_path: Path) -> None:
    first = lines(tmp_path / "first.jsonl", rows(40))
    second = lines(tmp_path / "second.jsonl", rows(60))  # holds the first one's questions
    settings = {"held_out": 15, "mixture": [{"source": first, "weight": 3}, {"source": second}]}
    task = load_task(TaskConfig.model_validate(settings), seed=2)
    held_out = {problem.question for problem in task.held_out}
    assert 15 <= len(held_out) <= 30
    drawn = [task.train.problem(draw) for draw in range(1000)]
    assert not held_out & {problem.question for problem in drawn}
    assert sum(problem.id.startswith("first/") for problem in drawn) == 750
    assert "mixture: 75 %" in task.report


def test_a_mixture_of_chats_and_texts_is_refused(tmp_path: Path) -> None:
    source = lines(tmp_path / "a.jsonl", rows(40))
    settings: dict[str, Any] = {"mixture": [{"source": source}, {"source": "arithmetic"}]}
    with pytest.raises(InputError, match=r"set task\.chat for all"):
        load_task(TaskConfig.model_validate(settings))
    assert load_task(TaskConfig.model_validate(settings | {"chat": True})).chat is True


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"limit": 5}, r"task\.limit: arithmetic makes its problems"),
        ({"columns": {"answer": "x"}}, r"task\.columns: arithmetic makes its problems"),
        ({"source": "FILE", "options": {"terms": 2}}, r"task\.options: .* is read, not made"),
    ],
)
def test_settings_that_say_nothing_about_a_source_are_refused(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    source = lines(tmp_path / "a.jsonl", rows(40))
    config = TaskConfig.model_validate(fields | ({"source": source} if fields.get("source") == "FILE" else {}))
    with pytest.raises(InputError, match=message):
        load_task(config)
    with pytest.raises(InputError, match=message):
        load_problems(config)


def test_a_mixture_written_out_in_full_is_the_same_mixture(tmp_path: Path) -> None:
    source = lines(tmp_path / "a.jsonl", rows(40))
    config = TaskConfig.model_validate({"held_out": 5, "mixture": [{"source": source}, {"source": source}]})
    written = TaskConfig.model_validate(json.loads(config.model_dump_json()))
    assert load_task(written).held_out == load_task(config).held_out
    assert len(load_task(written).held_out) == 5
