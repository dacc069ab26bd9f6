// JupyterLab shows the ```diff of a lesson without colours. Its lines get
// the view's, and a link to where they are in the script: the page alone knows
// the line, as the script is now. It scrolls the editor, first as if all lines
// were as high as those that are there. A kernel that is new does not know a
// magic, and says no more.
window.wsTexts ??= setInterval(() => {
  for (const said of document.querySelectorAll(
      ".jp-OutputArea-output[data-mime-type$=stderr] pre:not(.ws-told)"))
    if (/Cell magic `%%(mpi|ranks)` not found/.test(said.textContent)) {
      said.className = "ws-told";
      said.append("The kernel is new. Run the cell that has %load_ext lesson, "
        + "near the top, and then this one again.");
    }
  for (const code of document.querySelectorAll(
      ".jp-MarkdownOutput pre:not(.code) > .language-diff")) {
    const pre = code.parentElement, view = document.createElement("div");
    const link = document.createElement("a");
    const old = code.textContent.match(/^[- ] *(.+)/m)?.[1].trim();
    pre.replaceWith(view);
    pre.className = "code";
    view.className = "ws";
    const plain = code.textContent.trimEnd().replace(
      /[&<>]/g, sign => `&#${sign.charCodeAt()};`);
    code.innerHTML = plain.split("\n").map(
      line => `<span class="${{"+": "add", "-": "del"}[line[0]] ?? ""}"
        ><b style="width: 1px"> </b>${line}\n</span>`).join("");
    view.append(pre, link);
    link.href = "#";
    link.textContent = old ? "Show the line" : "";
    link.onclick = async event => {
      event.preventDefault();
      const page = document.getElementById("jupyter-config-data");
      const url = JSON.parse(page.textContent).baseUrl + "api/contents/";
      const script = await fetch(url + WORKING_COPY + "?type=file&format=text");
      const lines = (await script.json()).content.split("\n");
      const at = lines.findIndex(line => line.trim() === old);
      const pane = [...document.querySelectorAll(
        ".jp-FileEditor .cm-scroller")].find(one => one.offsetHeight);
      link.textContent = at < 0 ? "Your script has no such line." : pane
        ? `line ${at + 1}` : `line ${at + 1} (open the script beside this)`;
      if (!pane || at < 0) return;
      pane.scrollTop = at * pane.querySelector(
        ".cm-line").getBoundingClientRect().height - pane.clientHeight / 3;
      wsBringLine(at + 1);
    };
  }
}, 500)
