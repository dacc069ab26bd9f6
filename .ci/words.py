"""Find words that have a standard term: python .ci/words.py FILE...

Looks at Markdown, at notebooks, and at the strings and comments of Python
files. Prints a line for each place, and ends with status 1 if there is one.
The words are in words.txt. Only the standard library.
"""

import io
import json
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

LIST = Path(__file__).with_name("words.txt")
TEXT_TOKENS = {tokenize.STRING, tokenize.COMMENT,
               getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}


@dataclass(frozen=True)
class Word:
    """A pattern that no text may match, and what to write instead."""

    pattern: re.Pattern[str]
    instead: str


def read_words() -> list[Word]:
    """Return the words of the list."""
    words = []
    for line in LIST.read_text("utf-8").splitlines():
        if line and not line.startswith("#"):
            pattern, instead = line.split("\t")
            words.append(Word(re.compile(pattern, re.IGNORECASE), instead))
    return words


def read_texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line number, text) of what people read in a file."""
    source = path.read_text("utf-8")
    if path.suffix == ".md":
        yield 1, source
    elif path.suffix == ".ipynb":
        for number, cell in enumerate(json.loads(source)["cells"], 1):
            yield number, "".join(cell["source"])
    elif path.suffix == ".py":
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        for token in tokens:
            if token.type in TEXT_TOKENS:
                yield token.start[0], token.string


def find_words(path: Path, words: list[Word]) -> Iterator[str]:
    """Yield a line for each word in a file: where it is, what to write.

    A line's number is that of the cell in a notebook.
    """
    for first, text in read_texts(path):
        for word in words:
            for found in word.pattern.finditer(text):
                line = first
                if path.suffix != ".ipynb":
                    line += text.count("\n", 0, found.start())
                yield f"{path}:{line}: {found[0]!r}: write {word.instead}"


def main() -> int:
    """Search the files that the command line names; return the status."""
    words = read_words()
    lines = [line for name in sys.argv[1:]
             for line in find_words(Path(name), words)]
    for line in lines:
        print(line)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
