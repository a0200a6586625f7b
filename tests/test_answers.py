"""What is asked, and where answers are found."""

import doctest

import pytest

from jaxrl_llm import answers
from jaxrl_llm.answers import EXPRESSION, AskConfig, lenient_answer, majority, strict_answer
from jaxrl_llm.types import ConfigError


def test_the_examples_hold():
    assert doctest.testmod(answers).failed == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<answer>1</answer> or <answer>\n2 </answer>.", "2"),
        ("<answer>a\nb</answer>", "a\nb"),
        ("<answer> </answer>", None),
        ("<answer>1", None),
        ("1", None),
    ],
)
def test_the_strict_answer_is_within_the_last_tags(text, expected):
    assert strict_answer(text, True) == expected


def test_without_tags_all_that_is_said_is_the_answer():
    assert strict_answer(" 12 ", False) == "12"
    assert strict_answer(" ", False) is None


@pytest.mark.parametrize(
    ("text", "reference", "expected"),
    [
        ("5 + 3 = 8", "8", "8"),
        ("it is -3.50 dollars", "8", "-3.50"),
        ("so 12,345, and done", "8", "12345"),
        ("about 3/4 of it", "1/2", "3/4"),
        ("<answer>It is 7.</answer> I used 3 steps.", "8", "7"),
        ("no idea", "8", None),
        ("first\nFinal answer: Yes\n\n", "No", "Yes"),
        ("<answer>Yes</answer>\nbye", "No", "Yes"),
        ("the steps\n<answer>Yes", "No", "Yes"),
        ("", "No", None),
        ("No, it does not follow: yes would need more.", "No", "No"),
        ("**no.** Not all know it.", "No", "No"),
        ("No tiger is known. So yes, it follows.", "Yes", "Yes"),
        ("No\nYes would need more.", "No", "No"),
        ("There are no tigers, so it follows: YES.", "Yes", "Yes"),
        ("Nobody knows.", "No", None),
        ("It is false that yes is said. True", "False", "True"),
        ("It is FALSE", "False", "False"),
        ("a\nno idea", "maybe", "no idea"),
    ],
)
def test_the_lenient_answer_is_the_last_number_choice_or_line(text, reference, expected):
    assert lenient_answer(text, True, reference) == expected


def test_ties_of_votes_go_to_the_first_seen():
    assert majority(["2", "1", "1", "2"]) == "2"
    assert majority(["3", "1", None, "1", None, None]) == "1"
    assert majority([None, None]) is majority([]) is None


def test_a_question_is_framed_as_the_config_says():
    ask = AskConfig(system="Be brief.", question="Q: {question} <answer>")
    assert ask.prompt("{1}?", {"b": "2"}) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Q: {1}? <answer>"},
    ]
    assert ask.has_tags and not EXPRESSION.has_tags
    assert EXPRESSION.prompt("What is 1 + 2?", {"expression": "1 + 2"}) == "1 + 2="


def test_a_frame_that_cannot_be_filled_is_refused():
    for question in ("{expression}=", "{0}", "{", "{question.x}"):
        with pytest.raises(ConfigError, match="cannot be filled in .*expected fields {question}"):
            AskConfig(question=question).prompt("?", {})
    with pytest.raises(ConfigError, match="a system message without chat"):
        AskConfig(system="Be brief.", chat=False)
