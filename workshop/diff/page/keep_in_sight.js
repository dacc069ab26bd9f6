// Shift+Enter scrolls on to the next cell, before the output is there. This
// brings the top of the view back, if some of it is still in sight. After
// Ctrl+Enter, or a click into the view, the cell is the active one: then the
// top comes back only when another change is the next one to make, or when what
// is left of this one is out of sight: the view may be much shorter then. If a
// cell has made the change, what it says is read first (reload the script): the
// top comes back with a click into the script.
(script => setTimeout(() => {
  const view = script.closest(".ws"), cell = script.closest(".jp-Cell");
  const pane = script.closest(".jp-WindowedPanel-outer");
  if (!pane) return;
  const next = view.querySelector("h3")?.id ?? "";
  const same = (cell.dataset.next ?? next) === next;
  cell.dataset.next = next;
  const edge = pane.getBoundingClientRect().top;
  const active = cell.classList.contains("jp-mod-active");
  const code = view.querySelector(":scope > pre.code") ?? view;
  if (same && active && code.getBoundingClientRect().bottom > edge) return;
  const reach = same && !active ? edge : edge - 2 * pane.clientHeight;
  const bring = () => {
    const {top, bottom} = view.getBoundingClientRect();
    if (view.isConnected && top < edge && bottom > reach)
      pane.scrollTop += top - edge - 4;
  };
  const panel = pane.closest(".jp-NotebookPanel");
  if (same || !panel.contains(document.activeElement)) return bring();
  panel.addEventListener("focusout", function leave({relatedTarget}) {
    if (!relatedTarget || panel.contains(relatedTarget)) return;
    panel.removeEventListener("focusout", leave);
    bring();
  });
}, 100))(document.currentScript)
