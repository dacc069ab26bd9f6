"""Builds the slides: python -m slides."""

import argparse
import sys

from backstage.errors import UserError, run_main
from backstage.files import show_path
from workshop.instructor.plan import LENGTHS


def main():
    parser = argparse.ArgumentParser(
        prog="python -m slides", description="Build the decks of slides: "
        "pages that need no network, and PDFs.")
    parser.add_argument("deck", nargs="*", help="which ones (default: all)")
    parser.add_argument("--minutes", type=int, choices=LENGTHS,
                        default=60, help="of the course (60)")
    parser.add_argument("-o", "--output", default="slides/build",
                        help="the folder (slides/build)")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--no-pdf", action="store_true",
                      help="the pages alone, which need no browser")
    kind.add_argument("--release", action="store_true", help="PDFs with the "
                      "notes, too, and all of it in one archive, slides.zip")
    kind.add_argument("--markdown", action="store_true", help="instead, "
                      "write what the repository keeps: the decks in "
                      "Markdown, the figures, the table in "
                      "slides/README.md, the pages in docs/lessons/")
    args = parser.parse_args()
    try:
        from slides import build, text
    except ModuleNotFoundError as error:
        raise UserError(f"{sys.executable} has no {error.name}: run `source "
                        "activate.sh` first") from error
    for name in args.deck:
        if name not in text.DECKS:
            raise UserError(f"there is no deck {name}: choose from "
                            f"{', '.join(text.DECKS)}")
    if args.markdown:
        for path in build.write_documents():
            print(f"written: {show_path(path)}")
    else:
        for path in build.build(args.deck or list(text.DECKS), args.output,
                                args.minutes, not args.no_pdf, args.release):
            print(show_path(path))


if __name__ == "__main__":
    run_main(main)
