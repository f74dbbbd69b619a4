"""The adapter to lm-evaluation-harness: on stand-ins with its call signatures, and on the library if it is there."""

import json
import sys
import types
from types import SimpleNamespace

import numpy as np
import pytest

from efla_jax.data.tokenizer import TokenizerSpec, load_tokenizer
from efla_jax.scoring import Scorer
from experiments import evaluate as program
from experiments import harness, language_runs, result_files, tasks
from tests.test_scoring import Constant, Successor

BYTES = load_tokenizer(TokenizerSpec())


class Hook:
    """What the harness keeps results with."""

    def __init__(self):
        self.kept = []

    def add_partial(self, name, request, result):
        self.kept.append((name, request, result))


@pytest.fixture
def signatures(monkeypatch):
    """Modules with the names and calls of lm_eval 0.4 that the adapter uses; the real ones stand aside."""
    class TemplateLM:
        def __init__(self):
            self.cache_hook = Hook()

    parts = {name: types.ModuleType(name) for name in ("lm_eval", "lm_eval.api", "lm_eval.api.model")}
    parts["lm_eval.api.model"].TemplateLM = TemplateLM
    for name, module in parts.items():
        monkeypatch.setitem(sys.modules, name, module)


def asked(*arguments):
    return [SimpleNamespace(args=one) for one in arguments]


def test_requests_are_put_to_the_scorer(signatures):
    scorer = Scorer(Successor(), {}, BYTES)
    model = harness.adapter(scorer)
    found = model.loglikelihood(asked(("a", "bc"), ("a", "c"), ("", "\1\2")))
    assert [greedy for _, greedy in found] == [True, False, True]
    assert [nats for nats, _ in found] == pytest.approx([0, -100, 0], abs=1e-6)
    assert model.cache_hook.kept[1][:2] == ("loglikelihood", ("a", "c"))
    (nats,) = model.loglikelihood_rolling(asked(("\1\2\4",)))
    assert nats == pytest.approx(-100) and model.cache_hook.kept[-1] == ("loglikelihood_rolling", ("\1\2\4",), nats)
    rows = model._loglikelihood_tokens([(("", ""), [97], [98, 99]), (("", ""), [97], [99])], disable_tqdm=True)
    assert rows == [(pytest.approx(0, abs=1e-6), True), (pytest.approx(-100), False)]
    assert model.eot_token_id == model.prefix_token_id == 0 and model.tok_encode("ab") == [97, 98]
    assert model.tok_decode([97, 98]) == "ab" and model.tok_decode(97) == "a" and model.tokenizer_name == "bytes"
    assert model.max_length > 1 << 20 and harness.adapter(Scorer(Successor(), {}, BYTES, max_length=9)).max_length == 9


def test_texts_are_generated_in_groups_and_come_back_in_order(signatures):
    model = harness.adapter(Scorer(Successor(), {}, BYTES))
    greedy = {"do_sample": False, "temperature": 0.0}
    said = model.generate_until(asked(
        ("a", {"until": ["e"], "max_gen_toks": 9, **greedy}), ("A", {"until": [], "max_new_tokens": 3}),
        ("b", {"until": "e", "max_gen_toks": 9}),
    ))  # fmt: skip
    assert said == ["bcd", "BCD", "cd"]
    assert [result for _, _, result in model.cache_hook.kept] == said
    assert harness.generation({}) == ((), 256)
    for wrong in ({"do_sample": True}, {"num_beams": 4}):
        with pytest.raises(ValueError, match="decoding is greedy here"):
            model.generate_until(asked(("a", wrong)))


def test_without_the_library_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ImportError, match=r"pip install 'efla_jax\[eval\]'"):
        harness.adapter(None)


