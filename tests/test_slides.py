"""The slides: nothing stale, nothing that does not fit, nothing missing."""

import functools
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
import zipfile
import zlib
from itertools import combinations, pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from conftest import linear_light, needs
from matplotlib.figure import Figure

from backstage import ROOT
from backstage.errors import UserError
from backstage.flags import parse
from slides import build, figures, schedules, text
from workshop import __main__ as tools
from workshop.check.questions import QUESTIONS
from workshop.lesson.page import STYLE
from workshop.notebook import pictures
from workshop.results import plot
from workshop.stages import LESSONS


@functools.cache
def decks():
    """{name: its text}, which takes two seconds to write."""
    return {name: text.write(deck) for name, deck in text.DECKS.items()}


# -------------------------------------------------------------- up to date


def stale(expected):
    """The files that are not as they would be written now."""
    old = []
    for path, new in expected.items():
        found = path.read_text("utf-8") if path.exists() else ""
        if path.suffix == ".svg" and "matplotlib" in new and found:
            new, found = map(figures.describe, (new, found))  # any version
        if found != new:
            old.append(path.name)
    return old


def test_what_the_repository_keeps_is_up_to_date(monkeypatch):
    expected = build.documents()
    assert not stale(expected), "run `python -m slides --markdown`"
    kept = {*(ROOT / "slides" / "svg").glob("*"),
            *(ROOT / "slides").glob("*.md")}
    assert kept == expected.keys()
    monkeypatch.setattr(text, "SHARDS", 99)
    assert stale({ROOT / "slides" / "course-60.md": text.write(
        text.DECKS["course-60"])}) == ["course-60.md"]


# ---------------------------------------------------------------- the plan


def uncovered():
    """The rows of slides/README.md whose section has no slide."""
    table = build.coverage(decks())
    return [row for row in table.splitlines() if "| - |" in row]


def test_every_section_of_the_plan_has_slides_and_a_lesson(monkeypatch):
    plan = text.read_plan()
    assert build.coverage(decks()).count("\n") == len(plan) + 1
    assert not uncovered()
    for row in plan.values():
        assert (ROOT / row.where).exists(), row.where
    for length in (60, 90, 120):
        assert length == sum(plan[name].minutes.get(length, 0)
                             for name in text.in_course(plan))
    more = {**plan, "new": text.Row("new", "New", "notebooks", {120: 5})}
    monkeypatch.setattr(text, "read_plan", lambda: more)
    assert uncovered() == ["| New | - | `notebooks` |"]


@pytest.mark.parametrize("deck", [*text.DECKS][:-1])  # those of a talk
def test_a_deck_says_what_comes_where_one_is_and_what_to_remember(deck):
    pages = text.pages(decks()[deck])
    assert any(re.search("^## (Outline|The plan)$", page, re.M)
               for page in pages)
    assert re.search('^<!-- header: ".+" -->$', pages[0], re.M)
    assert pages[-1].startswith("## What to remember")


def test_training_at_scale_explains_before_it_decides():
    titles = re.findall("^## (Divide the state|Divide the layers|Divide the "
                        "matrices|Divide all three|Decide)",
                        decks()["training-at-scale"], re.M)
    assert [*dict.fromkeys(titles)] == [
        "Divide the state", "Divide the layers", "Divide the matrices",
        "Divide all three", "Decide"]
    assert titles == sorted(titles, key=[*dict.fromkeys(titles)].index)


def test_there_is_a_page_to_keep_for_each_lesson():
    pages = re.findall(r"<!-- `notebooks/(\w+)\.", decks()["pages-to-keep"])
    lessons = {row.where for row in text.read_plan().values()}
    assert {f"notebooks/{name}.ipynb" for name in pages} == {
        where for where in lessons if "notebooks" in where
        and "results" not in where}  # those are each reader's own


@pytest.mark.parametrize(("minutes", "complaint"), [
    ((4,), "start_here is 1 minutes too long"),
    ((1,), "2 minutes of start_here are left"),
    ((3, "rest"), "a slide of start_here has no minutes")])
