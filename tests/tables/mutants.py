"""Mutants: finished scripts with a slip in what their lesson adds.

    python tests/tables/mutants.py ddp               100 of them, two at a time
    python tests/tables/mutants.py ddp --number 250 --seed 1
    python tests/tables/mutants.py ddp --pairs 20    two slips in each script
    python tests/tables/mutants.py ddp --styles 20  right, written differently
    python tests/tables/mutants.py ddp --busy 6      beside six busy processes
    python tests/tables/mutants.py ddp --only per_round  whose line has it

The check has to refuse each mutant, and to name the change that the slip is
in, or its line. What survives is equivalent, for a reason in equivalent.txt or
because it computes the same and the check warns of what it costs; or it is
missed. A script in another style has to pass. "odd" are checks that end with a
traceback or leave something behind. The results of the last runs are in
docs/tables.md.
"""

import argparse
import ast
import ctypes
import io
import os
import random
import re
import signal
import sys
import tempfile
import time
import tokenize
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path

if __name__ == "__main__":
    TESTS, TOP = Path(__file__).resolve().parents[1:3]
    sys.path[:0] = map(str, (
        TESTS, TOP, TOP / "rankcheck/src", TOP / "rankcheck/tests"))

import why_cases
from check_cases import Outcome, left_by, left_in, outcome

from rankcheck.engine.scratch import PREFIX
from workshop.diff.diff import line_differences, load_lesson

HERE = Path(__file__).resolve().parent
# What is taken for one another: a word, an operator, or what a string says.
NEIGHBOURS = [group.split() for group in (
    "rank local_rank", "rank dp_rank", "rank world_size", "dp_rank dp_size",
    "world_size dp_size tp_size pp_size", "B S T", "B samples_per_round",
    "model raw_model", "part model", "offset stride", "step microbatch",
    "train_data val_data", "mean_loss stop",
    "samples_per_round accumulation_steps",
    "RANK LOCAL_RANK WORLD_SIZE", "dp tp pp", "size rank",
    "eval_every checkpoint_every generate_every", "max_steps step",
    "ColwiseParallel RowwiseParallel", "c_attn c_proj c_fc", "wte wpe",
    "get_local_rank size",
    "bf16-mixed 32-true", "step epoch", "start_time seconds",
    "ddp fsdp2", "world_size num_nodes", "x y", "loss target",
    "// * / %", "+ -", "== !=", "< <= >", "> >=", "and or", "in is", "min max",
    "rows columns", "M N", "M T D", "queries keys", "largest larger",
    "first_query first_key", "ROWS COLUMNS", "forward backward",
    "True False", "+= -= =", "/= *=", "step eval", "stage num_stages")]
CALLS = {  # a collective -> what is called in its place; {0}, {1}: arguments
    "dist.all_reduce": ("dist.all_reduce({}, op=dist.ReduceOp.MAX)",
                        "dist.reduce({}, 0)", "dist.broadcast({}, 0)"),
    "dist.all_gather_object": ("dist.gather_object({2}, {1})",),
    "comm.Allreduce": ("comm.Allreduce({}, op=MPI.MAX)", "comm.Reduce({})",
                       "comm.Bcast({2})"),
    "MPI.COMM_WORLD.allreduce": ("MPI.COMM_WORLD.allreduce({}, op=MPI.MAX)",
                                 "MPI.COMM_WORLD.reduce({})"),
    "nn.utils.clip_grad_norm_": ("nn.utils.clip_grad_value_({})",),
    "comm.gather": ("comm.allgather({})", "comm.bcast({})"),
}
# (stages, a pattern of what a line was and became, why that is right)
EQUIVALENT = [re.fullmatch("(.*?): (.*)  # (.*)", line).groups()
              for line in (HERE / "equivalent.txt").read_text().splitlines()]


@dataclass(frozen=True)
class Mutant:
    """A finished script with slips in it."""

    stage: str
    edits: tuple  # (begin, end, text): characters of it, and the new ones
    changes: tuple  # the numbers of the lesson's changes that they are in

    def script(self):
        text = solution(self.stage)
        for begin, end, new in sorted(self.edits, reverse=True):
            text = text[:begin] + new + text[end:]
        return text

    def difference(self):
        """(the lines of it that differ, "what they were -> what they are").
        """
        was, now = (text.splitlines() for text in (
            solution(self.stage), self.script()))
        spans = line_differences(was, now)
        said = [" / ".join(line.strip() for a, b in ends for line in text[a:b])
                for text, ends in ((was, [span[:2] for span in spans]),
                                   (now, [span[2:] for span in spans]))]
        return [line for _, _, j1, j2 in spans
                for line in range(j1 + 1, max(j2, j1 + 1) + 1)
                ], " -> ".join(said)


