"""The slides: they build, their commands run, their links and numbers hold."""

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
from pathlib import Path
from xml.etree import ElementTree

import pytest
from conftest import needs, tracked
from decks import measure

from backstage import ROOT
from backstage.errors import UserError
from backstage.flags import parse
from slides import build, figures, lessons, schedules, text
from workshop import __main__ as tools
from workshop.check.questions import QUESTIONS
from workshop.diff import documents
from workshop.stages import LESSONS

DECKS = [*text.DECKS, *(f"course {length}" for length in text.LENGTHS[:-1])]
SITE = {"WORKSHOP_SPEAKER": "Ada Example", "WORKSHOP_EVENT": "Summer school",
        "WORKSHOP_DATE": "3 June", "WORKSHOP_THANKS": "Thanks to the cluster.",
        "WORKSHOP_ADDRESS": "https://example.org/course",
        "WORKSHOP_PORTAL": "https://portal.example.org",
        "WORKSHOP_DOCS": "https://docs.example.org",
        "SBATCH_ACCOUNT": "our-project"}


@functools.cache
def deck(name):
    """The text of a deck; "course 60" is that of a length."""
    name, *length = name.split()
    return text.write(name, *map(int, length))


# -------------------------------------------------------------- up to date


@pytest.mark.whole
def test_what_the_repository_keeps_is_up_to_date():
    expected = build.documents()
    for path, new in expected.items():
        old = path.read_text("utf-8") if path.exists() else ""
        if path.suffix == ".svg" and "matplotlib" in new and old:
            new, old = map(figures.describe, (new, old))  # any version
        assert old == new, f"{path}: run `python -m slides --markdown`"
    kept = {*(ROOT / "slides" / "svg").glob("*"),
            *(ROOT / "slides").glob("*.md"),
            *(ROOT / "docs" / "lessons").glob("*")}
    assert kept == expected.keys()


def test_a_lessons_page_shows_every_line_that_changes():
    for stage in LESSONS:
        page = lessons.page(stage)
        rows = "\n".join(re.findall(r"```diff\n(.*?)```", page, re.S))
        counts = tuple(len(re.findall(rf"^{re.escape(sign)}.*\S", rows, re.M))
                       for sign in "-+")
        assert counts == text.changed_lines(stage), stage
        for summary, count in (
                ("Answer", page.count("**Predict")),
                ("Hint", sum(bool(change.hint)
                             for change in documents.load_changes(stage)))):
            assert page.count(f"<summary>{summary}</summary>") == count
        assert "**Predict" in page and "**Hint" not in page
        assert "**Answer" not in page
    change, = re.findall(r"^## 10\. .*?(?=^## )", lessons.page("ddp"),
                         re.M | re.S)
    assert "no_sync()" in change.partition("```diff")[2]


@pytest.mark.parametrize("length", text.LENGTHS)
def test_a_session_has_slides_for_each_section_of_the_plan(length):
    plan = {name: row.minutes[length] for name, row in
            text.read_plan().items() if length in row.minutes}
    assert sum(plan.values()) == length
    spans = re.findall(r"^Minutes ([\d.]+) to ([\d.]+)\..* section: (.+)\.$",
                       deck(f"course {length}"), re.M)
    for name, minutes in plan.items():
        assert minutes == pytest.approx(sum(
            float(end) - float(begin) for begin, end, where in spans
            if where == name)), name
    assert {where for *_, where in spans} == plan.keys()


def test_the_first_and_the_last_page_say_what_the_site_says(tmp_path):
    site = tmp_path / "site.sh"
    site.write_text("# export SBATCH_QOS=no\nexport SBATCH_ACCOUNT=our-project"
                    " SBATCH_RESERVATION='the course'\n" + "".join(
                        f'{name}="{value}"\n' for name, value in SITE.items()))
    settings = text.site(site)
    assert settings == SITE | {"SBATCH_RESERVATION": "the course"}
    example = (ROOT / "site.example.sh").read_text()
    assert all(f"{name}=" in example for name in SITE)
    pages = text.pages(text.write("course", 60, settings))
    for page in pages[0], pages[-1]:
        assert SITE["WORKSHOP_ADDRESS"] in page
        assert "Ada Example · Summer school · 3 June" in page
    assert SITE["WORKSHOP_THANKS"] in pages[-1]
    assert "| our-project |" in pages[1]


# ---------------------------------------------- questions and their answers


