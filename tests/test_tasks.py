"""The zero-shot tasks: prompts as they must be, scores that can be counted by hand, the commands that write them."""

import json
import math
import os
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from efla_jax.data.tokenizer import TokenizerSpec, load_tokenizer
from efla_jax.scoring import Score, split_pair
from experiments import evaluate as program
from experiments import language_runs, result_files, tasks

ROWS = {
    "lambada_openai": {"text": "He shut the old  door"},
    "piqa": {"goal": "Open it", "sol1": "Pull.", "sol2": "Push.", "label": 1},
    "hellaswag": {"activity_label": "Tea", "ctx_a": "A man [header] boils water.", "ctx_b": "he THEN",
                  "endings": ["pours [step] it.", "sings [title] Loud.", "a", "b"], "label": "2"},
    "winogrande": {"sentence": "Ann met Sue because _ was late .", "option1": "Ann", "option2": "Sue", "answer": "2"},
    "arc_easy": {"question": "What is ice?", "choices": {"text": ["water", "fire"], "label": ["1", "2"]},
                 "answerKey": "2"},
    "openbookqa": {"question_stem": "Ice is", "choices": {"text": ["water", "fire"], "label": ["A", "B"]},
                   "answerKey": " B"},
    "boolq": {"passage": "Ice melts.", "question": "does ice melt", "answer": True},
    "sciq": {"support": "\n Ice.", "question": "What?", "distractor1": "x", "distractor2": "y", "distractor3": "z",
             "correct_answer": "ice"},
    "social_iqa": {"context": "Ann fell.", "question": "Why?", "answerA": "ice", "answerB": "b", "answerC": "c",
                   "label": "3"},
    "commonsense_qa": {"question": " What? ", "choices": {"text": list("vwxyz"), "label": list("ABCDE")},
                       "answerKey": "D"},
    "wikitext": {"page": " \n = Ice = \n Ice is 1 @,@ 000 ( one ) years old , \" cold \" . \n"},
}  # fmt: skip
PUT = {
    "lambada_openai": ("He shut the old ", [" door"], 0),
    "piqa": ("Question: Open it\nAnswer:", [" Pull.", " Push."], 1),
    "hellaswag": ("Tea: A man boils water. He then", [" pours it.", " sings. Loud.", " a", " b"], 2),
    "winogrande": (["Ann met Sue because Ann", "Ann met Sue because Sue"], " was late .", 1),
    "arc_easy": ("Question: What is ice?\nAnswer:", [" water", " fire"], 1),
    "openbookqa": ("Ice is", [" water", " fire"], 1),
    "boolq": ("Ice melts.\nQuestion: does ice melt?\nAnswer:", [" no", " yes"], 1),
    "sciq": ("Ice.\nQuestion: What?\nAnswer:", [" x", " y", " z", " ice"], 3),
    "social_iqa": ("Q: Ann fell. Why?\nA:", [" ice", " b", " c"], 2),
    "commonsense_qa": ("Question: What?\nA. v\nB. w\nC. x\nD. y\nE. z\nAnswer:", [" A", " B", " C", " D", " E"], 3),
    "wikitext": ("", ['\n= Ice =\nIce is 1,000 (one) years old, "cold".\n'], 0),
}


@pytest.mark.parametrize("name", PUT)
def test_prompts(name):
    context, answers, right = PUT[name]
    question = tasks.TASKS[name].form(ROWS[name])
    pairs = [(one, answers) for one in context] if name == "winogrande" else [(context, answer) for answer in answers]
    assert list(question.pairs) == pairs and question.right == right
    if name == "winogrande":
        assert question.choices == tuple(context)
    elif tasks.TASKS[name].kind == "choice":
        assert [f" {choice}" for choice in question.choices] == answers
    # The page's own words and bytes, not those of the running text; white space at its ends makes an empty word each.
    assert name != "wikitext" or question.size == (20, len(ROWS[name]["page"]))


def test_every_task_has_a_prompt_here():
    assert set(PUT) | {"arc_challenge"} == set(tasks.TASKS) and set(tasks.USUAL) < set(tasks.TASKS)
    assert tasks.TASKS["arc_challenge"].form is tasks.TASKS["arc_easy"].form


