r"""lm-evaluation-harness on a trained language model: its tasks and metrics, our scores.

    python -m experiments.evaluate harness --run=runs/lm --tasks=piqa,arc_easy,wikitext --num_fewshot=0
    python -m experiments.evaluate harness --run=runs/lm --tasks=piqa,arc_easy --data=evals     # local files, no hub

Needs the extra eval (`pip install efla_jax[eval]`). Writes harness.json and harness.md; what is scored is kept in
harness.journal.jsonl, and the same command goes on from it. --include_path names a folder of further task files.

    model = adapter(scorer)                        # a TemplateLM: for lm_eval.simple_evaluate(model=model, ...)
"""

import argparse
import os
import pathlib
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from efla_jax.data import readers
from efla_jax.scoring import Row, Scorer
from experiments import language_runs, result_files, tasks

MAX_NEW_TOKENS = 256  # where a task does not say, as in the harness
NAMES_OF_MAX = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
OF_SAMPLING = ("temperature", "top_p", "top_k")  # these mean nothing where nothing is drawn
LOCAL = "_local"  # behind the harness's name of a task that reads local files


def generation(options: Mapping[str, Any]) -> tuple[tuple[str, ...], int]:
    """(stop strings, most tokens) of a request's options. Raises ValueError for one that asks for more than greedy
    decoding."""
    for name, value in options.items():
        if name not in (*NAMES_OF_MAX, *OF_SAMPLING, "until", "do_sample") or (name == "do_sample" and value):
            raise ValueError(f"generation option {name}={value!r}: decoding is greedy here, up to stop strings `until`"
                             " and max_gen_toks; leave it out of the task file.")  # fmt: skip
    until = options.get("until") or []
    most = next((int(options[name]) for name in NAMES_OF_MAX if options.get(name) is not None), MAX_NEW_TOKENS)
    return tuple([until] if isinstance(until, str) else until), most


