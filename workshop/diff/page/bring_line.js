// JupyterLab opens a link to a line with the line at the editor's lower edge.
// That may take long on a busy server: the line is awaited, unless the reader
// does something else meanwhile.
window.wsBringLine ??= (number => {
  let end = Date.now() + 30000, found = false;
  const stop = () => { end = 0; }, look = () => {
    const line = [...document.querySelectorAll(
      ".jp-FileEditor .cm-lineNumbers .cm-gutterElement")].find(
      one => one.textContent === String(number) && one.offsetHeight);
    const pane = line?.closest(".cm-scroller");
    if (pane && end) pane.scrollTop += line.getBoundingClientRect().top
      - pane.getBoundingClientRect().top - pane.clientHeight / 3;
    if (pane && !found) {  // JupyterLab may go on for a second
      found = true;
      end = Math.min(end, Date.now() + 1000);
    }
    if (Date.now() < end) setTimeout(look, 100);
  };
  for (const act of ["keydown", "mousedown", "wheel"])
    document.addEventListener(act, stop, {capture: true, once: true});
  setTimeout(look, 100);
}); window.wsLines ??= document.addEventListener("click", ({target}) => {
    const link = target.closest('.ws a[href*="#line="]');
    if (link) wsBringLine(1 + Number(link.hash.split("=")[1]));
  }, true) ?? true
