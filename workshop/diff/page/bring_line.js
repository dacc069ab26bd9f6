// JupyterLab opens a link to a line with the line at the editor's lower edge.
window.wsBringLine ??= (number => {
  const begin = Date.now(), look = () => {
    const line = [...document.querySelectorAll(
      ".jp-FileEditor .cm-lineNumbers .cm-gutterElement")].find(
      one => one.textContent === String(number) && one.offsetHeight);
    const pane = line?.closest(".cm-scroller");
    if (pane) pane.scrollTop += line.getBoundingClientRect().top
      - pane.getBoundingClientRect().top - pane.clientHeight / 3;
    if (Date.now() - begin < 1000) setTimeout(look, 100);
  };
  setTimeout(look, 100);
}); window.wsLines ??= document.addEventListener("click", ({target}) => {
    const link = target.closest('.ws a[href*="#line="]');
    if (link) wsBringLine(1 + Number(link.hash.split("=")[1]));
  }, true) ?? true
