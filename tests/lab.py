"""What an attendee does in a real JupyterLab, in a real browser."""

import contextlib
import re

from cluster import wait_for


class Lesson:
    """The lesson on the right, the script on the left."""

    def __init__(self, page, url=None, notebook="diff_ddp"):
        """url: JupyterLab's address; left out, both are open already."""
        from playwright.sync_api import expect

        self.page, self.expect, self.runs = page, expect, 0
        self.tab = page.locator("#jp-main-dock-panel .lm-TabBar-tab",
                                has_text="train_gpt2.py")
        self.editor = page.locator(".jp-FileEditor .cm-content")
        if url:
            page.goto(f"{url}/lab/workspaces/{notebook}/tree/notebooks/"
                      f"{notebook}.ipynb")
        self.wait_for_kernel()
        assert not page.locator(".jp-Dialog").count()  # no kernel picker
        if url:
            self.put_side_by_side()

    def wait_for_kernel(self):
        # The toolbar says idle before there is a kernel, and the status bar
        # may still speak of the notebook that was shown before.
        self.page.wait_for_function("kernels_are_idle()", polling=200)
        self.expect(self.page.locator("#jp-bottom-panel")).to_contain_text(
            "| Idle")

    def put_side_by_side(self):
        page, files = self.page, self.page.locator(".jp-FileBrowser")
        files.locator(".jp-BreadCrumbs-home").click()
        for name in ("code", "train_gpt2.py"):
            files.locator(".jp-DirListing-item", has_text=name).dblclick()
        self.tab.click(button="right")
        page.locator(".lm-Menu-item", has_text="Split Tab").click()
        page.locator(".lm-Menu-item",
                     has_text=re.compile(r"^Left\s*$")).click()
        page.locator('.lm-TabBar-tab[data-id="filebrowser"]').click()  # close
        page.wait_for_function(
            "document.querySelector('.jp-FileEditor')"
            ".getBoundingClientRect().right <= document.querySelector("
            "'.jp-NotebookPanel').getBoundingClientRect().left")

    def in_sight(self, place):
        self.expect(self.page.locator(place).first).to_be_in_viewport(
            ratio=0.99)

    def choose_theme(self, dark):
        name = "Dark" if dark else "Light"
        self.page.locator(".lm-MenuBar-item", has_text="Settings").click()
        self.page.locator(".lm-Menu-item", has_text="Theme").first.hover()
        self.page.locator(".lm-Menu-item", has_text=re.compile(
            f"JupyterLab {name}$")).click()
        self.page.wait_for_function(
            "light => document.body.dataset.jpThemeLight == light",
            arg=str(not dark).lower())
        self.page.wait_for_timeout(300)  # the style sheets are there

    def can_be_read(self, least=50):
        """All of so many texts or more: in both themes, and at 150%."""
        self.fits()
        for dark in (False, True):
            self.choose_theme(dark)
            self.none(f"faint_texts({least})")

    def fits(self):
        """No word is broken; nothing is cut, also magnified to 150%.

        And JupyterLab does not ask whether it may show its news.
        """
        assert not self.page.get_by_text("official Jupyter news").count()
        self.none("broken(5)")
        size = self.page.viewport_size
        self.page.set_viewport_size({side: length * 2 // 3
                                     for side, length in size.items()})
        self.page.wait_for_timeout(300)
        self.none("overflowing()")
        self.page.set_viewport_size(size)

    def none(self, mistakes):
        """Once JupyterLab has laid out the page."""
        wait_for(lambda: not self.page.evaluate(mistakes), 30,
                 lambda: self.page.evaluate(mistakes))

    def readable(self, words):
        """Wait until a cell has put them out, and they are in sight."""
        self.page.wait_for_function("readable", arg=words, polling=100)

    def run(self, source, key="Control+Enter", timeout=400):
        """Run the cell; returns what it shows, as text."""
        return self.run_cell(self.page.locator(
            ".jp-NotebookPanel:visible .jp-CodeCell", has=self.page.locator(
                ".jp-InputArea", has_text=source)).first, key, timeout)

    def run_cell(self, cell, key="Control+Enter", timeout=400):
        prompt = self.expect(cell.locator(".jp-InputPrompt"))
        before = cell.locator(".jp-InputPrompt").inner_text()

        def begin():  # a notebook that has just been opened may not listen
            cell.locator(".cm-content").click()
            self.page.keyboard.press(key)
            with contextlib.suppress(AssertionError):
                prompt.not_to_have_text(before, timeout=20_000)
                return True

        wait_for(begin, 100)
        self.runs += 1
        prompt.to_have_text(f"[{self.runs}]:", timeout=1000 * timeout)
        self.output = cell.locator(".jp-OutputArea-output")
        return "\n".join(self.output.all_inner_texts())

    def write_instead(self, source, new):
        """Replace what is in the cell."""
        cell = self.page.locator(".jp-NotebookPanel:visible .jp-CodeCell",
                                 has_text=source)
        cell.locator(".cm-content").click()
        words = f"from lesson import apply, diff, submit\n{new}"

        def shown():
            return self.page.evaluate("document.activeElement.innerText")

        def write():  # on a busy machine a click may undo the selection
            self.page.keyboard.press("Control+a")
            self.page.keyboard.insert_text(words)
            return shown().strip() == words

        wait_for(write, 30, shown)
        return cell

    def run_instead(self, source, new, key="Control+Enter"):
        self.write_instead(source, new)
        return self.run(new, key=key)

    def type_over(self, line, new):
        """Replace the end of the line that ends with `line`."""
        self.page.evaluate("document.querySelector('.jp-FileEditor"
                           " .cm-scroller').scrollTop = 0")
        self.editor.locator(".cm-line", has_text=line).first.click()
        self.page.keyboard.press("End")
        for _ in line:
            self.page.keyboard.press("Backspace")
        self.page.keyboard.type(new)

    def paste(self, text):
        """Replace the whole script, and save it."""
        self.editor.click(position={"x": 200, "y": 5})
        self.page.keyboard.press("Control+a")
        self.page.keyboard.insert_text(text)
        self.save()

    def save(self):
        self.editor.press("Control+s")
        self.expect(self.tab).not_to_have_class(re.compile("jp-mod-dirty"))