def test_the_three_accuracies():
    """Sums, per character and per byte each prefer another answer."""
    question = tasks.choose("", ("ab", "abcdefgh", "éééééé"), 0)
    scores = [Score(nats, False, 1) for nats in (-2.0, -6.0, -4.9)]
    assert tasks.choice_scores(question, scores) == {"acc": 1.0, "acc_norm": 0.0, "acc_bytes": 0.0}
    assert tasks.choice_scores(question._replace(right=1), scores) == {"acc": 0.0, "acc_norm": 1.0, "acc_bytes": 0.0}
    assert tasks.choice_scores(question._replace(right=2), scores) == {"acc": 0.0, "acc_norm": 0.0, "acc_bytes": 1.0}
    equal = [Score(-1.0, False, 1)] * 2
    assert tasks.choice_scores(tasks.choose("", ("a", "b"), 0), equal)["acc"] == 1.0  # the first of equals


def test_means_and_their_errors():
    value, error = tasks.mean([1.0, 0.0, 0.0, 1.0, 1.0])
    assert value == pytest.approx(0.6) and error == pytest.approx(math.sqrt(0.3 / 5))
    assert math.isnan(tasks.mean([1.0])[1])
    value, error = tasks.ratio([2.0, 9.0], [1.0, 3.0])
    assert value == 11 / 4 and error == pytest.approx(math.sqrt(2 * (0.75**2 + 0.75**2)) / 4)
    rng = np.random.default_rng(0)
    tops, sizes = rng.normal(3, 1, (4000, 50)), rng.uniform(1, 5, (4000, 50))
    drawn = [tasks.ratio(a * b, b) for a, b in zip(tops, sizes, strict=True)]
    # The spread over 4000 repetitions, known to 1 %, against the mean of what each says of itself.
    assert np.std([v for v, _ in drawn]) == pytest.approx(np.mean([e for _, e in drawn]), rel=0.05)


def test_perplexities_divide_by_words_bytes_and_tokens():
    texts = [tasks.whole_text("one two"), tasks.whole_text("é")]
    found = tasks.perplexities(texts, [Score(-4.0, False, 5), Score(-2.0, False, 1)])
    assert found["word_perplexity"] == pytest.approx(math.exp(6 / 3)) and found["token_perplexity"] == math.e
    assert found["byte_perplexity"] == pytest.approx(math.exp(6 / 9))
    assert found["bits_per_byte"] == pytest.approx(6 / 9 / math.log(2))
    assert found["bits_per_byte_stderr"] > 0
    assert tasks.perplexities(texts, [Score(-4e4, False, 1)] * 2)["word_perplexity"] == math.inf


class Reader:
    """A scorer that knows how likely each pair is, of `likely` {continuation: nats}, else -9 nats a character."""

    def __init__(self, likely):
        self.likely, self.counts, self.asked = likely, {"truncated": 0, "tokens_dropped": 0, "joined": 0}, []
        self.max_length, self.begin = 64, SimpleNamespace(token=0, always=False)

    def loglikelihood(self, pairs):
        self.asked += pairs
        self.counts["truncated"] += 1
        return [Score(self.likely.get(after, -9.0 * len(after)), after in self.likely, 1) for _, after in pairs]

    def rolling(self, texts):
        return [Score(-float(len(text)), False, len(text)) for text in texts]


@pytest.fixture
def folder(tmp_path):
    for name in ("piqa", "winogrande", "wikitext", "lambada_openai", "arc_easy"):
        file = tmp_path / "data" / f"{tasks.TASKS[name].files[-1]}.jsonl"
        file.parent.mkdir(exist_ok=True)
        rows = [ROWS[name], ROWS[name] | ({"label": 0} if name == "piqa" else {})]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "data"


def opened(scorer, out):
    config = {"data": {"kind": "text", "window": 64}, "train": {"matmul_precision": "highest"}}
    model = language_runs.Trained(None, {"w": np.zeros((2, 3))}, out, "highest", load_tokenizer(TokenizerSpec()),
                                  config, "7")  # fmt: skip
    return lambda chosen, name: (model, scorer, result_files.folder_of(chosen, out))


