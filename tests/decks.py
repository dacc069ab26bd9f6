"""Measures the slides as a browser draws them: their smallest text, their
empty space.

    python -m slides --minutes 240 --no-pdf
    PYTHONPATH=tests python -m decks slides/build/*.html    # the emptiest
"""

import io
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Page

WIDTH, HEIGHT = 1280, 720  # of a slide, as theme.css says
TILE = 40  # pixels, of what is filled or empty

# The smallest text of each slide, in the slide's own pixels: {size, words}.
SMALLEST_TEXTS = """width => [
  ...document.querySelectorAll("svg[data-marpit-svg]")].map(slide => {
    const scale = slide.getBoundingClientRect().width / width;
    const walk = document.createTreeWalker(slide, NodeFilter.SHOW_TEXT);
    let smallest = {size: 1000, words: ""};
    while (walk.nextNode()) {
      const node = walk.currentNode, parent = node.parentElement;
      const words = node.textContent.trim();
      if (!words || !parent.getClientRects().length) continue;  // unseen
      let size = parseFloat(getComputedStyle(parent).fontSize);
      if (parent.closest("section svg")) {
        const matrix = parent.getScreenCTM();
        size *= Math.hypot(matrix.c, matrix.d) / scale;
      }
      if (size < smallest.size) smallest = {size, words};
    }
    return smallest;
  })"""

# All slides below each other, each as large as it is made.
STACKED = f"""
html, body {{ overflow: visible !important; height: auto !important }}
.bespoke-marp-osc, .bespoke-progress-parent {{ display: none !important }}
svg[data-marpit-svg] {{ content-visibility: visible !important;
  display: block !important; opacity: 1 !important; pointer-events: auto;
  position: static !important; width: {WIDTH}px !important;
  height: {HEIGHT}px !important; visibility: visible !important }}
"""


@dataclass(frozen=True)
class Slide:
    """What was measured of a slide."""

    deck: str
    number: int
    title: str
    smallest: float  # the size of its smallest text, in pixels of the slide
    words: str  # that text
    filled: float  # the share of its tiles on which something is drawn


def measure(page: "Page", path: Path, fill: bool = True) -> list[Slide]:
    """Open a deck, and measure each of its slides.

    Args:
        page: a browser's page, which is left showing the deck.
        path: the deck's HTML page.
        fill: also measure what is filled; else that is 1.
    """
    page.set_viewport_size({"width": WIDTH, "height": HEIGHT})
    page.goto(path.as_uri())
    page.wait_for_selector(".bespoke-marp-active")
    page.add_style_tag(content=STACKED)
    slides = page.locator("svg[data-marpit-svg]")
    found = []
    texts = page.evaluate(SMALLEST_TEXTS, WIDTH)
    for number, smallest in enumerate(texts, 1):
        slide = slides.nth(number - 1)
        heading = slide.locator("h1, h2").first
        filled = 1.0
        if fill:
            filled = filled_share(slide.screenshot())
        found.append(Slide(path.stem, number, heading.inner_text(),
                           smallest["size"], smallest["words"], filled))
    return found


def filled_share(picture: bytes) -> float:
    """Return the share of a slide's tiles that are not empty.

    A tile is empty if all of it has the colour of the slide's corner.
    """
    from PIL import Image

    image = Image.open(io.BytesIO(picture)).convert("L")
    paper = image.getpixel((image.width - 1, 0))
    filled = tiles = 0
    for top in range(0, image.height - TILE + 1, TILE):
        for left in range(0, image.width - TILE + 1, TILE):
            tile = image.crop((left, top, left + TILE, top + TILE))
            tiles += 1
            if tile.getextrema() != (paper, paper):
                filled += 1
    return filled / tiles


def main() -> None:
    """Print the slides of decks, the emptiest first."""
    import shutil

    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page()
        slides = []
        for name in sys.argv[1:]:
            slides += measure(page, Path(name).resolve())
        browser.close()
    print(" filled  smallest  slide")
    for slide in sorted(slides, key=lambda slide: slide.filled):
        print(f"{slide.filled:7.0%} {slide.smallest:6.1f} px  {slide.deck} "
              f"{slide.number}: {slide.title}")


if __name__ == "__main__":
    main()
