"""How well a text answers a question, from 0 to 1: the measures of RULER, of recall-intensive prompts and of LongBench.

    string_match_all     RULER (2404.06654)         share of the answers that stand in the output
    string_match_part    RULER                      1 if one of them does
    contains             recall-intensive prompts   the same, as JRT's harness asks (2407.05483)
    f1                   LongBench (2308.14508)     words of output and answer, as SQuAD counts them
    rouge_l              LongBench                  words in common subsequences
    classification       LongBench                  the class is named, and how many others are
    number               LongBench                  share of the output's numbers that are the answer's
    code_similarity      LongBench                  characters of the first line of code

Outputs are texts, without the prompt. LongBench takes the best over several answers: `best`.
"""

import difflib
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)


def string_match_all(output: str, answers: Sequence[str]) -> float:
    """The share of the answers that are part of the output, upper or lower case."""
    return sum(found(output, answers)) / len(answers)


def string_match_part(output: str, answers: Sequence[str]) -> float:
    """1 if one of the answers is part of the output, upper or lower case."""
    return float(any(found(output, answers)))


def found(output: str, answers: Sequence[str]) -> list[bool]:
    """Which answers are part of the output, upper or lower case. Raises ValueError if there is none."""
    if not answers:
        raise ValueError("answers: there is none, so nothing can be looked for.")
    return [answer.lower() in output.lower() for answer in answers]


def contains(output: str, answers: Sequence[Sequence[str]]) -> float:
    """1 if all spans of one of the answers are part of the output, upper or lower case.

    Most answers are one span; those of DROP may be several."""
    return float(any(all(found(output, spans)) for spans in answers))


def best(score: Callable[[str, str], float], output: str, answers: Sequence[str]) -> float:
    """The highest score of an output against the answers; 0 without answers."""
    return max((score(output, answer) for answer in answers), default=0.0)


def plain_words(text: str) -> list[str]:
    """Words in lower case, without punctuation and articles."""
    return ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split()


def f1(output: str, answer: str) -> float:
    """Harmonic mean of the shares of `plain_words` that output and answer have in common."""
    said, wanted = Counter(plain_words(output)), Counter(plain_words(answer))
    return harmonic((said & wanted).total(), said.total(), wanted.total())


def harmonic(common: int, said: int, wanted: int) -> float:
    """The harmonic mean of common / said and common / wanted; 0 if nothing is common."""
    return 2 * common / (said + wanted) if common else 0.0


def rouge_l(output: str, answer: str) -> float:
    """ROUGE-L of summaries, F1, as the package rouge 1.0.1, which LongBench calls, computes it.

    Sentences end at full stops, words at white space; of every sentence of the answer with every one of the output the
    longest common subsequence is taken, and the different words in all of them are set against the different words of
    output and answer. (The package gives up on sentences of about a thousand words, and LongBench then counts 0.)"""
    said, wanted = sentences(output), sentences(answer)
    if not said or not wanted:
        return 0.0
    common = {word for one in wanted for other in said for word in common_subsequence(one, other)}
    return harmonic(len(common), len({w for words in said for w in words}), len({w for words in wanted for w in words}))


def sentences(text: str) -> list[list[str]]:
    """Words of what stands between full stops; white space alone counts as an empty word, as in the package rouge."""
    return [part.split() or [""] for part in text.split(".") if part]


def common_subsequence(x: Sequence[str], y: Sequence[str]) -> list[str]:
    """The longest common subsequence, of several that which ends latest in x."""
    table = [[0] * (len(y) + 1)]
    for word in x:
        above, row = table[-1], [0]
        for j, other in enumerate(y):
            row.append(above[j] + 1 if word == other else max(above[j + 1], row[j]))
        table.append(row)
    words, i, j = [], len(x), len(y)
    while i and j:
        if x[i - 1] == y[j - 1]:
            words.append(x[i - 1])
            i, j = i - 1, j - 1
        elif table[i - 1][j] > table[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return words[::-1]


def classification(output: str, answer: str, classes: Sequence[str]) -> float:
    """1 / n if the output names the answer's class and n - 1 others; names that are part of the answer's name do not
    count as others. Raises ValueError without classes."""
    if not classes:
        raise ValueError("all_classes: there is none; give the names of the classes.")
    named = [name for name in classes if name in output and (name == answer or name not in answer)]
    return 1 / len(named) if answer in named else 0.0


def number(output: str, answer: str) -> float:
    """The share of the numbers in an output that are the (first) number of the answer, "7" or "Paragraph 7"."""
    wanted = re.search(r"\d+", answer)
    if wanted is None:
        raise ValueError(f"answers: {answer!r} has no number.")
    numbers = re.findall(r"\d+", output)
    return numbers.count(wanted[0]) / len(numbers) if numbers else 0.0


def code_similarity(output: str, answer: str) -> float:
    """Whole percent of the characters that Python's difflib matches between the answer and the first line of the output
    that has no `, # or //."""
    lines = output.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return round(100 * difflib.SequenceMatcher(None, line, answer).ratio()) / 100


def first_line(output: str) -> str:
    """What stands before the first line break, those in front left out."""
    return output.lstrip("\n").split("\n")[0]