@cache
def solution(stage):
    return load_lesson(stage).goal.data.decode("ascii")


def mutants(stage):
    """All mutants of a stage that are Python, no two of them the same."""
    seen = {meaning(solution(stage))}
    for change, edits in slips(stage):
        mutant = Mutant(stage, edits, (change,))
        try:
            tree = meaning(mutant.script())
        except SyntaxError:
            continue
        if tree not in seen:
            seen.add(tree)
            yield mutant


@dataclass(frozen=True)
class Style:
    """A finished script as somebody else would write it."""

    stage: str
    number: int  # each gives another one

    def script(self):
        rng = random.Random(f"{self.stage} {self.number}")
        tree = ast.parse(solution(self.stage))
        functions = [node for node in ast.walk(tree)
                     if isinstance(node, ast.FunctionDef)]
        for function in functions:
            rename(function, rng)
            reorder(function, rng)
        helpers = [extract(function, k, rng) for k, function in enumerate(
            rng.sample(functions, 8))]
        place = next(k for k, node in enumerate(tree.body)
                     if isinstance(node, (ast.FunctionDef, ast.ClassDef)))
        tree.body[place:place] = filter(None, helpers)
        return ast.unparse(ast.fix_missing_locations(tree)) + "\n"


def names_in(node, *contexts):
    return {name.id for name in ast.walk(node) if isinstance(name, ast.Name)
            and isinstance(name.ctx, contexts)}


def rename(function, rng):
    """Give half of the variables of a function, not its arguments, new names.
    """
    own = sorted(names_in(function, ast.Store)
                 - {arg.arg for arg in ast.walk(function)
                    if isinstance(arg, ast.arg)})
    new = {name: f"my_{name}" for name in own if rng.random() < 0.5}
    for node in ast.walk(function):
        if isinstance(node, ast.Name):
            node.id = new.get(node.id, node.id)


def reorder(function, rng):
    """Exchange neighbours where neither needs the other, and factors."""
    for node in ast.walk(function):
        body = getattr(node, "body", None)
        for k in range(len(body) - 1 if isinstance(body, list) else 0):
            one, other = body[k:k + 2]
            if all(isinstance(part, ast.Assign) and not any(
                    isinstance(inner, (ast.Call, ast.Attribute))
                    for inner in ast.walk(part)) for part in (one, other)
                   ) and not names_in(one, ast.Store) & names_in(
                       other, ast.Load, ast.Store) and not names_in(
                           other, ast.Store) & names_in(one, ast.Load):
                body[k:k + 2] = other, one
        if isinstance(node, ast.BinOp) and isinstance(
                node.op, ast.Mult) and rng.random() < 0.5:
            node.left, node.right = node.right, node.left


def extract(function, number, rng):
    """A new function that computes what a variable gets, or None."""
    known = names_in(function, ast.Store) | {
        arg.arg for arg in ast.walk(function) if isinstance(arg, ast.arg)}
    some = [node for node in function.body if isinstance(node, ast.Assign)
            and not {"super", "locals"} & names_in(node, ast.Load)
            and not any(isinstance(inner, (ast.Lambda, ast.comprehension))
                        for inner in ast.walk(node.value))]
    if not some:
        return None
    chosen, name = rng.choice(some), f"find_{number}"
    words = ", ".join(sorted(names_in(chosen.value, ast.Load) & known))
    helper, = ast.parse(f"def {name}({words}):\n"
                        f"    return {ast.unparse(chosen.value)}").body
    helper.decorator_list = [  # a kernel calls only such functions
        decorator for decorator in function.decorator_list
        if ast.unparse(decorator) == "triton.jit"]
    chosen.value = ast.parse(f"{name}({words})", mode="eval").body
    return helper


