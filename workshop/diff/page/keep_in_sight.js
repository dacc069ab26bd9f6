// Shift+Enter scrolls on to the next cell, before the output is there. This
// brings the top of the view back, if some of it is still in sight. After
// Ctrl+Enter, or a click into the view, the cell is the active one: then the
// top comes back only when another change is the next one to make, or when what
// is left of this one is out of sight: the view may be much shorter then. If a
// cell has made the change, what it says is read first (reload the script): the
// top comes back with a click into the script, also if the view is shown anew
// before that.
(script => setTimeout(() => {
  const view = script.closest(".ws"), cell = script.closest(".jp-Cell");
  const pane = script.closest(".jp-WindowedPanel-outer");
  if (!pane) return;
  cell.shownView = view;
  const next = view.querySelector("h3")?.id ?? "";
  const panel = pane.closest(".jp-NotebookPanel");
  const focused = panel.contains(document.activeElement);
  // for a click into the script, unless its own cell was run again
  const run = cell.querySelector(".jp-InputPrompt")?.textContent ?? "";
  const waits = cell.dataset.waits === run;
  const same = !waits && (cell.dataset.next ?? next) === next;
  cell.dataset.next = next;
  if (waits && focused) return;
  delete cell.dataset.waits;
  const edge = pane.getBoundingClientRect().top;
  const active = cell.classList.contains("jp-mod-active");
  const code = view.querySelector(":scope > pre.code") ?? view;
  if (same && active && code.getBoundingClientRect().bottom > edge) return;
  const reach = same && !active ? edge : edge - 2 * pane.clientHeight;
  const bring = () => {
    const {top, bottom} = cell.shownView.getBoundingClientRect();
    if (cell.shownView.isConnected && top < edge && bottom > reach)
      pane.scrollTop += top - edge - 4;
  };
  if (same || !focused) return bring();
  cell.dataset.waits = run;
  panel.addEventListener("focusout", function leave({relatedTarget}) {
    if (!relatedTarget || panel.contains(relatedTarget)) return;
    panel.removeEventListener("focusout", leave);
    if (cell.dataset.waits !== run) return;
    delete cell.dataset.waits;
    bring();
  });
}, 100))(document.currentScript)
