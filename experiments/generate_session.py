"""A conversation with a language model in the terminal: the text grows by what is typed and by what the model says.

What was read stays in the cache, so that a turn costs what it adds, however long the text is by then.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from efla_jax.generate import Prefix, snapshot, stream_of
from experiments.generation import Generator, show_in_terminal

HELP = """\
What you type is added to the text, and the model goes on. A line that ends in \\ goes on in the next one; an empty
line lets the model say more; a line that begins with // begins with /.
  /reset             forget the text            /undo    back to before the last turn
  /again             the last turn anew         /text    the text so far
  /save FILE         keep the text, read, in a file
  /load FILE         go on from such a file
  /set NAME VALUE    temperature, top_k, top_p, seed or max_tokens
  /help   /quit      (or the end of input)"""
SETTINGS = {"temperature": float, "top_k": int, "top_p": float, "seed": int, "max_tokens": int}


class Turn(NamedTuple):
    """Where the text stands: what is read, ids that are not read yet, all ids, and all of the text."""

    prefix: Prefix | None = None
    pending: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    text: str = ""


class Session:
    """One text. `say` takes a line of input and returns whether there is to be another one."""

    def __init__(self, generator: Generator, write: Callable[[str], object] = lambda text: show_in_terminal(0, text)):
        self.generator, self.write = generator, write
        self.now = Turn()
        self.before: tuple[Turn, str] | None = None  # what /undo and /again go back to, and the line that followed
        self.stream = 0  # of random numbers; every turn has its own

    def say(self, line: str) -> bool:
        """Do what a line asks for. Errors are written, and leave the text as it was."""
        try:
            if line.startswith("/") and not line.startswith("//"):
                name, _, rest = line[1:].partition(" ")
                return self.command(name, rest.strip())
            self.turn(line.removeprefix("/") if line.startswith("//") else line)
        except (ValueError, FloatingPointError, OSError) as error:
            self.write(f"error: {error}\n")
        except KeyboardInterrupt:  # while it was reading
            self.write("\n")
        return True

    def turn(self, line: str) -> None:
        """Add a line to the text and let the model go on."""
        start, generator = self.now, self.generator
        ids = generator.encode(line, first=not start.tokens) if line or not start.tokens else []
        read = generator.read([[*start.pending, *ids]], start.prefix)
        before = [[*start.tokens, *ids]]
        streams = [stream_of(before[0], self.stream)]
        answer = generator.answers(read, before, streams, keep=True, show=self.show, interruptible=True)[0]
        self.write("\n")
        said = tuple(generator.tokens_of(answer))
        self.now = Turn(read, said, (*before[0], *said), start.text + line + answer.text)
        self.before = start, line
        self.stream += 1

    def show(self, row: int, text: str) -> None:
        self.write(text)

    def settled(self) -> Turn:
        """The text with nothing left to read."""
        if self.now.pending:
            self.now = self.now._replace(
                prefix=self.generator.read([self.now.pending], self.now.prefix), pending=()
            )
        return self.now

    def command(self, name: str, rest: str) -> bool:
        """Run a command; False for /quit. Raises ValueError for what is none."""
        if name == "quit":
            return False
        if name == "help":
            self.write(HELP + "\n")
        elif name == "text":
            self.write(f"{self.now.text}\n({len(self.now.tokens)} tokens)\n")
        elif name == "reset":
            self.now, self.before, self.stream = Turn(), None, 0
        elif name in ("undo", "again"):
            if self.before is None:
                raise ValueError(f"/{name}: there is no turn to go back to.")
            (self.now, line), self.before = self.before, None
            if name == "again":
                self.turn(line)
        elif name in ("save", "load"):
            if not rest:
                raise ValueError(f"/{name}: name a file, as in /{name} text.npz.")
            (self.save if name == "save" else self.load)(Path(rest))
        elif name == "set":
            self.set(rest)
        else:
            raise ValueError(f"/{name} is no command; /help lists them, and // begins a line with /.")
        return True

    def save(self, file: Path) -> None:
        turn = self.settled()
        if turn.prefix is None:
            raise ValueError("/save: there is no text yet.")
        snapshot.save(file, turn.prefix, self.generator.identity, [turn.tokens])
        self.write(f"{len(turn.tokens)} tokens are in {file}\n")

    def load(self, file: Path) -> None:
        prefix, tokens = snapshot.load(file, self.generator.run.model, self.generator.identity)
        self.now, self.before = opened(prefix, tokens, self.generator), None
        self.write(f"the text has {len(self.now.tokens)} tokens\n")

    def set(self, rest: str) -> None:
        name, _, value = rest.partition(" ")
        if name not in SETTINGS:
            raise ValueError(f"/set {name}: not one of {', '.join(SETTINGS)}.")
        try:
            number = SETTINGS[name](value)
        except ValueError:
            raise ValueError(f"/set {name}: {value!r} is not a number of the kind.") from None
        if name == "max_tokens":
            if number < 1:
                raise ValueError(f"/set max_tokens: {number} is not positive.")
            self.generator.max_tokens = int(number)
        else:
            choice = self.generator.choice._replace(**{name: number})
            choice.check(self.generator.run.model.vocab_size)
            self.generator.choice, self.stream = choice, 0


def opened(prefix: Prefix, tokens: list[list[int]] | None, generator: Generator) -> Turn:
    """The turn behind a snapshot of one row."""
    if len(prefix.length) != 1 or tokens is None:
        raise ValueError("the snapshot is not of one text with its ids; a conversation needs one that /save wrote.")
    return Turn(prefix, (), tuple(tokens[0]), generator.run.tokenizer.decode(tokens[0]))


def typed_lines(ask: Callable[[str], str]) -> Iterator[str]:
    """Lines from `ask`, those that end in a backslash joined to the next by a line break, until there are no more."""
    parts: list[str] = []
    while True:
        try:
            line = ask("... " if parts else "> ")
        except EOFError:
            if parts:
                yield "\n".join(parts)
            return
        except KeyboardInterrupt:  # of a line that is being typed: begin it anew
            sys.stdout.write("\n")
            parts = []
            continue
        if line.endswith("\\"):
            parts.append(line[:-1])
            continue
        yield "\n".join([*parts, line])
        parts = []


def converse(generator: Generator, start: Turn) -> None:
    """The session of a terminal, or of lines on standard input."""
    session = Session(generator)
    session.now = start
    quiet = not sys.stdin.isatty()
    if not quiet:
        try:
            import readline  # noqa: F401  # arrow keys and earlier lines in input(), where Python was built with it
        except ImportError:
            pass
        print("Type a text to go on from; /help lists commands.")
    for line in typed_lines(lambda prompt: input("" if quiet else prompt)):
        if not session.say(line):
            return