def test_suite_writes_scores_errors_and_one_row(folder, tmp_path, monkeypatch, capsys):
    reader = Reader({" Push.": -1.0, " was late .": -1.0, " door": -2.0})
    monkeypatch.setattr(result_files, "opened", opened(reader, tmp_path / "out"))
    words = ["--tasks=piqa,winogrande,arc_easy,lambada_openai,wikitext,piqa", f"--data={folder}"]
    program.main(["suite", "--run=x", *words])
    found = json.loads((tmp_path / "out" / "suite.json").read_text())
    rows = {row["task"]: row for row in found["rows"]}
    assert list(rows) == ["piqa", "winogrande", "arc_easy", "lambada_openai", "wikitext"]
    assert rows["piqa"]["acc"] == 0.5 == rows["piqa"]["acc_stderr"] == rows["piqa"]["chance"]
    assert rows["piqa"]["count"] == 2 and rows["piqa"]["split"] == "validation"
    assert rows["winogrande"]["acc"] == 0.0  # both continuations alike: the first is taken, the second right
    assert rows["arc_easy"]["acc"] == 1.0 and rows["arc_easy"]["split"] == "validation"  # " fire" is shorter
    assert rows["lambada_openai"]["perplexity"] == pytest.approx(math.exp(2)) and rows["lambada_openai"]["acc"] == 1.0
    assert rows["wikitext"]["split"] == "test" and [row["truncated"] for row in rows.values()] == [1, 1, 1, 1, 0]
    assert found["parameters"] == 6 and found["step"] == "7" and found["config"]["data"]["window"] == 64
    assert found["begin"] == {"token": 0, "always": False} and found["max_length"] == 64
    assert "piqa acc | winogrande acc | arc_easy acc | lambada_openai ppl | lambada_openai acc | wikitext word ppl" in (
        tmp_path / "out" / "suite.md"
    ).read_text()
    assert "| 50.0000 | 0.0000 | 100.0000 | 7.3891 | 100.0000 | " in capsys.readouterr().out
    assert (tmp_path / "out" / "suite.png").stat().st_size > 0
    reader.asked.clear()
    program.main(["suite", "--run=x", "--tasks=piqa", f"--data={folder}", "--limit=1", "--samples"])
    assert len(reader.asked) == 2
    (sample,) = map(json.loads, (tmp_path / "out" / "suite_outputs.jsonl").read_text().splitlines())
    assert sample["logprobs"] == [-54.0, -1.0] and sample["greedy"] == [False, True] and sample["right"] == 1
    assert sample["pairs"][1] == ["Question: Open it\nAnswer:", " Push."]
    row = json.loads((tmp_path / "out" / "suite.json").read_text())["rows"][0]
    assert row["count"] == 1 and row["acc_stderr"] is None


def test_perplexity_of_texts(tmp_path, monkeypatch):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("one two three")
    (tmp_path / "texts" / "b.jsonl").write_text('{"text": "four five"}\n{"text": ""}\n')
    monkeypatch.setattr(result_files, "opened", opened(Reader({}), tmp_path / "out"))
    program.main(["perplexity", "--run=x", f"--data={tmp_path / 'texts'}"])
    (row,) = json.loads((tmp_path / "out" / "perplexity.json").read_text())["rows"]
    assert row["count"] == 2 and row["byte_perplexity"] == pytest.approx(math.e)
    assert row["word_perplexity"] == pytest.approx(math.exp(22 / 5))
    assert "word_perplexity" in (tmp_path / "out" / "perplexity.md").read_text()


def test_what_is_refused(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(result_files, "opened", opened(Reader({}), tmp_path / "out"))
    with pytest.raises(SystemExit, match="none of boolq_validation is there as .jsonl"):
        program.main(["suite", "--run=x", "--tasks=piqa,boolq", f"--data={folder}"])
    assert not (tmp_path / "out").exists()
    with pytest.raises(SystemExit):
        program.main(["suite", "--run=x", "--tasks=piqa,nothing"])
    assert "'nothing' is not one of lambada_openai, piqa" in capsys.readouterr().err
    (folder / "piqa_validation.jsonl").write_text('{"goal": "x"}\n')
    with pytest.raises(SystemExit, match="piqa_validation.jsonl', line 1: no question of this task .KeyError: 'sol1'"):
        program.main(["suite", "--run=x", "--tasks=piqa", f"--data={folder}"])
    (folder / "piqa_validation.jsonl").write_text("\n")
    with pytest.raises(SystemExit, match="piqa_validation holds no question"):
        program.main(["suite", "--run=x", "--tasks=piqa", f"--data={folder}"])
    with pytest.raises(SystemExit, match=r"without --data=FOLDER .* needs datasets, .* pip install .efla_jax\[eval\]"):
        monkeypatch.setitem(sys.modules, "datasets", None)
        program.main(["suite", "--run=x", "--tasks=piqa"])


def test_the_hub_is_read_as_named(monkeypatch):
    asked = []

    def load_dataset(*named, split):
        asked.append((*named, split))
        return [ROWS["arc_easy"]] * 3

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    questions, split = tasks.read(tasks.TASKS["arc_challenge"], limit=2)
    assert len(questions) == 2 and split == "test" and asked == [("allenai/ai2_arc", "ARC-Challenge", "test")]
    with pytest.raises(ValueError, match="baber/piqa, row 0: no question of this task .KeyError: 'goal'"):
        tasks.read(tasks.TASKS["piqa"])
    assert asked[1] == ("baber/piqa", None, "validation")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["gpt2_r50k_base.tiktoken", "mistral_v1.model", "mistral_v1_tokenizer.json",
                                  "gpt_neox_20b_pii_special.json"])  # fmt: skip