def unanswered(slides: list[str]) -> list[str]:
    """Return what is wrong with questions: the slides' headings, and what.

    A slide that lets people predict is followed by one with the answer, which
    is not in sight before, nor in the notes alone.
    """
    found = []
    shown = [re.sub(r"<!--.*?-->", "", slide, flags=re.S) for slide in slides]
    for number, slide in enumerate(shown):
        heading = re.findall(r"^#+ (.+)", slide, re.M)[0]
        following = shown[number + 1] if number + 1 < len(shown) else ""
        if "**Predict" in slide and "**Answer" in slide:
            found.append(f"{heading}: the answer is in sight")
        if "**Predict" in slide and "**Answer" not in following:
            found.append(f"{heading}: no answer follows")
        if re.search(r"<!--[^>]*\bAnswers?:", slides[number]):
            found.append(f"{heading}: an answer is in the notes alone")
    return found


@pytest.mark.parametrize("name", DECKS)
def test_a_question_is_followed_by_its_answer(name):
    assert unanswered(text.pages(deck(name))) == []


def test_a_question_without_an_answer_is_seen():
    asks = "## Ask\n\n**Predict.** Why?\n\n<!--\nMinutes 0 to 1.\n-->"
    tells = "## Tell\n\n**Answer.** Because."
    noted = "## Note\n\n<!--\nMinutes 0 to 1.\n\nAnswer: because.\n-->"
    assert unanswered([asks, tells]) == []
    assert unanswered([asks]) == ["Ask: no answer follows"]
    assert unanswered([asks, noted, tells]) == [
        "Ask: no answer follows", "Note: an answer is in the notes alone"]
    assert unanswered([f"{asks}\n\n**Answer.** So.", tells]) == [
        "Ask: the answer is in sight"]


def test_the_addresses_that_people_need_are_on_the_slides():
    """Those of the video and of the batch files for other clusters, in full:
    a link alone cannot be read from the last row.
    """
    for length in text.LENGTHS:
        shown = text.write("course", length)
        for address in (
                "https://youtu.be/l8pRSuU81PU",
                "https://github.com/alan-turing-institute/hpc-landscape"):
            assert f"<{address}>" in shown
    assert "](https://youtu.be/l8pRSuU81PU)" in text.credits()


# ---------------------------------------------------------------- commands


def commands(*names):
    """The commands on the slides, each in one line: what is in files is sh."""
    found = {}
    for name in names:
        for block in re.findall(r"^```bash\n(.*?)^```", deck(name),
                                re.M | re.S):
            for line in block.replace("\\\n", " ").splitlines():
                found[" ".join(line.split())] = True
    return list(filter(None, found))


@pytest.mark.whole
def test_a_command_has_a_script_and_its_flags(data, monkeypatch):
    """Of each command on a slide: other tests run such ones."""
    monkeypatch.setenv("WORKSHOP_DATA", str(data))
    for command in commands(*DECKS):
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
            assert tools.parse_command().command == words[3]


@pytest.mark.parametrize("name", DECKS)
def test_several_processes_start_a_script_that_can(name):
    """The working copy is std until a slide resets or checks another."""
    working_copy = "std"
    for command in commands(name):
        stage = re.match(r"python -m workshop (?:reset|check) (\w+)$", command)
        working_copy = stage[1] if stage else working_copy
        if re.match("torchrun|mpirun|srun", command) and (
                "code/train_gpt2.py" in command):
            by_mpi = re.match(r"mpirun -n \d python code", command)
            assert working_copy not in ("std", "kernels"), command
            assert (working_copy == "mpi") == bool(by_mpi), command


# ------------------------------------------------------ links and references


@pytest.mark.parametrize("name", text.DECKS)
def test_links_are_to_files_that_exist(name):
    words = re.sub(r"(?ms)^```.*?^```", "", deck(name))
    for path in re.findall(r"\]\((?!https?:)([^)#]+)"
                           r"|`([\w.-]+/[\w./-]+\.\w+)`", words):
        path = "".join(path)
        assert any((folder / path).exists() for folder in (
            ROOT / "slides", ROOT)), path


