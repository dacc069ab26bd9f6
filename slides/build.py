"""Builds the decks with Marp: HTML pages that need no network, and PDFs."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from base64 import b64encode
from pathlib import Path

from backstage import ROOT
from backstage.errors import UserError, require
from slides import figures, lessons, text

SLIDES = text.SLIDES
MARP = SLIDES / "node_modules" / ".bin" / "marp"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome",
            "microsoft-edge")
MAC = "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"
PLAN = "<!-- the plan: python -m slides --markdown writes it -->"


def build(names, folder, minutes, pdf=True, release=False):
    """Write the decks' pages, and PDFs, into the folder: their paths.

    minutes: of the course. release: PDFs with the notes, too, and all of these
    in an archive. Raises `UserError` if a program is missing.
    """
    require(shutil.which("node"), "node is not installed: the slides need "
            "Node.js 18 or newer (apt-get install nodejs npm, or your "
            "site's module)")
    require(MARP.exists(), "Marp is not installed: run `npm ci --prefix "
            "slides` first")
    browser = find_browser() if pdf else None
    settings = text.site(ROOT / "site.sh")
    if "WORKSHOP_ADDRESS" not in settings:
        print("site.sh has no WORKSHOP_ADDRESS: the slides do not say what to "
              "clone", file=sys.stderr)
    folder = Path(folder).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        for name in names:
            deck = text.write(name, minutes, settings)
            Path(temporary, f"{name}.md").write_text(
                embed(deck), encoding="utf-8")
        run_marp(temporary, folder)
        for name in names:
            page = folder / f"{name}.html"
            page.write_text(name_headings(page.read_text("utf-8")),
                            encoding="utf-8")
        print_pdf = ("--pdf", "--pdf-outlines", "--pdf-outlines.pages=false",
                     "--browser-path", browser)
        if pdf:
            run_marp(temporary, folder, *print_pdf)
        if release:
            run_marp(temporary, temporary, *print_pdf, "--pdf-notes")
            for name in names:
                shutil.move(Path(temporary, f"{name}.pdf"),
                            folder / f"{name}-notes.pdf")
    endings = (".html", *[".pdf"] * pdf, *["-notes.pdf"] * release)
    paths = [folder / f"{name}{ending}" for name in names
             for ending in endings]
    if release:
        with zipfile.ZipFile(folder / "slides.zip", "w",
                             zipfile.ZIP_DEFLATED) as archive:
            for path in paths:
                archive.write(path, path.name)
        paths.append(folder / "slides.zip")
    return paths


def run_marp(source, folder, *options):
    """Convert all the Markdown in a folder."""
    end = subprocess.run(
        [MARP, "--config-file", SLIDES / "marp.config.json", "--no-stdin",
         "--theme-set", SLIDES / "theme.css", *options, "--input-dir", source,
         "--output", folder], capture_output=True, text=True,
        env={**os.environ, "CHROME_NO_SANDBOX": str(int(os.getuid() == 0))})
    if end.returncode:
        errors = [line for line in end.stderr.splitlines()
                  if "ERROR" in line] or end.stderr.splitlines()
        raise UserError(f"Marp failed: {' '.join(errors).strip()}")


def name_headings(page):
    """The page, whose tables' headings say that they are of columns."""
    return re.sub(r"<th(?=[ >])", '<th scope="col"', page)


def find_browser():
    """The path of a browser that prints PDFs."""
    found = [shutil.which(name) for name in BROWSERS]
    found += [path for path in (MAC,) if Path(path).exists()]
    path = next(filter(None, found), None)
    require(path, "there is no Chromium or Chrome, which writes the PDFs: "
            "install one (apt-get install chromium), or build the pages "
            "alone with --no-pdf")
    return path


def embed(markdown):
    """The deck with its figures in it, so that it is a single file."""
    def inline(match):
        drawing = figures.draw(match[1]).replace("\n", " ")
        return f"<figure>\n{drawing}\n</figure>"

    def photo(match):
        data = b64encode((SLIDES / match[2]).read_bytes()).decode()
        return (f'<figure><img alt="{match[1]}" '
                f'src="data:image/png;base64,{data}"></figure>')
    markdown = re.sub(r"^!\[(.*)\]\((.+\.png)\)$", photo, markdown,
                      flags=re.M)
    return re.sub(r"^!\[.*\]\((?:svg|source/figures)/(.+)\.svg\)$", inline,
                  markdown, flags=re.M)


# --------------------------------------------- what is kept in the repository


def documents():
    """{path: text} of what the repository keeps.

    These are the decks, the figures, a table, and the lessons' pages.
    """
    decks = {name: text.write(name) for name in text.DECKS}
    found = {SLIDES / f"{name}.md": deck for name, deck in decks.items()}
    found |= {SLIDES / "svg" / f"{name}.svg": figures.draw(name)
              for name in figures.FIGURES}
    readme = SLIDES / "README.md"
    head, mark, _ = readme.read_text("utf-8").partition(PLAN)
    require(mark, f"slides/README.md has no line {PLAN}")
    found[readme] = f"{head}{mark}\n\n{coverage(decks)}\n"
    return found | lessons.pages()


def coverage(written):
    """A table: each section of the plan, its slides, its notebook.

    written: {name: a deck's text}. The course is named by its length.
    """
    *shorter, longest = text.LENGTHS
    decks = {f"{minutes} min": text.write("course", minutes)
             for minutes in shorter}
    decks |= {f"[{name}]({name}.md)" if name != "course" else
              f"{longest} min": deck for name, deck in written.items()}
    rows = ["| section of the plan | slides | lesson |", "|---|---|---|"]
    for row in text.read_plan().values():
        places = []
        for name, markdown in decks.items():
            numbers = [number for number, page in enumerate(
                text.pages(markdown), 1) if f"section: {row.name}." in page]
            if numbers:
                last = f" to {numbers[-1]}" if len(numbers) > 1 else ""
                places.append(f"{name}: {numbers[0]}{last}")
        where = f"`{row.where}`" if row.where else ""
        rows.append(f"| {row.what} | {', '.join(places) or '-'} | {where} |")
    return "\n".join(rows)


def write_documents():
    """Write what the repository keeps; returns the paths that changed."""
    changed, found = [], documents()
    (SLIDES / "svg").mkdir(exist_ok=True)
    lessons.PAGES.mkdir(exist_ok=True)
    for path in sorted({*(SLIDES / "svg").glob("*.svg")} - found.keys()):
        print(f"{path} is not made any more: remove it, if it is not yours")
    for path, new in found.items():
        if not path.exists() or path.read_text("utf-8") != new:
            path.write_text(new, encoding="utf-8")
            changed.append(path)
    return changed