class Requests:
    """What the harness calls of a model. Pairs are split, begun and cut by the scorer; only the tasks are its own."""

    backend = "causal"

    def __init__(self, scorer: Scorer):
        super().__init__()
        self.scorer = scorer

    @property
    def eot_token_id(self) -> int:
        return self.scorer.tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        return self.scorer.begin.token

    @property
    def max_length(self) -> int:
        return self.scorer.max_length or 1 << 30

    @property
    def max_gen_toks(self) -> int:
        return MAX_NEW_TOKENS

    @property
    def tokenizer_name(self) -> str:
        return self.scorer.tokenizer.sha256

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_) -> list[int]:
        return list(self.scorer.tokenizer.encode(string))

    def tok_decode(self, tokens, **_) -> str:
        return self.scorer.tokenizer.decode([tokens] if isinstance(tokens, int) else list(tokens))

    def loglikelihood(self, requests, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        scores = self.scorer.loglikelihood([one.args for one in requests])
        return self.kept("loglikelihood", requests, [(score.logprob, score.greedy) for score in scores])

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
        scores = self.scorer.rolling([one.args[0] for one in requests])
        return self.kept("loglikelihood_rolling", requests, [score.logprob for score in scores])

    def _loglikelihood_tokens(self, requests, **_) -> list[tuple[float, bool]]:
        rows = [Row(np.array([*context, *after], np.int32), len(after)) for _, context, after in requests]
        return [(score.logprob, score.greedy) for score in self.scorer.score(rows, "loglikelihood")]

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        groups = defaultdict(list)
        for number, one in enumerate(requests):
            groups[generation(one.args[1])].append(number)
        said: dict[int, str] = {}
        for (until, most), members in groups.items():
            texts = self.scorer.generate([requests[number].args[0] for number in members], until, most)
            said.update(zip(members, texts, strict=True))
        return self.kept("generate_until", requests, [said[number] for number in range(len(requests))])

    def kept(self, name: str, requests, results: list) -> list:
        """The results, after the harness's own cache has been told of them."""
        for one, result in zip(requests, results, strict=True):
            self.cache_hook.add_partial(name, one.args, result)
        return results


def adapter(scorer: Scorer):
    """A TemplateLM of lm-evaluation-harness that puts its requests to the scorer."""
    readers.optional("lm_eval", "the command harness", "eval")
    from lm_eval.api.model import TemplateLM

    class ScoredModel(Requests, TemplateLM):
        pass

    return ScoredModel(scorer)


def local_tasks(names: list[str], data: str, folder: str, manager) -> list[str]:
    """Task files in `folder` that read the files of `data` and are else the harness's own; their names."""
    import yaml

    made = []
    for name in names:
        if name not in tasks.TASKS:
            raise ValueError(f"--tasks: {name!r} has no local files here; known are {', '.join(tasks.TASKS)}. Leave"
                             " --data out to read the hub, or write a task file and give --include_path.")  # fmt: skip
        file = tasks.local_file(tasks.TASKS[name], data).resolve()
        split = tasks.split_of(file)
        own = {"include": str(manager.task_index[name].yaml_path), "task": f"{name}{LOCAL}", "dataset_path": "json",
               "dataset_name": None, "dataset_kwargs": {"data_files": {split: str(file)}}, "training_split": None,
               "validation_split": split if split == "validation" else None,
               "test_split": split if split == "test" else None, "tag": None}  # fmt: skip
        pathlib.Path(folder, f"{name}.yaml").write_text(yaml.safe_dump(own, sort_keys=False))
        made.append(own["task"])
    return made


def rows_of(results: Mapping[str, Mapping[str, Any]], counts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """{"task", "filter", "metric", "score", "stderr", "count"} of each metric of the harness's results."""
    rows = []
    for task, scores in results.items():
        for key, score in scores.items():
            metric, _, part = key.partition(",")
            if isinstance(score, int | float) and part and not metric.endswith("_stderr"):
                error = scores.get(f"{metric}_stderr,{part}")
                rows.append({"task": task.removesuffix(LOCAL), "filter": part, "metric": metric, "score": float(score),
                             "stderr": float(error) if isinstance(error, int | float) else float("nan"),
                             "count": counts.get(task, {}).get("effective", 0)})  # fmt: skip
    return rows


def harness(chosen: argparse.Namespace) -> None:
    """OUT/harness.json, .md."""
    # Both are read by lm_eval: errors by drawing would fork a process that has threads; local files need no hub.
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    if chosen.data:
        os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
    lm_eval = readers.optional("lm_eval", "the command harness", "eval")
    from lm_eval.tasks import TaskManager

    run, scorer, out = result_files.opened(chosen, "harness")
    with tempfile.TemporaryDirectory() as folder, jax.default_matmul_precision(run.precision):
        paths, names = [chosen.include_path] if chosen.include_path else [], chosen.tasks.split(",")
        if chosen.data:
            names = local_tasks(names, chosen.data, folder, TaskManager(include_path=paths or None))
            paths.append(folder)
        found = lm_eval.simple_evaluate(
            model=adapter(scorer), tasks=names, num_fewshot=chosen.num_fewshot, limit=chosen.limit or None,
            bootstrap_iters=chosen.bootstrap, task_manager=TaskManager(include_path=paths or None), log_samples=False,
        )  # fmt: skip
    rows = rows_of(found["results"], found.get("n-samples", {}))
    table = result_files.markdown(rows)
    about = result_files.about(chosen, run, scorer)
    about |= {"lm_eval": lm_eval.__version__, "versions": found.get("versions", {})}
    result_files.write(out, "harness", about, rows, table)
    print(f"{table}\n\nwritten: {out / 'harness'}.json, .md")


def add_commands(commands) -> None:
    """The command `harness` of experiments.evaluate."""
    parents = [language_runs.run_arguments(), language_runs.scoring_arguments()]
    one = commands.add_parser("harness", parents=parents, allow_abbrev=False, help="lm-evaluation-harness")
    one.set_defaults(command=harness)
    one.add_argument("--tasks", required=True, help="the harness's names, with commas between them")
    one.add_argument("--data", default="", help="folder of local files for tasks of the command suite; the hub without")
    one.add_argument("--num_fewshot", type=int, default=None, help="examples in front; the task's by default")
    one.add_argument("--include_path", default="", help="folder of further task files")
    one.add_argument("--bootstrap", type=int, default=100, help="draws for errors that have no formula; 0: no errors")