def test_published_tokenizers_split_prompts_as_in_the_harness(name):
    model = pytest.importorskip("lm_eval.api.model")
    if "EFLA_DATA" not in os.environ:
        pytest.skip("EFLA_DATA names no folder of data")
    encode = load_tokenizer(TokenizerSpec(os.path.join(os.environ["EFLA_DATA"], "tokenizers", name))).encode
    harness = SimpleNamespace(backend="causal", tok_encode=lambda text: list(encode(text)))
    for task in tasks.TASKS.values():
        for question in tasks.read(task, os.path.join(os.environ["EFLA_DATA"], "evals"), 50)[0]:
            for pair in question.pairs if question.pairs[0][0] else ():
                assert split_pair(encode, *pair) == model.TemplateLM._encode_pair(harness, *pair)


STOCK = {"piqa": "piqa/piqa", "hellaswag": "hellaswag/hellaswag", "winogrande": "winogrande/default",
         "arc_easy": "arc/arc_easy", "arc_challenge": "arc/arc_challenge", "openbookqa": "openbookqa/openbookqa",
         "lambada_openai": "lambada/lambada_openai", "boolq": "super_glue/boolq/default", "sciq": "sciq/sciq",
         "social_iqa": "siqa/siqa", "wikitext": "wikitext/wikitext",
         "commonsense_qa": "commonsense_qa/default"}  # fmt: skip


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", STOCK)
def test_every_request_is_that_of_the_harness(name, tmp_path):
    """Rows of the data in the folder EFLA_DATA/evals, in lm-evaluation-harness's own task and in ours."""
    pytest.importorskip("lm_eval")
    from lm_eval.tasks import TaskManager

    from experiments import harness

    if "EFLA_DATA" not in os.environ:
        pytest.skip("EFLA_DATA names no folder of data")
    data = os.path.join(os.environ["EFLA_DATA"], "evals")
    (made,) = harness.local_tasks([name], data, str(tmp_path), TaskManager())
    (theirs,) = TaskManager(include_path=str(tmp_path)).load([made])["tasks"].values()
    limit = 300  # it takes minutes to build them all; they have been compared once, and were equal
    theirs.build_all_requests(limit=limit, rank=0, world_size=1)
    questions, _ = tasks.read(tasks.TASKS[name], data, limit)
    whole = tasks.TASKS[name].kind == "text"
    ours = [pair[1:] if whole else pair for question in questions for pair in question.pairs]
    assert ours == [tuple(one.args) for one in theirs.instances]
    assert len(ours) >= 62
    likely = {pair: float(-i % 7) for i, pair in enumerate(ours)}
    for question, (_, row) in zip(questions, theirs.doc_iterator(rank=0, limit=limit, world_size=1), strict=True):
        if whole:
            assert question.size == tuple(theirs.process_results(row, (1.0,))[key][1] for key in
                                          ("word_perplexity", "byte_perplexity"))  # fmt: skip
        elif tasks.TASKS[name].kind == "choice":
            nats = [likely[pair] - 7 for pair in question.pairs]
            scores = tasks.choice_scores(question, [Score(n, False, 1) for n in nats])
            known = theirs.process_results(row, [(n, False) for n in nats])
            assert {key: scores[key] for key in known} == known