def meaning(text):
    """The syntax tree, without docstrings."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and is_text(body[0]):
            body[:1] = []
    return ast.dump(tree)


def is_text(node):
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def slips(stage):
    """(change, edits), the large ones first."""
    lesson, text = load_lesson(stage), solution(stage)
    starts = [0]  # of each line
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    undone, changed = {}, {}  # change -> edits; line -> change
    for piece in lesson.pieces:
        old = lesson.start.lines[span(lesson.start.where, piece.i1, piece.i2)]
        new = span(lesson.goal.where, piece.j1, piece.j2)
        undone.setdefault(piece.change + 1, []).append((
            starts[new.start], starts[new.stop],
            "".join(f"{line}\n" for line in old)))
        for _, _, j1, j2 in line_differences(
                lesson.start.code[piece.i1:piece.i2],
                lesson.goal.code[piece.j1:piece.j2]):
            for j in range(piece.j1 + j1, piece.j1 + j2):
                changed[lesson.goal.where[j] + 1] = piece.change + 1
    for change, edits in undone.items():
        yield change, tuple(edits)
        yield from ((change, (edit,)) for edit in edits)

    def at(node):
        return (starts[node.lineno - 1] + node.col_offset,
                starts[node.end_lineno - 1] + node.end_col_offset)

    def source(node, last=None):
        return text[at(node)[0]:at(last or node)[1]]

    nodes = [node for node in ast.walk(ast.parse(text))
             if getattr(node, "lineno", None) in changed]
    for make in (left_out, exchanged):
        for node in nodes:
            for edit in make(node, source, at):
                yield changed[node.lineno], (edit,)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.start[0] in changed:
            begin = starts[token.start[0] - 1] + token.start[1]
            for word in neighbours(token.string, text):
                yield changed[token.start[0]], (
                    (begin, begin + len(token.string), word),)


def span(where, begin, end):
    """The lines of code[begin:end], with the comments among them."""
    if begin == end:
        line = where[begin]
        return slice(line, line)
    return slice(where[begin], where[end - 1] + 1)


def left_out(node, source, at):
    """Statements, conditions, operands and arguments left out."""
    for decorator in getattr(node, "decorator_list", ()):
        begin, end = at(decorator)
        yield begin - 1, end, ""
    if isinstance(node, ast.stmt) and not is_text(node):
        yield *at(node), "pass"
    if isinstance(node, (ast.If, ast.IfExp)):
        yield *at(node.test), "True"
        yield *at(node.test), "False"
    if isinstance(node, ast.With):
        yield *at(node.items[0].context_expr), "nullcontext()"
    rests = []  # each in place of all of it
    if isinstance(node, ast.BoolOp):
        rests = node.values
    elif isinstance(node, ast.BinOp):
        rests = [node.left, node.right]
    elif isinstance(node, ast.UnaryOp):
        rests = [node.operand]
    elif isinstance(node, ast.Call) and not node.keywords:
        rests = node.args if len(node.args) == 1 else (
            [node.func.value] if not node.args and isinstance(
                node.func, ast.Attribute) else [])
    for rest in rests:
        yield *at(node), source(rest)
    spans = [(at(part)[0], at(last)[1]) for part, last in entries(node)]
    for k, (begin, end) in enumerate(spans):  # with a comma
        yield ((begin, spans[k + 1][0], "") if k + 1 < len(spans) else
               (spans[k - 1][1] if k else begin, end, ""))


def entries(node):
    """What stands between commas: (the first, the last node of it)."""
    if isinstance(node, ast.Call):
        return [(arg, arg) for arg in (*node.args, *node.keywords)]
    if isinstance(node, (ast.Tuple, ast.List)):
        return [(part, part) for part in node.elts]
    if isinstance(node, ast.Dict):
        return list(zip(node.keys, node.values, strict=True))
    return []


def exchanged(node, source, at):
    """Arguments in another order, and other collectives."""
    ordered = []
    if isinstance(node, ast.Call):
        ordered = node.args
        args = [source(arg) for arg in node.args]
        for call in CALLS.get(source(node.func), ()):
            yield *at(node), call.format(", ".join(args), *args)
    elif isinstance(node, (ast.Tuple, ast.List)):
        ordered = node.elts
    elif isinstance(node, ast.FunctionDef):
        ordered = node.args.args
    for one, other in pairwise(ordered):
        (begin, middle), (again, end) = at(one), at(other)
        between = source(one, other)[middle - begin:again - begin]
        yield begin, end, source(other) + between + source(one)


def neighbours(token, text):
    """What stands in place of a token by mistake."""
    if token.isdigit():
        return [str(int(token) + 1)] + ["0"] * (token == "1")
    if re.fullmatch(r"\d+\.\d+", token):
        return [str(float(token) / 2)]
    if token in ("+=", "-=", "/="):
        return ["=", {"+=": "-=", "-=": "+=", "/=": "*="}[token]]
    word = token.strip('"')
    others = {other: None for group in NEIGHBOURS if word in group
              for other in group if other != word}
    if word == token and word.isidentifier():  # a name that is there
        others = [one for one in others if re.search(rf"\b{one}\b", text)]
    return [token.replace(word, other) for other in others]


# ------------------------------------------------------------------ the check


def work_in(parent):
    """What a worker does first: a folder for temporary files of its own.

    It ends, as a check does, when the program that it works for is killed.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    tempfile.tempdir = os.environ["TMPDIR"] = tempfile.mkdtemp(dir=parent)