def test_a_section_that_does_not_keep_its_time(minutes, complaint):
    clock = text.Clock(text.DECKS["course-60"])
    clock.section("start_here")
    with pytest.raises(UserError, match=complaint):
        for number in minutes:
            clock(number)
        clock.section("diff_ddp")


# ----------------------------------------------------------------- numbers

def test_site_settings(tmp_path):
    """Those of site.sh, and those of the example while it is unedited."""
    example = text.site(ROOT / "site.example.sh")
    assert example["SBATCH_ACCOUNT"] == "my-project"
    assert example["WORKSHOP_SESSION"] == "JupyterLab, 1 GPU, 3 hours"
    site = tmp_path / "site.sh"
    site.write_text("# export SBATCH_QOS=no\nexport SBATCH_ACCOUNT=a-b "
                    "SBATCH_RESERVATION='the course'\n")
    assert text.site(site) == {"SBATCH_ACCOUNT": "a-b",
                               "SBATCH_RESERVATION": "the course"}
    assert "| reservation | `the course` |" in text.write(
        text.DECKS["course-60"], site)


# ---------------------------------------------------------------- commands

def commands(decks):
    """The commands on the slides, each in one line: what is in files is sh."""
    found = {}
    for markdown in decks.values():
        for block in re.findall(r"^```bash\n(.*?)^```", markdown,
                                re.M | re.S):
            for line in block.replace("\\\n", " ").splitlines():
                found[" ".join(line.split())] = True
    return list(filter(None, found))


def test_a_command_has_a_script_and_its_flags(data, monkeypatch):
    """Of each command on a slide: other tests run such ones."""
    monkeypatch.setenv("WORKSHOP_DATA", str(data))
    for command in commands(decks()):
        words = shlex.split(command.partition(" #")[0])
        at = next((k for k, word in enumerate(words) if word.startswith((
            "batchfiles/batch-", "code/train_gpt2.py"))), None)
        if at is not None:
            assert (ROOT / words[at]).exists(), command
            stage = ("lit" if "--devices" in words else
                     Path(words[at]).stem.split("-")[1] if words[0] == "sbatch"
                     else "std")
            script = importlib.import_module(f"train_gpt2_{stage}")
            monkeypatch.setattr(sys, "argv", words[at:])
            parse(script.Hyperparameters, script.PRESETS, script.MODELS)
        if words[:3] == ["python", "-m", "workshop"]:
            monkeypatch.setattr(sys, "argv", words[2:])
            assert tools.parse().command == words[3]


@pytest.mark.parametrize("deck", text.DECKS)
def test_several_processes_start_a_script_that_can(deck):
    """The desk's is std until a slide resets, or checks, another stage."""
    desk = "std"
    for command in commands({deck: decks()[deck]}):
        stage = re.match(r"python -m workshop (?:reset|check) (\w+)$", command)
        desk = stage[1] if stage else desk
        if re.match("torchrun|mpirun|srun", command) and (
                "code/train_gpt2.py" in command):
            by_mpi = re.match(r"mpirun -n \d python code", command)
            assert desk not in ("std", "kernels"), command
            assert (desk == "mpi") == bool(by_mpi), command


# ------------------------------------------------------------- references


def texts():
    """{path: text} of what people read: documents, notebooks, docstrings."""
    made = {ROOT / "slides" / f"{name}.md" for name in text.DECKS}
    listed = subprocess.run(
        ["git", "ls-files", "-z", "*.md", "*.ipynb", "*.py"], cwd=ROOT,
        capture_output=True, text=True, check=True).stdout.split("\0")
    for path in map(ROOT.joinpath, filter(None, listed)):
        if path not in made and path.exists() and not path.is_relative_to(
                ROOT / "tests") and path.name != "references.md":
            found = path.read_text("utf-8")
            if path.suffix == ".ipynb":
                found = "\n".join("".join(cell["source"]) for cell in
                                  json.loads(found)["cells"])
            yield path, found


