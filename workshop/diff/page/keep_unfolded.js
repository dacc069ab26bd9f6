// A live view is replaced as a whole at each save: what was unfolded stays so.
(script => {
  const cell = script.closest(".jp-Cell");
  if (!cell) return;
  const open = cell.unfolded ??= new Set();
  for (const one of script.closest(".ws").querySelectorAll("details[id]")) {
    one.open = open.has(one.id);
    one.addEventListener("toggle", () =>
      open[one.open ? "add" : "delete"](one.id));
  }
})(document.currentScript)
