"""What is left to change, for people: in a terminal and in a notebook."""

import html
import re
import textwrap
import time
from difflib import SequenceMatcher

from backstage.files import show_path
from workshop.lesson import checked

CONTEXT = 2  # unchanged lines shown above and below a change

# JupyterLab's variables follow its theme; other pages keep their own colours.
# The style sheet draws the numbers and signs, so they cannot be selected, and
# whoever copies from the view copies only code.
STYLE = """<style>
.ws { max-width: 100%; color: var(--jp-content-font-color1, inherit);
  font: 13px/1.45 var(--jp-code-font-family, monospace) }
.ws p, .ws h4 { margin: 4px 0; line-height: 1.4;
  font-family: var(--jp-ui-font-family, sans-serif) }
.ws h4 { margin-top: 18px; font-size: 14px; font-weight: 600 }
.ws .place { font-weight: 400; opacity: .75 }
.ws .good { border-left: 4px solid #2ea043; padding-left: 8px }
.ws .bad { border-left: 4px solid #f85149; padding-left: 8px }
.ws .code { border: 1px solid rgba(128, 128, 128, .35) }
.ws .code div { position: relative; min-height: 1.45em;
  padding: 0 4px 0 calc(68px + var(--hang)); text-indent: calc(-1*var(--hang));
  white-space: pre-wrap; overflow-wrap: anywhere }
.ws .code div::before, .ws .code div::after { position: absolute; top: 0;
  text-indent: 0 }
.ws .code div::before { content: attr(data-line); width: 38px; left: 0;
  text-align: right; opacity: .6 }
.ws .code div::after { content: attr(data-sign); left: 50px;
  font-weight: 700 }
.ws .code div.gap { min-height: 4px;
  border-top: 1px dashed rgba(128, 128, 128, .5) }
.ws .add { background: rgba(46, 160, 67, .2) }
.ws .del { background: rgba(248, 81, 73, .16);
  user-select: none; -webkit-user-select: none }
.ws mark { color: inherit; background: none }
.ws .add mark { background: rgba(46, 160, 67, .42) }
.ws .del mark { background: rgba(248, 81, 73, .40) }
</style>"""


def is_checked(diff):
    """Whether this very script has passed the check."""
    return checked.state(diff.lesson.stage, diff.yours.data) == checked.PASSED


def headline(diff):
    """In one line, how far the script is."""
    name = show_path(diff.yours.path)
    if (diff.left or diff.others) and is_checked(diff):
        return f"{name} is checked: right; what remains is style"
    if diff.left:
        text = f"{name}: {len(diff.left)} of {diff.total} changes left"
    elif diff.others:
        text = f"{name}: all {diff.total} changes are made"
    else:
        return f"Done: all {diff.total} changes are made in {name}."
    if diff.others:
        more = "" if len(diff.others) == 1 else "s"
        text += f", and {len(diff.others)} other difference{more}"
    return text


def advice(diff):
    """What to do next, in one line."""
    stage = diff.lesson.stage
    if is_checked(diff):
        return ("It passed the check: what you wrote differently may "
                "stay." if diff.left or diff.others else
                "It passed the check, too.")
    if diff.left or diff.yours.syntax_error:
        return "Change the script, save it (Ctrl+S, Cmd+S), then look again."
    if diff.others:
        return (f"Your own code may differ from ours: `python -m workshop "
                f"check {stage}` tells you whether it is right.")
    return f"Next: `python -m workshop check {stage}`"


