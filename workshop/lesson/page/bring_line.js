// JupyterLab opens a link to a line with the line at the editor's lower edge.
window.wsBringLine ??= document.addEventListener(
  "click", ({target}) => {
    const link = target.closest('.ws a[href*="#line="]'), begin = Date.now();
    const number = String(1 + Number(link?.hash.split("=")[1]));
    const look = () => {
      const line = [...document.querySelectorAll(
        ".jp-FileEditor .cm-lineNumbers .cm-gutterElement")].find(
        one => one.textContent === number && one.offsetHeight);
      const pane = line?.closest(".cm-scroller");
      if (pane) pane.scrollTop += line.getBoundingClientRect().top
        - pane.getBoundingClientRect().top - pane.clientHeight / 3;
      if (Date.now() - begin < 1000) setTimeout(look, 100);
    };
    if (link) setTimeout(look, 100);
  }, true) ?? true
