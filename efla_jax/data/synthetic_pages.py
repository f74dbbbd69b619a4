"""Documents that tell values under keys, made up: stand-ins for SWDE (pages of web sites) and FDA (device summaries).

    question = make("synthetic_swde", index=7, words=800)    # a `cloze.Cloze`
    prompt = question.prompt(tokenizer.encode, length=2048)

SWDE and FDA, as the JRT paper asks for them (2407.05483), are a page's or a filing's text and "Key:", to which a value
that the text tells once is the answer. Scores of these stand-ins are no scores of those sets. What they share: the
values are new to a reader, so they must be read and not known; others of the same kind stand in the same text; keys are
those of a site or a filing, not of the question. What they lack: everything that is odd about real pages.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from efla_jax.data.cloze import Cloze
from efla_jax.data.needle import ADJECTIVES, NOUNS

Rng = np.random.Generator
SYLLABLES = tuple(
    "ba bel cor dan dor el far gar hal ik jor kal lin mar mor nel or pas quin rav sil tor ul ven wes yar zan".split()
)
GIVEN = tuple(
    "Ada Bruno Clara Dario Elif Farah Goran Hana Ivo Jonas Kira Lena Malik Nadia Omar Petra Rosa Sven Tara".split()
)
MONTHS = "January February March April May June July August September October November December".split()
VERBS = "covers holds shows keeps follows meets explains completes repeats describes".split()
MANNERS = "slowly, plainly, in part, at length, with care, by hand, as before, without delay, on request".split(", ")


def name(rng: Rng) -> str:
    """A made-up proper noun."""
    return "".join(rng.choice(SYLLABLES, 3)).capitalize()


def person(rng: Rng) -> str:
    return f"{rng.choice(GIVEN)} {name(rng)}"


def title(rng: Rng) -> str:
    return f"The {str(rng.choice(ADJECTIVES)).capitalize()} {str(rng.choice(NOUNS)).capitalize()}"


def date(rng: Rng) -> str:
    return f"{rng.choice(MONTHS)} {rng.integers(1, 29)}, {rng.integers(1990, 2024)}"


def whole(low: int, high: int, form: str = "{}") -> Callable[[Rng], str]:
    return lambda rng: form.format(int(rng.integers(low, high)))


def one_of(*choices: str) -> Callable[[Rng], str]:
    return lambda rng: str(rng.choice(choices))


def code(rng: Rng) -> str:
    return "".join(chr(65 + int(letter)) for letter in rng.integers(0, 26, 3))


class Page(NamedTuple):
    """Keys and how their values are made, and what a document says beside them."""

    fields: dict[str, Callable[[Rng], str]]
    heading: Callable[[Rng], str]
    others: str  # how the page announces other items of the kind


SITES = (
    Page({"director": person, "starring": person, "running time": whole(71, 199, "{} min"), "studio": name,
          "release date": date, "screenplay by": person, "country": name}, title, "People also watched"),
    Page({"author": person, "publisher": name, "number of pages": whole(90, 990), "ISBN": whole(10**9, 10**10),
          "publication date": date, "translated by": person}, title, "Readers also bought"),
    Page({"manufacturer": name, "weight": whole(120, 1900, "{} g"), "effective pixels": whole(101, 990, "{} thousand"),
          "price": whole(49, 2900, "${}"), "model number": whole(1000, 9999, "DX-{}"), "battery": name},
         lambda rng: f"{name(rng)} {rng.integers(100, 999)} digital camera", "Compare with"),
    Page({"president": person, "founded": whole(1400, 1990), "mascot": lambda rng: f"the {rng.choice(NOUNS)}",
          "undergraduates": whole(800, 42000), "campus": name, "tuition": whole(900, 59000, "${}")},
         lambda rng: f"University of {name(rng)}", "Similar schools"),
    Page({"chef": person, "cuisine": name, "phone": whole(10**6, 10**7, "555-{}"), "average cost": whole(8, 140, "${}"),
          "neighborhood": name, "closed on": one_of("Monday", "Tuesday", "Wednesday", "Sunday")},
         lambda rng: f"{str(rng.choice(NOUNS)).capitalize()} & {str(rng.choice(NOUNS)).capitalize()}", "Nearby"),
    Page({"team": name, "height": whole(175, 220, "{} cm"), "college": name, "drafted": whole(1988, 2023),
          "career points": whole(300, 31000), "number": whole(0, 99, "#{}")}, person, "Teammates"),
)  # fmt: skip
FILING = Page(
    {"510(k) number": whole(100000, 240000, "K{}"), "applicant": lambda rng: f"{name(rng)} Medical, Inc.",
     "contact person": person, "device trade name": lambda rng: f"{name(rng)} {rng.choice(NOUNS)} system",
     "classification panel": one_of("Cardiovascular", "Dental", "Orthopedic", "Radiology", "Anesthesiology"),
     "regulation number": whole(1000, 9999, "21 CFR 880.{}"), "product code": code, "date prepared": date,
     "predicate device": lambda rng: f"{name(rng)} {rng.choice(NOUNS)} (K{rng.integers(100000, 240000)})",
     "sterilization method": one_of("ethylene oxide", "gamma irradiation", "steam", "hydrogen peroxide vapor"),
     "sample size": whole(12, 950, "{} specimens"), "storage temperature": whole(2, 39, "{} degrees Celsius")},
    lambda rng: f"Summary of safety and effectiveness: {name(rng)}", "Documents of other applicants",
)  # fmt: skip
TASKS = ("synthetic_swde", "synthetic_fda")


def sentence(rng: Rng) -> str:
    """Words that tell no value."""
    first, second = (f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}" for _ in range(2))
    return f"The {first} {rng.choice(VERBS)} the {second} {rng.choice(MANNERS)}."


def told(rng: Rng, task: str, key: str, value: str) -> str:
    """A key with its value: on a page a line, in a filing a line or a clause."""
    if task == "synthetic_swde" or rng.random() < 0.5:
        return f"{key[0].upper()}{key[1:]}: {value}"
    return f"For this submission the {key} is {value}, as the sponsor states."


def make(task: str, index: int, words: int = 800, seed: int = 0) -> Cloze:
    """Question `index` about a document of about so many words.

    Raises ValueError for an unknown task, a negative seed or index, and fewer words than the keys take (120)."""
    if task not in TASKS:
        raise ValueError(f"task={task!r} must be one of {', '.join(TASKS)}")
    for option, value, least in (("seed", seed, 0), ("index", index, 0), ("words", words, 120)):
        if value < least:
            raise ValueError(f"{option}={value} is less than {least}; give {least} or more")
    rng = np.random.default_rng((seed, index, TASKS.index(task)))
    page = FILING if task == "synthetic_fda" else SITES[int(rng.integers(len(SITES)))]
    values = distinct(rng, page)
    wanted = str(rng.choice(list(values)))
    lines = [told(rng, task, key, values[key]) for key in rng.permutation(list(values))]
    others = distractors(rng, page, set(values.values()), count=2 + words // 200)
    length = sum(len(line.split()) for line in (*lines, *others))
    prose = []
    while length < words:
        prose.append(sentence(rng))
        length += len(prose[-1].split())
    body = mixed(rng, lines, prose)
    document = "\n".join([page.heading(rng), *body, f"{page.others}:", *others])
    cue = f"{wanted[0].upper()}{wanted[1:]}:"
    return Cloze(document, cue, ((values[wanted],),), "\n", f"Information about {cue[:-1]}.")


def distinct(rng: Rng, page: Page) -> dict[str, str]:
    """A value for each key, none of them part of another, so that each stands for one key only."""
    while True:
        values = {key: draw(rng) for key, draw in page.fields.items()}
        listed = list(values.values())
        if not any(a in b for i, a in enumerate(listed) for j, b in enumerate(listed) if i != j):
            return values


def distractors(rng: Rng, page: Page, taken: set[str], count: int) -> list[str]:
    """Other items with a value each, of which none holds one that is taken."""
    keys = list(page.fields)
    lines: list[str] = []
    while len(lines) < count:
        key = str(rng.choice(keys))
        line = f"{page.heading(rng)} ({page.fields[key](rng)})"
        if not any(value in line for value in taken):
            lines.append(line)
    return lines


def mixed(rng: Rng, lines: Sequence[str], prose: Sequence[str]) -> list[str]:
    """Lines in their order, at random places among the prose."""
    places = np.sort(rng.integers(0, len(prose) + 1, len(lines)))
    body = list(prose)
    for place, line in zip(places[::-1], lines[::-1], strict=True):
        body.insert(int(place), line)
    return body