def test_what_is_cited_is_what_is_listed():
    """By author and year, or by arXiv's number, which is the same one."""
    known = text.read_references()
    assert [*known.values()] == sorted(known.values(), key=str.lower)
    number = r"(?:arXiv:|arxiv\.org/abs/)(\d{4}\.\d{5})"
    numbers = {name: re.findall(number, line) for name, line in known.items()}
    assert all(re.search(r"arXiv:\d{4}\.\d{5}|doi:10|\w\.\w+/|UT-CS", line)
               for line in known.values())
    used = set()
    for path, found in texts():
        names = text.cited(found)
        assert names.keys() <= known.keys(), path
        for one in re.findall(number, found):
            assert [one] in numbers.values(), (path, one)
            used |= {name for name, own in numbers.items() if own == [one]}
        for cited in re.finditer(rf"{text.CITATION.pattern},\s+{number}",
                                 found):
            assert numbers[cited[1], cited[2]] == [cited[3]], path
        used |= names.keys()
    assert used == known.keys()


@pytest.mark.parametrize("deck", text.DECKS)
def test_a_deck_lists_what_it_cites(deck):
    """In the text that is shown; unknown authors are refused."""
    shown = decks()[deck]
    listed = re.findall(r"^- (.+)$", shown, re.M)
    known = text.read_references()
    rest = "\n".join(line for line in shown.splitlines()
                     if line.removeprefix("- ") not in known.values())
    assert deck == "pages-to-keep" or text.cited(rest).keys() == {
        name for name, line in known.items() if line in listed}


def test_somebody_unknown_is_not_cited(monkeypatch):
    monkeypatch.setattr(text, "read_source", lambda name: "(Nobody, 1999)")
    with pytest.raises(UserError, match="does not have Nobody 1999"):
        text.references("course")


def test_each_part_of_a_change_says_where_it_is():
    """A call in `main` is not taken for the end of the function above it."""
    for stage in LESSONS:
        lesson = text.load_lesson(stage)
        for change in lesson.changes:
            parts = re.findall(r"^@@ line (\d+)(?:, ([\w.]+))? @@\n((?:[-+ ].*"
                               r"\n)+)", text.diff(stage, change.title), re.M)
            pieces = [piece for piece in lesson.pieces
                      if lesson.changes[piece.change] is change]
            assert len(parts) == len(pieces) > 0, change.title
            for line, place, rows in parts:
                new = [row[1:].strip() for row in rows.splitlines()
                       if row[0] != "-"]
                script = lesson.goal if new else lesson.start
                first = new[0] if new else rows[1:].splitlines()[0].strip()
                assert script.lines[int(line) - 1].strip() == first
                assert script.place(int(line) - 1) == place
    assert re.search(r"@@ line \d+, main @@\n\+cut\(raw_model",
                     decks()["training-at-scale"])


def test_every_excerpt_says_where_it_is():
    for deck in decks().values():
        for place, first in re.findall(
                r"^(?:#|//) ([\w/.-]+, line \d+)\n(.+)", deck, re.M):
            path, line = place.split(", line ")
            rows = (ROOT / path).read_text("utf-8").splitlines()
            assert rows[int(line) - 1].strip() == first.strip(), place
    shown = "".join(decks().values())
    for path in ("batchfiles/batch-ddp-2n4g.sh", "batchfiles/torchrun.sh",
                 "solutions/train_gpt2_kernels.py", "slides/source/gelu.cu"):
        assert f" {path}, line " in shown


def test_the_trainers_arguments_stand_for_lines_of_the_loop():
    ddp, lit = (text.STAGES[name].solution.read_text("utf-8")
                for name in ("ddp", "lit"))
    for row, argument in figures.TRAINER:
        assert row in ddp and argument in lit and row not in lit.partition(
            "def main")[2], row


