"""Tokens as text while they come: characters are never shown in halves, and a stop string cuts the text before it.

    stream = TextStream(tokenizer.decode, stops=("\\n\\n",))
    print(stream.add([12, 7]), end="")        # what is certain by now
    stream.stopped                            # a stop string was met: nothing more comes
    print(stream.end(), end="")               # what was held back
"""

from collections.abc import Callable, Sequence

import numpy as np

LEFT_CONTEXT = 16  # ids in front of a text that its first characters may depend on
UNFINISHED = "\ufffd"  # how decoders show bytes that are no character, or not yet


class TextStream:
    """The text of tokens that arrive a few at a time.

    decode: ids -> text, of a tokenizer. stops: strings that end the text, which is cut in front of the first of them;
    they may straddle tokens. before: ids that stand in front, whose text is known: some tokenizers drop a space at the
    front of what they decode. text: all that was shown so far; tokens: all ids so far. Raises ValueError for a stop
    string that is empty."""

    def __init__(
        self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = (), before: Sequence[int] = ()
    ):
        if any(not stop for stop in stops):
            raise ValueError(f"stops: {list(stops)} has an empty string, which would end every text at once.")
        self.decode, self.stops = decode, tuple(stops)
        self.text, self.stopped = "", False
        self._ids = [int(i) for i in before[-LEFT_CONTEXT:]]
        self._before = len(self._ids)
        # _ids[_from:_whole] are shown already, and give the others their left context.
        self._from, self._whole = 0, self._before
        self._shown = len(decode(self._ids)) if self._ids else 0  # of the characters of _ids[_from:]
        self._held = ""  # characters that may be the beginning of a stop string

    @property
    def tokens(self) -> list[int]:
        return self._ids[self._before :]

    def add(self, ids: Sequence[int] | np.ndarray) -> str:
        """What these ids add to the text, as far as no later id can change it."""
        if self.stopped or not len(ids):
            return ""
        self._ids += [int(i) for i in ids]
        window = self.decode(self._ids[self._from :])
        certain = window.rstrip(UNFINISHED)  # a character of several tokens may still become whole
        fresh = certain[self._shown :]
        self._shown = max(self._shown, len(certain))
        if certain == window:
            # The text of a token may depend on the one before it (a space at the front is dropped), but not on more.
            self._from, self._whole = self._whole, len(self._ids)
            self._shown = len(self.decode(self._ids[self._from :]))
        return self._filtered(fresh)

    def end(self) -> str:
        """What was held back, when no more ids come: unfinished characters as they are, unless a stop string is met."""
        if self.stopped:
            return ""
        last = self._filtered(self.decode(self._ids[self._from :])[self._shown :])
        if not self.stopped:
            self.text += self._held
            last, self._held = last + self._held, ""
        return last

    def _filtered(self, fresh: str) -> str:
        """`fresh` behind what was held, without a stop string and what follows it, and without what may become one."""
        text = self._held + fresh
        places = [place for stop in self.stops if (place := text.find(stop)) >= 0]
        if places:
            self.stopped, self._held, text = True, "", text[: min(places)]
        else:
            longest = max((overlap(text, stop) for stop in self.stops), default=0)
            self._held, text = text[len(text) - longest :], text[: len(text) - longest]
        self.text += text
        return text


def overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` are the beginning of `stop`, and not all of it."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