def saved(path):
    """When the script was last saved, in one line."""
    when = path.stat().st_mtime
    age = max(0, time.time() - when)
    for size, unit in ((86400, "day"), (3600, "hour"), (60, "minute"),
                       (1, "second")):
        if age >= size or unit == "second":
            count = int(age // size)
            ago = f"{count} {unit}{'' if count == 1 else 's'} ago"
            break
    clock = time.strftime("%H:%M:%S", time.localtime(when))
    return f"Last saved at {clock}, {ago}."


def title(diff, item):
    """The change's number and name, and its place in the script."""
    i1, i2, j1, _ = item.edits[0]
    # a removed line is in the script, an added one in the solution
    place = diff.yours.place(i1) if i1 < i2 else diff.goal.place(j1)
    where = f"line {i1 + 1}, " + (
        f"in {place}" if place else "outside any function")
    number = f"{item.number} of {diff.total}: " if item.number else ""
    return f"{number}{item.title}", where


def rows(diff, edits):
    """The rows (line number or None, sign, [(text, differs)]) of a change.

    The sign is " ", "-", "+", or "" for a row that stands for a gap.
    """
    yours, goal = diff.yours.lines, diff.goal.lines
    shown = max(0, edits[0][0] - CONTEXT)
    for i1, i2, j1, j2 in edits:
        if shown + CONTEXT < i1 - CONTEXT:
            yield from plain(yours, shown, shown + CONTEXT)
            yield None, "", []
            shown = i1 - CONTEXT
        yield from plain(yours, shown, i1)
        old, new = mark(yours[i1:i2], goal[j1:j2])
        yield from ((i1 + k + 1, "-", text) for k, text in enumerate(old))
        yield from ((None, "+", text) for text in new)
        shown = i2
    yield from plain(yours, shown, min(shown + CONTEXT, len(yours)))


def plain(lines, begin, end):
    """The rows of unchanged lines."""
    return [(i + 1, " ", [(lines[i], False)]) for i in range(begin, end)]


def mark(old, new):
    """Both as lists of (text, differs); similar lines are compared by word."""
    marked = [[(line, False)] for line in old], [[(line, False)]
                                                 for line in new]
    after = 0
    for i, line in enumerate(old):
        for j in range(after, len(new)):
            a, b = (re.findall(r"\w+", it) for it in (line, new[j]))
            if match(a, b).ratio() >= 0.5:
                a, b = (re.findall(r"\w+|.", it) for it in (line, new[j]))
                marked[0][i], marked[1][j] = [], []
                for tag, a1, a2, b1, b2 in match(a, b).get_opcodes():
                    for row, part in ((marked[0][i], a[a1:a2]),
                                      (marked[1][j], b[b1:b2])):
                        if part:
                            row.append(("".join(part), tag != "equal"))
                after = j + 1
                break
    return marked


def match(a, b):
    """difflib's matcher for two lists, with nothing left out."""
    return SequenceMatcher(None, a, b, autojunk=False)


def syntax(diff):
    """The line that says where the script is not Python, or ""."""
    error = diff.yours.syntax_error
    return f"Not Python yet, {error}" if error else ""


# ----------------------------------------------------------------- terminal


def to_text(diff, colour=False):
    """The view as text; colour: with a terminal's escape sequences."""
    def paint(text, *codes):
        start = "".join(f"\033[{code}m" for code in codes)
        return f"{start}{text}\033[0m" if colour and codes and text else text

    out = [paint(headline(diff), 1)]
    if diff.yours.syntax_error:
        out.append(paint(syntax(diff), 31))
    out.append(f"{saved(diff.yours.path)} {advice(diff)}")
    for item in diff.left + diff.others:
        name, where = title(diff, item)
        out += ["", f"{paint(name, 1)} ({where})",
                *wrap(item.why)]
        for line, sign, parts in rows(diff, item.edits):
            codes = {"-": [31], "+": [32]}.get(sign, [])
            text = "".join(paint(part, *codes, *[7] * differs)
                           for part, differs in parts)
            out.append(f"{line or '':>5} {paint(sign or '...', *codes)} {text}"
                       .rstrip())
    return "\n".join(out)


def wrap(text):
    """The lines of a text, with an empty one between its paragraphs."""
    lines = []
    for part in text.split("\n\n"):
        lines += ["", *textwrap.wrap(part, 79)]
    return lines[1:]


# ----------------------------------------------------------------- notebook


def to_html(diff):
    """The view as HTML, for the light and the dark theme."""
    done = is_checked(diff) or not (
        diff.left or diff.others or diff.yours.syntax_error)
    out = [paragraph(f"<strong>{html.escape(headline(diff))}</strong>",
                     "good" if done else "")]
    if diff.yours.syntax_error:
        out.append(paragraph(html.escape(syntax(diff)), "bad"))
    out.append(paragraph(quote(f"{saved(diff.yours.path)} {advice(diff)}")))
    for item in diff.left + diff.others:
        name, where = (html.escape(text) for text in title(diff, item))
        out.append(f'<h4>{name} <span class="place">({where})</span></h4>')
        out += [paragraph(quote(part)) for part in item.why.split("\n\n")]
        out.append('<div class="code">')
        for line, sign, parts in rows(diff, item.edits):
            kind = {"-": "del", "+": "add", "": "gap"}.get(sign, "")
            text = "".join(
                f"<mark>{breakable(part)}</mark>" if differs
                else breakable(part) for part, differs in parts)
            code = "".join(part for part, _ in parts)
            hang = len(code) - len(code.lstrip()) + 4  # where it wraps to
            out.append(f'<div class="{kind}" style="--hang: {hang}ch" '
                       f'data-line="{line or ""}" data-sign="{sign}">'
                       f'{text}</div>')
        out.append("</div>")
    return box("\n".join(out))


def breakable(code):
    """HTML of code that may wrap after an opening bracket."""
    return html.escape(code).replace("(", "(<wbr>")


def paragraph(text, kind=""):
    """A paragraph of HTML; kind: "good", "bad" or ""."""
    return f'<p class="{kind}">{text}</p>'


def quote(text):
    """HTML of a text in which `this` is code."""
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", html.escape(text))


def box(text):
    """The style, and the HTML that it applies to."""
    return f'{STYLE}<div class="ws">{text}</div>'