def texts():
    """{path: text} of what people read: documents, notebooks, docstrings."""
    made = {ROOT / "slides" / f"{name}.md" for name in text.DECKS}
    for path in map(ROOT.joinpath, tracked("*.md", "*.ipynb", "*.py")):
        is_test = "tests" in path.relative_to(ROOT).parts
        if path not in made and not is_test and path.name != "references.md":
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
        for arxiv in re.findall(number, found):
            assert [arxiv] in numbers.values(), (path, arxiv)
            used |= {name for name, own in numbers.items() if own == [arxiv]}
        for cited in re.finditer(rf"{text.CITATION.pattern},\s+{number}",
                                 found):
            assert numbers[cited[1], cited[2]] == [cited[3]], path
        used |= names.keys()
    assert used == known.keys()


def test_somebody_unknown_is_not_cited(monkeypatch):
    monkeypatch.setattr(text, "read_source", lambda name: "(Nobody, 1999)")
    with pytest.raises(UserError, match="does not have Nobody 1999"):
        text.references("course")


# ----------------------------------------------------------------- numbers


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
                     deck("training-at-scale"))


def test_every_excerpt_says_where_it_is():
    places = [found for name in text.DECKS for found in re.findall(
        r"^(?:#|//) ([\w/.-]+), line (\d+)\n(.+)", deck(name), re.M)]
    for path, line, first in places:
        rows = (ROOT / path).read_text("utf-8").splitlines()
        assert rows[int(line) - 1].strip() == first.strip(), path
    assert len({path for path, *_ in places}) > 3


def test_the_trainers_arguments_stand_for_lines_of_the_loop():
    ddp, lit = (text.STAGES[name].solution.read_text("utf-8")
                for name in ("ddp", "lit"))
    _, about = figures.describe(figures.draw("trainer"))
    pairs = re.findall(r"(\w+) stands for (.+?)(?:; |\.$)", about)
    assert len(pairs) == 6
    for argument, row in pairs:
        assert row in ddp and f"{argument}=" in lit and row not in (
            lit.partition("def main")[2]), row


def test_the_check_on_the_slides_asks_todays_questions():
    """What verify prints there, test_notebooks.py prints."""
    said = (ROOT / "example-logs" / "check_ddp.txt").read_text()
    rows = said.partition(" stopped\n")[2].partition("\n\n")[0]
    table = " ".join(re.sub(r"(  +ok| ok)+$", "", row).strip()
                     for row in rows.splitlines())
    for title in sorted((ask.title for ask in QUESTIONS), key=len)[::-1]:
        table = table.replace(title, "")
    assert rows.count("\n") > 20 and not table.strip()


def test_every_figure_is_on_a_slide():
    """Drawn or computed, with words for those who cannot see it."""
    shown = {name: words for deck_name in text.DECKS for words, name in
             re.findall(r"^!\[(.*)\]\((?:svg|source/figures)/(.+)\.svg\)$",
                        deck(deck_name), re.M)}
    drawn = {path.stem for path in figures.SOURCES.glob("*")}
    assert not drawn & figures.FIGURES.keys()
    assert shown.keys() == drawn | figures.FIGURES.keys()
    for name, words in shown.items():
        drawing = ElementTree.fromstring(figures.draw(name))
        assert drawing.tag == "{http://www.w3.org/2000/svg}svg"
        assert words, name


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
        build.build(["course"], tmp_path, 60)
    assert "\n" not in str(error.value)


def test_the_lock_file_names_no_registry():
    lock = (ROOT / "slides" / "package-lock.json").read_text()
    assert '"resolved"' not in lock
    assert lock.count('"integrity"') == lock.count('"node_modules/')


