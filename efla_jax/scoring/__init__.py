"""Log-likelihoods and greedy continuations of text under a language model: what benchmarks ask of it.

    scorer = Scorer(model, params, tokenizer)
    scorer.loglikelihood([("The sky is", " blue"), ("The sky is", " green")])    # [Score(logprob, greedy, tokens), ...]
    scorer.rolling(["a whole document ..."])                                     # every token of it, once
    scorer.generate(["Question: ...\nAnswer:"], until=["\n"], max_new_tokens=32)

`rows` scores tokens, `scorer` turns text into rows, `journal` keeps results, so that an evaluation can be resumed.
"""

from efla_jax.scoring.journal import Journal
from efla_jax.scoring.rows import Row, Score, row_scores, windows
from efla_jax.scoring.scorer import POLICIES, Beginning, Scorer, beginning, fingerprint, split_pair

__all__ = [
    "POLICIES", "Beginning", "Journal", "Row", "Score", "Scorer", "beginning", "fingerprint", "row_scores",
    "split_pair", "windows",
]
