"""Command lines of several commands; what is wrong with one is one line.

Only the standard library, from Python 3.9 on.
"""

import argparse
import importlib
import os
import sys
import textwrap

from rankcheck.system.errors import UserError


class Parser(argparse.ArgumentParser):
    """One whose errors are `UserError`s."""

    after = ""  # whose words follow --, as in "the script's own", if any
    passes_on = False  # whether these are also what the parser does not know

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
        for name, value in vars(args).items():  # a shell leaves it in -o=~/x
            if isinstance(value, str):
                setattr(args, name, os.path.expanduser(value))
        args.flags = unknown + words[end + 1:]
        return args


def parse(program, about, groups, hidden=()):
    """What the command line says; `function` is the command's.

    groups: {title: {command: (its module, what it does)}}; hidden: the same
    of commands that --help does not show, and of "", no command at all. A
    module has `main(args)`, which returns the exit status, and
    `add_arguments(parser)` if it takes any; named with a command, as in
    module:diff, `diff` and `add_diff`. It is imported when that is called.
    """
    command, *words = sys.argv[1:] or ["" if "" in hidden else "--help"]
    if command in ("-h", "--help"):
        print(f"usage: {program} COMMAND ...\n\n{textwrap.fill(about, 79)}")
        for title, commands in groups.items():
            print(f"\n{title}:")
            for name, (_, text) in commands.items():
                print(textwrap.fill(text, 79, initial_indent=f"  {name:10}",
                                    subsequent_indent=12 * " "))
        sys.exit()
    known = dict(hidden)
    for commands in groups.values():
        known.update(commands)
    if command not in known:
        raise UserError(f"there is no command {command}: see {program} --help")
    place, about = known[command]
    name, _, function = place.partition(":")
    module = importlib.import_module(name)
    parser = Parser(prog=f"{program} {command}", description=about)
    getattr(module, f"add_{function or 'arguments'}", lambda _: None)(parser)
    args = parser.parse(words)
    args.command, args.function = command, getattr(module, function or "main")
    return args
