"""A page to keep: python -m workshop certificate

It says which stages have passed the check in this clone, and when, from
`code/.checked.json`, and shows a text by a model that was trained here. It is
for attendees who ask for it: nothing else writes it, or sends it anywhere.
"""

from __future__ import annotations

import argparse
import html
from dataclasses import dataclass
from pathlib import Path

from backstage.errors import UserError, require, visible
from backstage.files import StrPath, show_path, write_atomically
from rankcheck.engine.findings import count_of
from workshop.diff import passed_checks
from workshop.html import BLUE, may_replace
from workshop.jobs import interpreter
from workshop.results import runs
from workshop.stages import LESSONS, find_stage

CERTIFICATE_MARK = "made by python -m workshop certificate, which replaces it"
TEXT_TOKENS = 120  # of the text, some ten lines
SHOWN = 12  # hexadecimal digits of a script's hash
SMALL_PRESET = "tiny"  # the preset for tests: it does not learn to write
TRAIN = "`python code/train_gpt2.py --preset nano` trains one in minutes"

CERTIFICATE_PAGE = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>Training on many GPUs</title>
<!-- {mark} -->
<style>
body {{ max-width: 46em; margin: 3em auto; padding: 0 1.5em; color: #222;
  background: #fff; font: 16px/1.5 sans-serif }}
main {{ border: 2px solid rgb({blue}); padding: 1em 2em }}
h1 {{ margin-bottom: 0; font-weight: 600 }}
table {{ border-collapse: collapse; width: 100% }}
th, td {{ padding: .35em .8em .35em 0; text-align: left; vertical-align: top }}
tr + tr {{ border-top: 1px solid #bbb }}
pre {{ white-space: pre-wrap; overflow-wrap: anywhere; padding: .8em;
  background: #f3f3f3; font-size: 14px }}
.small {{ color: #555; font-size: 14px }}
</style>
<main>
{content}</main>
</html>
"""


@dataclass(frozen=True)
class Passed:
    """A lesson's stage, and the first script that passed its check.

    when: as the record has it. digest: the SHA-256 of the script.
    """

    stage: str
    when: str
    digest: str


@dataclass(frozen=True)
class Text:
    """A trained model's generated text, and its run."""

    about: str
    body: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--name", default="", help="a name to write on it")
    parser.add_argument(
        "--run", metavar="DIR", help="the run whose model writes (default: "
        f"the newest that has another preset than {SMALL_PRESET})")
    parser.add_argument("-o", "--output", default="certificate.html",
                        help="the page (certificate.html)")


def main(args: argparse.Namespace) -> None:
    """Write the page, and print what is on it."""
    output = Path(args.output)
    require(may_replace(output, CERTIFICATE_MARK), f"{output} exists and is "
            "not a certificate; fix: choose another file with -o")
    passed = list_passed()
    require(passed, "no script has passed a check here yet; fix: `python -m "
            "workshop check ddp`, once its changes are made")
    text = None
    folder = choose_run(args.run)
    if folder:
        print(f"{show_path(folder)} writes", flush=True)
        text = write_text(folder)
    page = make_certificate(args.name, passed, text)
    write_atomically(output, page.encode())
    for row in passed:
        print(visible(f"{row.when}  {row.stage:8}  "
                      f"{find_stage(row.stage).title}"))
    if text:
        print(f"\n{text.body}\n\n({text.about})\n")
    else:
        print(f"no text: no run here has a trained model; {TRAIN}")
    print(f"{output}: open it in a browser, print or keep it")


def list_passed() -> list[Passed]:
    """Return the first script of each stage that has passed its check.

    A change that was tried alone is none: the whole script has to be right.
    """
    record = passed_checks.read_passed()
    found = []
    for stage in LESSONS:
        scripts = record.get(stage)
        if scripts:
            digest = min(scripts, key=lambda digest: scripts[digest])
            found.append(Passed(stage, scripts[digest], digest))
    return sorted(found, key=lambda row: row.when)


def choose_run(folder: StrPath | None) -> Path | None:
    """Return the run whose model generates, or None if there is none.

    Raises:
        UserError: the run that was named has no checkpoint.
    """
    if folder is not None:
        require(has_checkpoint(Path(folder)),
                f"{folder} is not a run with a checkpoint; fix: choose a "
                "folder in runs/")
        return Path(folder)
    results, _ = runs.read_runs(runs.list_folders(runs.RUNS))
    for run in reversed(results):
        if run.preset != SMALL_PRESET and has_checkpoint(run.folder):
            return run.folder
    return None


def has_checkpoint(folder: Path) -> bool:
    return any(folder.glob("checkpoints/step_*.pt"))


def write_text(folder: Path) -> Text:
    """Generate text with the newest model of a run.

    Raises:
        UserError: it cannot, for example as its dataset is gone.
    """
    lines: list[str] = []
    status = interpreter.run_python(
        "code/generate.py", "--run-dir", folder, "--num-sequences", 1,
        "--max-new-tokens", TEXT_TOKENS, "--device", "cpu",
        on_line=lines.append)
    printed = "".join(lines)
    _, begins, rest = printed.partition("\n> ")
    if status or not begins:
        raise UserError(f"{show_path(folder)} generates no text: "
                        f"{interpreter.last_line(printed)}")
    body = rest.rstrip("\n").rpartition("\n")[0]  # the last line: the speed
    return Text(summarize_run(runs.read_run(folder)), body)


def summarize_run(run: runs.RecordedRun) -> str:
    """Return what a run was: its stage, preset, steps and last loss."""
    processes = count_of(run.world_size, "process")
    last = run.rows[-1]
    return (f"stage {run.kind} on {processes}, preset {run.preset}, "
            f"{last['step'] + 1:,.0f} steps, loss {last['loss']:.2f}, "
            f"{show_path(run.folder)}")


def make_certificate(name: str, passed: list[Passed],
                     text: Text | None) -> str:
    """Return the page as HTML."""
    content = "<h1>Training on many GPUs</h1>\n"
    if name:
        content += f"<p>{html.escape(name)}</p>\n"
    content += (
        "<p>These scripts compute what the single-device script computes, on "
        "each number of processes that the check tries: the same samples, "
        "gradients, weights and losses.</p>\n"
        "<table>\n<tr><th>stage</th><th>what it is</th>"
        "<th>first passed</th><th>script</th></tr>\n")
    for row in passed:
        cells = (row.stage, find_stage(row.stage).title, row.when,
                 row.digest[:SHOWN])
        content += "<tr>" + "".join(
            f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>\n"
    content += "</table>\n"
    if text:
        content += (f"<p>A model that was trained here writes:</p>\n"
                    f"<pre>{html.escape(text.body)}</pre>\n"
                    f'<p class="small">{html.escape(text.about)}</p>\n')
    content += ('<p class="small">From this clone\'s own record of its '
                "checks. The last column has the first digits of the "
                "script's SHA-256.</p>\n")
    return CERTIFICATE_PAGE.format(mark=CERTIFICATE_MARK, blue=BLUE,
                                   content=content)
