from __future__ import annotations

import pytest

from tepo.core.errors import InputError
from tepo.tasks import TaskConfig, load_problems, load_task
from tepo.tasks.arithmetic import ArithmeticOptions, value_of
from tepo.tasks.problem import normalised

QUICKSTART = {"source": "arithmetic", "held_out": 300, "options": {"digits": [2, 1]}}


def config(**fields: object) -> TaskConfig:
    return TaskConfig.model_validate({"source": "arithmetic", **fields})


def test_quickstart_task_has_2430_questions_300_held_out_and_four_worked_lines() -> None:
    task = load_task(TaskConfig.model_validate(QUICKSTART), seed=1)
    assert task.train.size == 2430 - 300 - 4
    assert task.report == ("arithmetic: 2,430 distinct questions: 300 held out, 4 worked examples, 2,126 to train on")
    assert task.chat is False
    lines = task.held_out[0].messages[0]["content"].split("\n")
    assert len(lines) == 5
    assert all(eval(line.split(" = ")[0]) == int(line.split(" = ")[1]) for line in lines[:4])
    assert lines[4] == f"{task.held_out[0].question} ="
    assert {line.split()[1] for line in lines[:3]} == {"+", "-", "*"}


def test_train_held_out_and_worked_examples_are_disjoint_and_complete() -> None:
    task = load_task(TaskConfig.model_validate(QUICKSTART), seed=1)
    train = {normalised(task.train.problem(draw).question) for draw in range(2126)}
    held_out = {normalised(problem.question) for problem in task.held_out}
    shown = {line.split(" = ")[0] for line in task.held_out[0].messages[0]["content"].split("\n")[:4]}
    assert (len(train), len(held_out), len(shown)) == (2126, 300, 4)
    assert not train & held_out
    assert not shown & (train | held_out)


def test_answers_are_right_and_read_from_the_first_line() -> None:
    task = load_task(TaskConfig.model_validate(QUICKSTART))
    for problem in [*task.held_out, *(task.train.problem(draw) for draw in range(50))]:
        assert problem.answer == str(eval(problem.question))
        assert problem.metadata["scorer"] == "numeric"
        assert problem.metadata["number"] == "first-line"


def test_the_split_depends_on_its_own_seed_and_the_order_on_the_runs() -> None:
    first, second = (load_task(TaskConfig.model_validate(QUICKSTART), seed=seed) for seed in (1, 2))
    assert first.held_out == second.held_out
    assert [first.train.problem(draw) for draw in range(9)] != [second.train.problem(draw) for draw in range(9)]
    other = load_task(TaskConfig.model_validate(QUICKSTART | {"split_seed": 1}), seed=1)
    assert other.held_out != first.held_out


def test_by_default_a_tenth_at_most_200_is_held_out() -> None:
    assert len(load_task(config()).held_out) == 200
    assert len(load_task(config(options={"digits": [1, 1], "operators": ["+"]})).held_out) == 8


def test_twenty_terms_of_eighteen_digits_are_shuffled_without_listing_them() -> None:
    task = load_task(config(options={"terms": 20, "digits": 18}, held_out=5))
    questions = {task.train.problem(draw).question for draw in range(20)}
    assert len(questions) == 20
    assert all(len(question.split()) == 39 for question in questions)


def test_digits_may_be_one_number_one_each_or_ranges() -> None:
    assert ArithmeticOptions(terms=3, digits=1).ranges() == [(1, 9)] * 3
    assert ArithmeticOptions(digits=(3, (1, 2))).ranges() == [(100, 999), (1, 99)]


def test_products_bind_first() -> None:
    assert value_of([2, 3, 4], ["+", "*"]) == 14
    assert value_of([2, 3, 4, 5], ["*", "-", "*"]) == -14
    task = load_task(config(options={"terms": 4, "digits": 2}, held_out=200))
    assert all(problem.answer == str(eval(problem.question)) for problem in task.held_out)


def test_as_a_chat_the_question_is_a_sentence_and_the_last_number_counts() -> None:
    task = load_task(config(chat=True))
    assert task.chat is True
    problem = task.held_out[0]
    assert problem.messages == (
        {"role": "user", "content": f"What is {problem.question}? Answer with the number only."},
    )
    assert problem.metadata["number"] == "last"


def test_worked_examples_in_a_chat_are_turns() -> None:
    prompt = {"few_shot": 2, "system": "Calculate.", "template": "{question}?"}
    messages = load_task(config(chat=True, prompt=prompt)).held_out[0].messages
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user", "assistant", "user"]
    assert eval(messages[1]["content"].rstrip("?")) == int(messages[2]["content"])


def test_given_examples_are_neither_held_out_nor_trained_on() -> None:
    examples = [{"question": f"{a} + {b}", "answer": str(a + b)} for a in range(1, 10) for b in range(1, 9)]
    options = {"digits": [1, 1], "operators": ["+"]}
    task = load_task(config(options=options, held_out=40, prompt={"few_shot": examples, "separator": ";"}))
    seen = {task.train.problem(draw).question for draw in range(100)} | {item.question for item in task.held_out}
    assert seen <= {f"{a} + 9" for a in range(1, 10)}
    assert task.held_out[0].messages[0]["content"].startswith("1 + 1 = 2;1 + 2 = 3;")


def test_the_text_is_configurable() -> None:
    prompt = {"template": "{question} is", "few_shot": 1, "example_template": "{question}: {answer}", "system": "Sums."}
    content = load_task(config(prompt=prompt)).held_out[0].messages[0]["content"]
    system, empty, example, question = content.split("\n")
    assert (system, empty) == ("Sums.", "")
    assert ": " in example
    assert question.endswith(" is")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"digit": 2}, r"task\.options\.digit: no such option\. Did you mean 'digits'\?"),
        ({"operators": ["/"]}, r"task\.options\.operators"),
        ({"operators": []}, "at least one"),
        ({"digits": [1, 2], "terms": 3}, "digits lists 2 numbers, terms says 3"),
        ({"digits": 19}, "between 1 and 18 digits"),
        ({"digits": [[2, 1], 1]}, "range runs from low to high"),
        ({"terms": 1}, "greater than or equal to 2"),
    ],
)
def test_wrong_options_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_task(config(options=options))


def test_holding_out_everything_is_an_error() -> None:
    with pytest.raises(InputError, match="has 81 distinct questions; 81 held out and 4 worked examples leave none"):
        load_task(config(options={"digits": [1, 1], "operators": ["+"]}, held_out=81))


def test_prompts_over_the_limit_are_passed_over_as_they_come() -> None:
    task = load_task(config(options={"digits": [[1, 3], 1]}, prompt={"few_shot": 0}, held_out=100))
    short = task.within(lambda problem: len(problem.question), 5)
    assert max(len(short.train.problem(draw).question) for draw in range(200)) == 5
    assert 0 < len(short.held_out) < 100
    assert "prompts over 5 tokens dropped: those a family makes, as they come; " in short.report
    with pytest.raises(InputError, match=r"task\.max_prompt_tokens: no training prompt has at most 3 tokens"):
        task.within(lambda problem: len(problem.question), 3)


def test_evaluation_problems_of_a_family_are_its_held_out_ones() -> None:
    assert load_problems(TaskConfig.model_validate(QUICKSTART), limit=7) == list(
        load_task(TaskConfig.model_validate(QUICKSTART)).held_out[:7]
    )
    with pytest.raises(InputError, match="nothing of arithmetic is held out"):
        load_problems(config(held_out=0))