def test_rows_of_results():
    results = {"piqa_local": {"alias": "piqa", "acc,none": 0.5, "acc_stderr,none": 0.1, "acc_norm,none": 0.25,
                              "acc_norm_stderr,none": "N/A"}}  # fmt: skip
    first, second = harness.rows_of(results, {"piqa_local": {"original": 9, "effective": 4}})
    assert first == {"task": "piqa", "filter": "none", "metric": "acc", "score": 0.5, "stderr": 0.1, "count": 4}
    assert second["metric"] == "acc_norm" and np.isnan(second["stderr"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_harness_itself_scores_as_the_suite_does(tmp_path, monkeypatch):
    """Both commands, the same requests, journals apart: every score, and its error, is the same."""
    pytest.importorskip("lm_eval")
    words = ("tea", "a hat", "banana", "aaaa", "an arc")
    rows = [{"goal": f"Take {a}", "sol1": f"{b} {a}", "sol2": a, "label": i % 2}
            for i, (a, b) in enumerate((a, b) for a in words for b in words)]  # fmt: skip
    pages = [{"page": " \n = A = \n banana and a hat , a \n"}, {"page": " \n = B = \n aaa aaa"}]
    passages = [{"text": f"Take a {word}"} for word in words]
    for name, some in (("piqa_validation", rows), ("wikitext_test", pages), ("lambada_openai_test", passages)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    config = {"data": {"window": 0}, "train": {}}

    def opened(chosen, name):
        run = language_runs.Trained(Constant(), {}, tmp_path, "highest", BYTES, config, "1")
        return run, Scorer(Constant(), {}, BYTES), tmp_path

    monkeypatch.setattr(result_files, "opened", opened)
    options = ["--run=x", f"--data={tmp_path}", "--tasks=piqa,wikitext,lambada_openai"]
    program.main(["suite", *options])
    program.main(["harness", *options])
    ours = {row["task"]: row for row in json.loads((tmp_path / "suite.json").read_text())["rows"]}
    theirs = json.loads((tmp_path / "harness.json").read_text())["rows"]
    assert {(row["task"], row["metric"]) for row in theirs} >= {
        ("piqa", "acc"), ("piqa", "acc_norm"), ("wikitext", "word_perplexity"), ("wikitext", "bits_per_byte"),
        ("lambada_openai", "perplexity"), ("lambada_openai", "acc"),
    }  # fmt: skip
    for row in theirs:
        assert row["score"] == pytest.approx(ours[row["task"]][row["metric"]], rel=1e-6)
        if row["metric"].startswith("acc"):  # of perplexities it draws the errors, or has none
            assert row["stderr"] == pytest.approx(ours[row["task"]][f"{row['metric']}_stderr"])
    assert 0 < ours["piqa"]["acc"] < 1 and tasks.TASKS["piqa"].headline == "acc"


COUNTING = """
task: counting
dataset_path: json
dataset_kwargs: {data_files: {test: "%s"}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["#"], do_sample: false, max_gen_toks: 3}
metric_list:
  - metric: exact_match
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_task_file_of_ones_own_with_generated_answers(tmp_path, monkeypatch):
    pytest.importorskip("lm_eval")
    rows = [{"question": "a", "answer": "bcd"}, {"question": "Q: A", "answer": "BCD"}, {"question": "x", "answer": "a"},
            {"question": " ", "answer": "!\""}]  # fmt: skip
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "counting.yaml").write_text(COUNTING % (tmp_path / "rows.jsonl"))

    def opened(chosen, name):
        run = language_runs.Trained(Successor(), {}, tmp_path, "highest", BYTES, {}, "1")
        return run, Scorer(Successor(), {}, BYTES), tmp_path

    monkeypatch.setattr(result_files, "opened", opened)
    program.main(["harness", "--run=x", "--tasks=counting", f"--include_path={tmp_path / 'tasks'}"])
    (row,) = json.loads((tmp_path / "harness.json").read_text())["rows"]
    assert (row["task"], row["metric"], row["score"], row["count"]) == ("counting", "exact_match", 0.75, 4)
    program.main(["harness", "--run=x", "--tasks=counting", f"--include_path={tmp_path / 'tasks'}", "--limit=2"])
    (row,) = json.loads((tmp_path / "harness.json").read_text())["rows"]
    assert row["score"] == 1.0 and row["count"] == 2
