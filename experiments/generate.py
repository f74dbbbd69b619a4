r"""Text from a trained or converted language model: in conversation, of one prompt, or of a file of prompts.

    python -m experiments.generate --run=runs/lm                                         # a conversation; /help
    python -m experiments.generate --run=runs/lm --prompt="Once upon a time" --temperature=0.8 --top_p=0.95
    python -m experiments.generate --run=runs/lm --prompts=questions.jsonl --out=answers.jsonl --stop="\n" --samples=4

A long text is read in pieces, in the memory of one piece, once, and used from its file as often as wanted:

    python -m experiments.generate --run=runs/lm --prompt_file=manual.txt --save=manual.npz
    python -m experiments.generate --run=runs/lm --load=manual.npz --prompt="Question: ..."
    python -m experiments.generate --run=runs/lm --load=manual.npz --prompts=questions.jsonl --out=answers.jsonl

A text ends at a stop token (EOS; --ignore_eos), in front of a --stop string (several are allowed; \n and \t are
understood), or after --max_tokens. The same prompt, seed and sample give the same text beside whatever other prompts,
up to the rounding of programs of other batch sizes. An interrupted --prompts goes on with the same command line.
"""

import argparse
import contextlib
import json
import pathlib
import sys

import jax

from efla_jax.generate import BLOCK, PIECE, Choice, Prefix, snapshot, stream_of
from experiments import generate_batch, generate_session
from experiments.generation import Generator, repeated, show_in_terminal, stop_tokens
from experiments.language_runs import open_run, positive
from experiments.usage import reason