def test_the_check_on_the_slides_asks_todays_questions():
    """What verify prints there, test_notebooks.py prints."""
    said = (ROOT / "example-logs" / "check_ddp.txt").read_text()
    rows = said.partition(" stopped\n")[2].partition("\n\n")[0]
    table = " ".join(re.sub(r"(  +ok| ok)+$", "", row).strip()
                     for row in rows.splitlines())
    for title in sorted((one.title for one in QUESTIONS), key=len)[::-1]:
        table = table.replace(title, "")
    assert rows.count("\n") > 20 and not table.strip()


# ----------------------------------------------------------------- figures


def test_headings_of_tables_are_of_columns():
    page = "<table><thead><tr><th>a</th><th style=''>b</th></tr></thead>"
    assert build.name_headings(page) == (
        "<table><thead><tr><th scope=\"col\">a</th><th scope=\"col\" "
        "style=''>b</th></tr></thead>")
    for deck in decks().values():  # of a list of changes, too
        assert "\n| | |\n" not in deck


def test_ten_curves_of_seven_points_are_named_where_they_end():
    ax = Figure().subplots()
    plot.published(ax, [])
    curves = [line for line in ax.get_lines() if "%" in line.get_label()]
    assert len(curves) == 10
    names = {name.get_text(): name.get_position()[1] for name in ax.texts}
    for curve in curves:
        assert len(curve.get_xdata()) == 7
        assert abs(names[curve.get_label()] - curve.get_ydata()[-1]) < 0.15
    heights = sorted(names.values())
    assert all(high - low > 0.05 for low, high in pairwise(heights))


@pytest.mark.parametrize(("heights", "apart"), [
    ((0.2, 0.9), (0.2, 0.9)), ((0.5, 0.5, 0.5), (0.4, 0.5, 0.6)),
    ((0.4, 0.5, 0.52), (0.37333, 0.47333, 0.57333))])
def test_names_that_touch_move_apart(heights, apart):
    assert plot.spread(heights, 0.1) == pytest.approx(apart, abs=1e-4)


def test_every_figure_of_the_list_is_on_a_slide():
    shown = {name: words for deck in decks().values() for words, name in
             re.findall(r"^!\[(.*)\]\(svg/(.+)\.svg\)$", deck, re.M)}
    assert shown.keys() == figures.FIGURES.keys()
    assert all(len(words) > 40 for words in shown.values())
    for name in shown:
        drawing = ElementTree.fromstring(figures.draw(name))
        assert drawing.tag == "{http://www.w3.org/2000/svg}svg"


KINDS = (  # of eyes; red-green blind: Machado et al. (2009), severity 1
    ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413),
     (-0.011820, 0.042940, 0.968881)),
    ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216),
     (-0.003882, -0.048116, 1.051998)))


