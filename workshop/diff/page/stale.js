// A view that its kernel shows anew is dead after a reload of the page, or when
// the kernel is another one: the page alone can say so. The kernel writes the
// time into a file again and again. A view is dead if that stands still, if it
// is older than this page (reloaded, or a second tab), or if it was old when
// its cell saw it first (closed, and opened again). A cell that has had a live
// view is the same since then: what it shows has just come, however late. A view
// is also dead if the page has shown it in another cell before: the notebook was
// closed and opened again, or the cell was moved.
((script, path, born) => {
  const line = script.previousElementSibling, begin = performance.now();
  const page = document.getElementById("jupyter-config-data");
  const cell = script.closest(".jp-Cell");
  if (!page || !cell) return;
  const url = JSON.parse(page.textContent).baseUrl + "api/contents/" + path;
  const fresh = cell.fresh ??= {};
  const panel = cell.closest(".jp-NotebookPanel")?.id;
  const first = (window.workshopViews ??= {})[born] ??= {
    cell: new WeakRef(cell), panel};
  if (first.cell.deref() !== cell && (
    first.panel === panel || !document.getElementById(first.panel)))
    fresh[born] = false;  // what is shown here has been read from a file
  let now = 0, changed = begin, times = 0;
  const look = async () => {
    if (!line.closest(".jp-Cell")) return;  // there is a newer view
    line.hidden = (fresh[born] ?? true) && performance.now() - changed < 2000;
    try {
      const answer = await fetch(`${url}?type=file&format=text`);
      if (answer.status === 404) return line.hidden = false;
      const said = Number((await answer.json()).content);
      if (said && said !== now) {
        now = said;
        changed = performance.now();
        // The kernel wrote it a moment ago, or longer ago where it is busy, so
        // the page may be younger than one of these times says.
        fresh[born] ??= Object.values(fresh).includes(true)
          || now - (changed - begin) / 1000 < born + 10;
        if (times++ < 20) fresh[born] &&= now - changed / 1000 < born;
      }
    } catch {}  // the server is gone, too
    setTimeout(look, 500);
  };
  look();
})(document.currentScript, PATH, BORN)