def try_out(mutant):
    """(kind, seconds, what the table says below it) of a mutant."""
    begin, odd = time.monotonic(), ""
    try:
        found = outcome(mutant.stage, mutant.script())
    except BaseException:
        found = Outcome(None, "", traceback.format_exc())
    passed, says, out = found.passed, found.first, found.out
    if "Traceback" in out:
        odd = "a traceback: " + out.splitlines()[-1]
    folder = tempfile.gettempdir()
    if left_in(Path(folder)) or left_by(f"{folder}/{PREFIX}"):
        odd += "something is left behind"
    if isinstance(mutant, Style):
        return ("passed" if passed else "refused", time.monotonic() - begin,
                odd or says, bool(odd))
    lines, text = mutant.difference()
    why = says or next((
        why for stages, pattern, why in EQUIVALENT
        if {mutant.stage, "all"} & {*stages.split()}
        and re.search(pattern, text)), "")
    changes = set(map(int, re.findall(r"\bchange (\d+) \(", out)))
    named = len(changes & set(mutant.changes)) or bool(set(lines) & set(
        map(int, re.findall(r"\bline (\d+)", out))))
    if passed:
        kind = "equivalent" if why else "missed"
    else:
        kind = {0: "misplaced", len(mutant.changes): "refused"}.get(
            named, "half named")
    return kind, time.monotonic() - begin, odd or (
        why if passed else "" if kind == "refused" else
        " ".join([says, *re.findall(r"  It is .*", out)])), bool(odd)


def choose(stage, number, pairs, seed, only):
    """(the mutants to try, how many there are)."""
    every = [one for one in mutants(stage)
             if re.search(only, one.difference()[1])]
    rng = random.Random(seed)
    if not pairs:
        some = rng.sample(range(len(every)), min(number, len(every)))
        return [every[k] for k in sorted(some)], len(every)
    chosen = []
    while len(chosen) < pairs:
        one, other = rng.sample(every, 2)
        (_, end, _), (begin, *_) = sorted(one.edits + other.edits)[:2]
        if len(one.edits + other.edits) == 2 and end <= begin and (
                one.changes != other.changes):
            chosen.append(Mutant(stage, one.edits + other.edits,
                                 one.changes + other.changes))
    return chosen, len(every)


def run(stage, number, pairs, styles, busy, seed, only):
    """Try them and print the results; return whether all is well."""
    chosen, total = choose(stage, number, pairs, seed, only)
    if styles:
        chosen = [Style(stage, seed + k) for k in range(styles)]
    begin, counts = time.time(), Counter()
    with (why_cases.busy(busy),
          tempfile.TemporaryDirectory(prefix="m-", dir="/tmp") as parent,
          ProcessPoolExecutor(2, get_context("spawn"), work_in,
                              (parent,)) as pool):
        for mutant, (kind, seconds, below, odd) in zip(
                chosen, pool.map(try_out, chosen), strict=True):
            counts[kind] += 1
            counts["odd"] += odd
            if styles:
                rows = [f"{kind}: style {mutant.number} ({seconds:.0f} s)"]
            else:
                lines, text = mutant.difference()
                rows = [f"{kind}: line {lines[0]} ({seconds:.0f} s): {text}"]
            rows += [f"    {below}"] if below else []
            print(*rows, sep="\n", flush=True)
    kind = ("pairs" if pairs else "styles" if styles else f"of {total}")
    print(f"{stage}, {time.strftime('%Y-%m-%d')}, seed {seed}: "
          f"{len(chosen)} {kind}{f' beside {busy}' * bool(busy)}: "
          + ", ".join(f"{count} {kind}" for kind, count
                      in counts.most_common())
          + f", {(time.time() - begin) / 60:.0f} minutes")
    return not (counts["missed"] or counts["odd"] or (
        styles and counts["refused"]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("stage")
    parser.add_argument("--number", type=int, default=100)
    for flag in ("--pairs", "--styles", "--busy", "--seed"):
        parser.add_argument(flag, type=int, default=0)
    parser.add_argument("--only", default="")
    sys.exit(0 if run(**vars(parser.parse_args())) else 1)