def seen(colour, kind):
    """A colour in CIELAB, as people with such eyes see it."""
    light = linear_light(colour)
    red, green, blue = (min(1, max(0, sum(map(float.__mul__, map(
        float, row), light)))) for row in kind)
    x, y, z = (value ** (1 / 3) if value > 0.008856 else
               7.787 * value + 16 / 116 for value in (
        (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.9505,
        0.2126 * red + 0.7152 * green + 0.0722 * blue,
        (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.089))
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def nearest(colours):
    """How far apart the two are that are most alike to anyone."""
    return min(sum((a - b) ** 2 for a, b in zip(
        seen(one, kind), seen(other, kind), strict=True)) ** 0.5
        for one, other in combinations(colours, 2) for kind in KINDS)


@pytest.mark.parametrize("page", [255, 17])  # JupyterLab's themes
def test_red_green_blind_people_tell_added_lines_from_removed_ones(page):
    grounds = ["#" + "".join(
        f"{round(float(share) * int(part) + (1 - float(share)) * page):02x}"
        for part in colour.split(", ")) for colour, share in re.findall(
            r"pre\.code \.(?:add|del) \{ background: rgba\((.*), (.*)\)",
            STYLE)]
    assert len(grounds) == 2 and nearest(grounds) > 20
    assert nearest(("#ddffdd", "#ffdddd")) < 20  # green and red: it is seen


def test_red_green_blind_people_tell_the_ranks_apart():
    """In the notebooks' pictures and on the slides."""
    assert nearest(pictures.COLOURS) > 35
    assert nearest((figures.BLUE, figures.ORANGE)) > 90
    assert nearest(("#2166c0", "#8e44ad")) < 10  # blue and purple: it is seen


@pytest.mark.parametrize("order", [schedules.GPIPE, schedules.ONE_F_ONE_B])
def test_a_pipeline_waits_as_the_formula_says(order):
    for stages, microbatches in ((2, 4), (4, 8), (4, 4), (4, 16)):
        events = schedules.events(order, stages, microbatches)
        assert schedules.idle(events) == pytest.approx(
            (stages - 1) / (microbatches + stages - 1))


def test_a_ring_gives_everyone_the_sum():
    for states in figures.ring(4):
        assert states[-1][1] == [1111] * 4
        assert len(states) == 1 + 2 * 3


# ------------------------------------------------------------- the programs


@pytest.mark.parametrize(("missing", "words"), [
    ("node", "node is not installed: .*apt-get install nodejs npm"),
    ("marp", "Marp is not installed: run `npm ci --prefix slides`"),
    ("chromium", "no Chromium or Chrome, .*apt-get install chromium")])
def test_a_missing_program_is_one_line(missing, words, monkeypatch, tmp_path):
    there = {"node": "node", "chromium": "chromium"}
    monkeypatch.setattr(build, "MARP", tmp_path / "marp")
    if missing != "marp":
        (tmp_path / "marp").touch()
    monkeypatch.setattr(build, "MAC", str(tmp_path / "none"))
    monkeypatch.setattr(build.shutil, "which", lambda name: (
        None if name == missing else there.get(name)))
    with pytest.raises(UserError, match=words) as error:
        build.build(["course-60"], tmp_path)
    assert "\n" not in str(error.value)


def test_the_lock_file_names_no_registry():
    lock = (ROOT / "slides" / "package-lock.json").read_text()
    assert '"resolved"' not in lock
    assert lock.count('"integrity"') == lock.count('"node_modules/')


# ---------------------------------------------------------- in the browser

# Of the slide that is shown: what does not fit on it or in its figure, the
# size of the smallest words in its text and in its figures, and how much of
# its height is used.
MEASURE = """() => {
  const slide = document.querySelector(".bespoke-marp-active section");
  const frame = slide.getBoundingClientRect(), out = [];
  const scale = frame.width / slide.offsetWidth, least = [1e9, 1e9];
  const inside = (box, edge, room) =>
    box.left >= edge.left + room && box.right <= edge.right - room
    && box.top >= edge.top + room && box.bottom <= edge.bottom - room;
  const walk = document.createTreeWalker(slide, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const node = walk.currentNode, parent = node.parentElement;
    const words = node.textContent.trim();
    if (!words || parent.closest("title, desc, style, metadata")) continue;
    const drawing = parent.closest("figure svg"), range =
      document.createRange();
    range.selectNodeContents(node);
    if (parent.closest(":not(pre) > code") && range.getClientRects()[1])
      out.push("broken: " + words);
    for (const box of range.getClientRects()) {
      if (!inside(box, frame, 8 * scale) || drawing
          && !inside(box, drawing.getBoundingClientRect(), -2)) {
        out.push(words.slice(0, 60));
        break;
      }
    }
    const matrix = drawing && parent.getScreenCTM();
    const size = parseFloat(getComputedStyle(parent).fontSize) * (
      matrix ? Math.hypot(matrix.a, matrix.b) : scale);
    least[drawing ? 1 : 0] = Math.min(least[drawing ? 1 : 0], size);
  }
  for (const image of slide.querySelectorAll("figure img")) {
    const box = image.getBoundingClientRect();
    if (!inside(box, frame, 8 * scale) || box.height < frame.height / 2)
      out.push(image.alt);
  }
  const ends = [...slide.children].map(one =>
    one.getBoundingClientRect().bottom);
  return [out, ...least, (Math.max(...ends) - frame.top) / frame.height];
}"""
MEASURED = set()  # the slides
# the second is as long as what this clone's site.sh says
MAY_BE_SHORT = re.compile("_class: (lead|references)|## Your session")
PLANT = """() => {
  const slide = document.querySelector(".bespoke-marp-active section");
  for (let i = 0; i < 60; i++) slide.append(
    Object.assign(document.createElement("p"), {textContent: "more"}));
}"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """What the archive of a deck holds, built with no network but the
    machine's own, and the pages of all others.
    """
    needs("node", "chromium")
    if not build.MARP.exists():
        (pytest.fail if os.environ.get("CI") else pytest.skip)(
            "not installed: Marp (npm ci --prefix slides)")
    folder = tmp_path_factory.mktemp("slides")
    alone = ["unshare", "--map-root-user", "--net"]
    if subprocess.run([*alone, "true"], capture_output=True).returncode:
        alone = []  # a container may not allow it
    done = subprocess.run(
        [*alone, sys.executable, "-m", "slides", "--release", "the-ladder",
         "--output", folder], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert ("are invented" in done.stderr) != (ROOT / "site.sh").exists()
    build.build({*text.DECKS} - {"the-ladder"}, folder, pdf=False)
    with zipfile.ZipFile(folder / "slides.zip") as archive:
        assert archive.namelist() == [
            f"the-ladder{ending}" for ending in (
                ".html", ".pdf", "-notes.pdf")]
    return folder


@pytest.mark.parametrize("deck", text.DECKS)
def test_every_slide_fits_and_can_be_read(deck, built, browser):
    """Those that several decks have, once."""
    page = browser.new_page(viewport={"width": 1024, "height": 768})
    page.add_init_script(path=ROOT / "tests" / "lab.js")
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto((built / f"{deck}.html").as_uri())
    page.wait_for_selector(".bespoke-marp-active")
    pages = text.pages(decks()[deck])
    assert page.locator("svg[data-marpit-svg]").count() == len(pages)
    faint = 'faint_texts(1, ".bespoke-marp-active section")'
    for number, written in enumerate(pages, 1):
        written = re.sub(r"Minutes [\d.]+ to [\d.]+", "", written)
        if written in MEASURED:
            continue
        MEASURED.add(written)
        page.evaluate("number => location.hash = `#${number}`", number)
        page.wait_for_function("number => document.querySelectorAll('svg["
                               "data-marpit-svg]')[number - 1].matches('"
                               ".bespoke-marp-active')", arg=number)
        out, words, drawn, filled = page.evaluate(MEASURE)
        assert not out, (number, out)
        assert filled > 0.5 or MAY_BE_SHORT.search(written), (number, filled)
        least = 22 / 1280 * 1024  # 22 of the 720 lines of a slide
        assert min(words, drawn) >= least, (number, words, drawn)
        assert not page.evaluate(faint), number
    assert [url for url in asked if not url.startswith("file:")] == []
    page.evaluate(PLANT)  # what does not fit, is small or faint is seen
    page.add_style_tag(content="p { color: #888 !important; font-size: 9px }")
    out, words, *_ = page.evaluate(MEASURE)
    assert "more" in out and words < 18
    assert any("more" in one for one in page.evaluate(faint))
    page.close()


@pytest.mark.whole
def test_a_pdf_has_a_page_for_each_slide_and_its_notes(built):
    slides = len(text.pages(decks()["the-ladder"]))
    for ending, noted in (("", 0), ("-notes", slides)):
        data = (built / f"the-ladder{ending}.pdf").read_bytes()
        for stream in re.findall(rb"stream\r?\n(.*?)endstream", data, re.S):
            try:  # the objects are in compressed streams
                data += zlib.decompressobj().decompress(stream)
            except zlib.error:
                continue
        assert len(re.findall(rb"/Type\s*/Page\b", data)) == slides
        assert len(re.findall(rb"/Subtype\s*/Text\b", data)) == noted