def run(*options):
    """The command, with no network but the machine's own."""
    needs("node", "chromium")
    if not build.MARP.exists():
        (pytest.fail if os.environ.get("CI") else pytest.skip)(
            "not installed: Marp (npm ci --prefix slides)")
    alone = ["unshare", "--map-root-user", "--net"]
    if subprocess.run([*alone, "true"], capture_output=True).returncode:
        alone = []  # a container may not allow it
    done = subprocess.run([*alone, sys.executable, "-m", "slides", *options],
                          cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The pages of all decks; of the course the longest, with all slides."""
    folder = tmp_path_factory.mktemp("slides")
    run("--minutes", "240", "--no-pdf", "-o", folder)
    return folder


@pytest.mark.parametrize("length", text.LENGTHS)
def test_a_course_with_a_sites_settings_fits(
        length, browser, tmp_path, monkeypatch):
    needs("node", "chromium")
    if not build.MARP.exists():
        (pytest.fail if os.environ.get("CI") else pytest.skip)(
            "not installed: Marp (npm ci --prefix slides)")
    monkeypatch.setattr(build.text, "site", lambda path: SITE)
    page, = build.build(["course"], tmp_path, length, pdf=False)
    opened = browser.new_page()
    opened.goto(page.as_uri())
    opened.wait_for_selector(".bespoke-marp-active")
    assert opened.evaluate(BEYOND) == []
    shown = opened.locator("svg[data-marpit-svg] section").first.inner_text()
    assert all(SITE[name] in shown for name in (
        "WORKSHOP_SPEAKER", "WORKSHOP_ADDRESS"))
    opened.close()


BEYOND = """() => [...document.querySelectorAll("[data-marpit-svg] section")]
  .flatMap((slide, number) => [...slide.querySelectorAll("*")].filter(part => {
    const edge = slide.getBoundingClientRect(),
      box = part.getBoundingClientRect();
    return box.width && (box.bottom > edge.bottom + 1
      || box.right > edge.right + 1);
  }).map(part => `${number + 1}: ${part.textContent.slice(0, 60)}`))"""


@pytest.mark.parametrize("name", text.DECKS)
def test_a_deck_is_a_page_of_its_own_on_which_all_fits(name, built, browser):
    page, asked = browser.new_page(), []
    page.on("request", lambda request: asked.append(request.url))
    page.goto((built / f"{name}.html").as_uri())
    page.wait_for_selector(".bespoke-marp-active")
    assert page.locator("svg[data-marpit-svg]").count() == len(
        text.pages(deck(name)))
    assert page.evaluate(BEYOND) == []
    assert [url for url in asked if not url.startswith("file:")] == []
    page.add_style_tag(content="section { font-size: 90px !important }")
    assert page.evaluate(BEYOND)  # what does not fit is seen
    page.close()


SMALLEST = 18.5  # pixels of 720: the last row cannot read what is smaller
EMPTIEST = 0.35  # of a slide's tiles have something on them, at least


@pytest.mark.parametrize("name", text.DECKS)
def test_text_is_large_enough_and_no_slide_is_half_empty(name, built, browser):
    page = browser.new_page()
    slides = measure(page, built / f"{name}.html")
    assert [slide for slide in slides if slide.smallest < SMALLEST] == []
    leads = {number for number, markdown in enumerate(
        text.pages(deck(name)), 1) if "_class: lead" in markdown}
    assert [slide for slide in slides if slide.filled < EMPTIEST
            and slide.number not in leads] == []
    page.close()


def test_small_text_and_an_empty_slide_are_seen(tmp_path, browser):
    figure = (figures.SOURCES / "trainer.svg").read_text("utf-8")
    page = tmp_path / "planted.html"
    page.write_text(f"""<body class="bespoke-marp-active">
        <svg data-marpit-svg viewBox="0 0 1280 720"><foreignObject
        width="1280" height="720"><section><h2>Nothing</h2>
        <p style="font-size: 30px">little</p></section></foreignObject></svg>
        <svg data-marpit-svg viewBox="0 0 1280 720"><foreignObject
        width="1280" height="720"><section><h2>Small</h2>
        <figure style="width: 640px">{figure}</figure>
        </section></foreignObject></svg>""", encoding="utf-8")
    opened = browser.new_page()
    empty, small = measure(opened, page)
    opened.close()
    assert (empty.title, empty.number) == ("Nothing", 1)
    assert empty.filled < EMPTIEST and small.filled > empty.filled
    assert small.smallest == pytest.approx(14, abs=0.1)
    assert empty.smallest > SMALLEST


@pytest.mark.whole
def test_a_pdf_has_a_page_for_each_slide_and_its_notes(tmp_path):
    run("the-ladder", "--release", "-o", tmp_path)
    with zipfile.ZipFile(tmp_path / "slides.zip") as archive:
        assert archive.namelist() == [f"the-ladder{ending}" for ending in (
            ".html", ".pdf", "-notes.pdf")]
    slides = len(text.pages(deck("the-ladder")))
    for ending, noted in (("", 0), ("-notes", slides)):
        data = (tmp_path / f"the-ladder{ending}.pdf").read_bytes()
        for stream in re.findall(rb"stream\r?\n(.*?)endstream", data, re.S):
            try:  # the objects are in compressed streams
                data += zlib.decompressobj().decompress(stream)
            except zlib.error:
                continue
        assert len(re.findall(rb"/Type\s*/Page\b", data)) == slides
        assert len(re.findall(rb"/Subtype\s*/Text\b", data)) == noted