def unescaped(text: str) -> str:
    r"""A stop string with \n, \t and \\ as they are meant."""
    return text.replace("\\\\", "\0").replace("\\n", "\n").replace("\\t", "\t").replace("\0", "\\")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    whole = argparse.ArgumentParser(
        prog="python -m experiments.generate", allow_abbrev=False, description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    whole.add_argument("--run", type=pathlib.Path, required=True, help="folder of a run, or of one of its steps")
    whole.add_argument("--tokenizer", default="", help="that of the run's data, where it does not lie with the run")
    for name in ("eos", "bos", "pattern"):
        whole.add_argument(f"--{name}", default="", help="as of prepare_data, where the checkpoint does not say it")
    what = whole.add_mutually_exclusive_group()
    what.add_argument("--prompt", help="a text to go on from")
    what.add_argument("--prompt_file", type=pathlib.Path, help="a file that holds one")
    what.add_argument("--prompts", type=pathlib.Path, help='.jsonl with "prompt" in each line, or .txt, one a line')
    whole.add_argument("--out", type=pathlib.Path, help="of --prompts: the .jsonl file of the answers")
    whole.add_argument("--overwrite", action="store_true", help="begin --out anew instead of going on with it")
    whole.add_argument("--samples", type=positive, default=1, help="texts of each prompt")
    whole.add_argument("--batch_size", type=positive, default=16, help="rows at once")
    whole.add_argument("--load", type=pathlib.Path, help="snapshot that stands in front of every prompt")
    whole.add_argument("--save", type=pathlib.Path, help="file for a snapshot of the prompt; nothing is generated")
    whole.add_argument("--max_tokens", type=positive, default=256, help="most tokens of a text")
    whole.add_argument("--temperature", type=float, default=1.0, help="0 takes the most likely token")
    whole.add_argument("--top_k", type=int, default=0, help="draw from so many most likely tokens; 0: no limit")
    whole.add_argument("--top_p", type=float, default=1.0, help="draw from the fewest tokens of this probability")
    whole.add_argument("--seed", type=int, default=0, help="of what is drawn")
    whole.add_argument("--stop", action="append", default=[], help="string that ends a text; may be given again")
    whole.add_argument("--ignore_eos", action="store_true", help="go on behind EOS")
    whole.add_argument("--piece", type=positive, default=PIECE, help="tokens of each prompt that are read at a time")
    whole.add_argument("--block", type=positive, default=BLOCK, help="tokens between two looks at the texts")
    return whole


def check_options(chosen: argparse.Namespace) -> None:
    """Raise ValueError for options that do not go together, before anything is loaded."""
    if chosen.prompts and not chosen.out:
        raise ValueError("--out: missing; name the .jsonl file for the answers to --prompts.")
    if not chosen.prompts and (chosen.out or chosen.overwrite):
        raise ValueError("--out and --overwrite go with --prompts only.")
    if chosen.prompts and chosen.out.exists() and chosen.prompts.exists() and chosen.out.samefile(chosen.prompts):
        raise ValueError(f"--out={chosen.out}: is the file of --prompts, which would be lost; name another.")
    if chosen.save and chosen.prompt is None and chosen.prompt_file is None:
        raise ValueError("--save: needs a --prompt or --prompt_file to read; in a conversation, /save does it.")
    if chosen.save and (chosen.save.is_dir() or any(map(pathlib.Path.is_file, chosen.save.parents))):
        raise ValueError(f"--save={chosen.save}: no file can be written there; name one, such as prompt.npz.")
    if chosen.samples > 1 and chosen.prompt is None and not chosen.prompts and not chosen.prompt_file:
        raise ValueError("--samples goes with prompts; in a conversation, /again gives another text.")


def choice_of(chosen: argparse.Namespace) -> Choice:
    """How tokens are chosen, as far as it can be said without the run."""
    choice = Choice(chosen.temperature, chosen.top_k, chosen.top_p, seed=chosen.seed)
    choice.check(1)
    return choice


def stop_strings(chosen: argparse.Namespace) -> tuple[str, ...]:
    """The strings that end a text."""
    if "" in chosen.stop:
        raise ValueError("--stop: an empty string would end every text at once; leave it out.")
    return tuple(unescaped(stop) for stop in chosen.stop)


def made(chosen: argparse.Namespace) -> Generator:
    """The run and how it is to speak. What it prints about itself goes where errors go, beside the text."""
    choice, strings = choice_of(chosen), stop_strings(chosen)  # before what takes long
    with contextlib.redirect_stdout(sys.stderr):
        run = open_run(chosen)
    stops = () if chosen.ignore_eos else stop_tokens(run)
    choice = choice._replace(stop_tokens=stops, vocabulary=min(run.tokenizer.vocab_size, run.model.vocab_size))
    return Generator(run, choice, strings, chosen.max_tokens, chosen.piece, chosen.block)


def text_of(chosen: argparse.Namespace) -> str | None:
    """The one prompt, if there is one."""
    if not chosen.prompt_file:
        return chosen.prompt
    try:
        return chosen.prompt_file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--prompt_file={chosen.prompt_file}: cannot be read ({reason(error)}).") from None


def one_prompt(
    chosen: argparse.Namespace, generator: Generator, text: str, prefix: Prefix | None, context: list[int]
) -> int:
    """Continue a text, --samples times, or read it and save what was read."""
    ids = generator.encode(text, first=prefix is None)
    whole = [*context, *ids]
    if chosen.save:
        read = generator.read([ids], prefix)
        try:
            snapshot.save(chosen.save, read, generator.identity, [whole])
        except OSError as error:
            raise ValueError(f"--save={chosen.save}: cannot be written ({reason(error)}).") from None
        print(f"{len(whole)} tokens are in {chosen.save}", file=sys.stderr)
        return 0
    if chosen.samples == 1:
        read, streams = generator.read([ids], prefix), [stream_of(whole, 0)]
        answer = generator.answers(read, [whole], streams, show=show_in_terminal)[0]
        print(flush=True)
        first, rate = generator.timing
        speed = f", {rate:.1f} tokens/s" if rate else ""  # of those behind the first, if there are any
        print(f"({len(answer.tokens)} tokens, {answer.finish}, {first:.2f} s to the first{speed})", file=sys.stderr)
        return 0
    size = min(chosen.batch_size, chosen.samples)
    read = generator.read([ids], prefix)
    for start in range(0, chosen.samples, size):
        streams = [stream_of(whole, number) for number in range(start, start + size)]
        rows = min(size, chosen.samples - start)
        answers = generator.answers(repeated(read, size), [whole] * rows, streams, keep=size == 1)
        for number, answer in enumerate(answers, start):
            print(json.dumps({"sample": number, "text": answer.text, "finish": answer.finish}, ensure_ascii=False))
    return 0


def speak(chosen: argparse.Namespace) -> int:
    """What the command line asks for; the number of texts that could not be had."""
    check_options(chosen)
    prompts, text = generate_batch.read_prompts(chosen.prompts) if chosen.prompts else None, text_of(chosen)
    if chosen.load and not chosen.load.is_file():
        raise ValueError(f"--load={chosen.load}: there is no such file; --save writes one.")
    generator = made(chosen)
    prefix, context = None, []
    with jax.default_matmul_precision(generator.run.precision):
        if chosen.load:
            prefix, tokens = snapshot.load(chosen.load, generator.run.model, generator.identity)
            if tokens is None or len(tokens) != 1:
                raise ValueError(f"--load={chosen.load}: not the snapshot of one text; make it with --save.")
            context = tokens[0]
        if prompts is not None:
            failed = generate_batch.run_batch(
                generator, prompts, chosen.out, samples=chosen.samples, batch_size=chosen.batch_size, prefix=prefix,
                context=context, overwrite=chosen.overwrite,
            )  # fmt: skip
            print(f"written: {chosen.out}", file=sys.stderr)
            return failed
        if text is not None:
            return one_prompt(chosen, generator, text, prefix, context)
        start = generate_session.Turn()
        if prefix is not None:
            start = generate_session.opened(prefix, [context], generator)
        generate_session.converse(generator, start)
    return 0


def main(words: list[str] | None = None) -> None:
    """Run a command line (None: the program's); what is wrong with input, files or numbers is one line, status 1."""
    chosen = parser().parse_args(words)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character must not end the text
    try:
        failed = speak(chosen)
    except KeyboardInterrupt:
        raise SystemExit("interrupted; the same command line goes on where there is an --out") from None
    except (ValueError, FloatingPointError, OSError, ImportError, NotImplementedError) as error:
        raise SystemExit(f"error: {error}") from None
    if failed:
        raise SystemExit(f"error: {failed} texts could not be had; their lines in --out say why. Start again to retry.")


if __name__ == "__main__":
    main()
