"""Measures of answers: values that were counted by hand, and the package rouge where it is installed."""

import numpy as np
import pytest

from efla_jax.data import answers


@pytest.mark.parametrize(("output", "wanted", "every", "part"), [
    ("It is 1234567.", ["1234567"], 1, 1),
    ("ABCD-ef", ["abcd-EF", "12"], 0.5, 1),
    ("one, two", ["one", "two", "three", "four"], 0.5, 1),
    ("123456", ["1234567"], 0, 0),
    ("", ["x"], 0, 0),
])  # fmt: skip
def test_string_match_of_ruler(output, wanted, every, part):
    assert answers.string_match_all(output, wanted) == every
    assert answers.string_match_part(output, wanted) == part


def test_contains_wants_every_span_of_one_answer():
    assert answers.contains("Twenty-three YEARS (23).", [["23 years"], ["23"]]) == 1
    assert answers.contains("a.b", [["a+b"], ["axb"]]) == 0  # no pattern
    assert answers.contains("Swedish and Danish", [["swedish", "irish"], ["irish"]]) == 0
    assert answers.contains("Swedish and Irish", [["swedish", "irish"]]) == 1
    with pytest.raises(ValueError, match="answers: there is none"):
        answers.contains("x", [[]])


@pytest.mark.parametrize(("output", "answer", "score"), [
    ("The cat sat.", "a cat sat down", 2 * (2 / 2) * (2 / 3) / (1 + 2 / 3)),
    ("no no no", "no", 2 * (1 / 3) * 1 / (4 / 3)),  # one "no" answers one
    ("Theory", "the theory", 1.0),  # an article is a word
    ("it's", "its", 1.0),
    ("dog", "cat", 0.0),
    ("the", "an", 0.0),  # nothing is left
])  # fmt: skip
def test_f1(output, answer, score):
    assert answers.f1(output, answer) == pytest.approx(score)


@pytest.mark.parametrize(("output", "answer", "score"), [
    # w1 w2 and w1 w3 w5 are subsequences of w1 w2 w3 w4 w5: four words of five and of nine (Lin, 2004, section 3.2)
    ("w1 w2 w6 w7 w8. w1 w3 w8 w9 w5", "w1 w2 w3 w4 w5", 2 * (4 / 8) * (4 / 5) / (4 / 8 + 4 / 5)),
    ("police kill the gunman", "police killed the gunman", 0.75),
    ("the gunman kill police", "police killed the gunman", 0.5),
    ("a a a a", "a", 1.0),  # words count once
    ("a b.", "a b. ", 2 * (2 / 2) * (2 / 3) / (1 + 2 / 3)),  # the space behind the full stop is a word
    ("x", "y", 0.0),
    ("", "y", 0.0),
    ("...", "y", 0.0),
])  # fmt: skip
def test_rouge_l(output, answer, score):
    assert answers.rouge_l(output, answer) == pytest.approx(score)


def test_rouge_l_is_that_of_the_package():
    rouge = pytest.importorskip("rouge").Rouge(metrics=["rouge-l"])
    rng = np.random.default_rng(0)
    for _ in range(300):
        output, answer = (" ".join(rng.choice(["a", "b", "c", "d.", "e", "f. ", "A"], rng.integers(1, 25)))
                          for _ in range(2))  # fmt: skip
        wanted = rouge.get_scores([output], [answer], avg=True)["rouge-l"]["f"]
        assert answers.rouge_l(output, answer) == pytest.approx(wanted, abs=1e-6)  # it adds 1e-8 to the divisor


def test_classification():
    classes = ["City", "Country", "Other location", "Other", "Date"]
    assert answers.classification("City", "City", classes) == 1
    assert answers.classification("City or Country", "City", classes) == 0.5
    assert answers.classification("Type: Other location", "Other location", classes) == 1  # Other is part of it
    assert answers.classification("Other location", "Other", classes) == 0.5
    assert answers.classification("city", "City", classes) == 0
    assert answers.classification("Date", "City", classes) == 0
    with pytest.raises(ValueError, match="all_classes: there is none"):
        answers.classification("x", "y", [])


def test_numbers():
    assert answers.number("Paragraph 12", "Paragraph 12") == 1
    assert answers.number("12 or 3, or 12, or 1", "12") == 0.5
    assert answers.number("112", "12") == 0 == answers.number("none", "12")
    with pytest.raises(ValueError, match="'twelve' has no number"):
        answers.number("12", "twelve")


def test_code_similarity():
    assert answers.code_similarity("\n\n# a comment\nreturn x\nreturn y", "return x") == 1
    assert answers.code_similarity("```\n// c\nabcd", "abef") == 0.5
    assert answers.code_similarity("abc", "ab") == 0.8  # 2 * 2 / 5
    assert answers.code_similarity("# only this", "x") == 0


def test_the_best_answer_counts_and_only_the_first_line():
    assert answers.best(answers.f1, "two", ["one", "two"]) == 1
    assert answers.best(answers.f1, "two", []) == 0
    assert answers.first_line("\n\nCity\nDate") == "City"
