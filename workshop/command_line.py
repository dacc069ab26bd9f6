"""Command lines: what is wrong with one is said in one line.

Only the standard library, from Python 3.9 on.
"""

import argparse

from workshop.errors import UserError


class Parser(argparse.ArgumentParser):
    """One whose errors are `UserError`s.

    after: whose words follow --, as in "the script's own"; "" if there are
    none. passes_on: whether these are also what the parser does not know.
    """

    after, passes_on = "", False

    def error(self, message):
        raise UserError(f"{message}: see {self.prog} --help")

    def parse(self, words):
        """What the words say; `flags` has those that follow --."""
        end = (words.index("--") if self.after and "--" in words
               else len(words))
        args, unknown = self.parse_known_args(words[:end])
        if unknown and not self.passes_on:
            self.error(f"unrecognized arguments: {' '.join(unknown)}"
                       + f": {self.after} come after --" * bool(self.after))
        args.flags = unknown + words[end + 1:]
        return args
