// What the tests ask of a page of JupyterLab, or of a slide.

function pane() {
  return document.querySelector(".jp-NotebookPanel:not(.lm-mod-hidden) "
    + ".jp-WindowedPanel-outer");
}

// Whether every notebook in sight has a kernel, and is connected to it.
function kernels_are_idle() {
  const shown = [...document.querySelectorAll(
    "#jp-main-dock-panel .lm-TabBar-tab.lm-mod-current")].map(
    tab => tab.innerText.trim()).filter(name => name.endsWith(".ipynb"));
  return fetch("/api/sessions").then(answer => answer.json()).then(
    open => shown.length && shown.every(name => open.some(
      session => session.name === name && session.kernel.connections
        && session.kernel.execution_state === "idle"))).catch(() => false);
}

// Whether words that a cell has put out are in sight.
function readable(words) {
  const around = pane().getBoundingClientRect();
  const walk = document.createTreeWalker(pane(), NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const text = walk.currentNode, at = text.textContent.indexOf(words);
    if (at < 0 || !text.parentElement.closest(".jp-OutputArea-output"))
      continue;
    const range = document.createRange();
    range.setStart(text, at);
    range.setEnd(text, at + words.length);
    const box = range.getBoundingClientRect();
    if (box.height && box.top >= around.top && box.bottom <= around.bottom)
      return true;
  }
  return false;
}

// Scroll until only the end of what is left to change is in sight. False
// while it is being shown anew.
function scroll_to_its_end() {
  const end = pane().querySelector(".ws:has(.strip)")?.getBoundingClientRect();
  if (!end?.height) return false;
  pane().scrollTop += end.bottom - pane().getBoundingClientRect().top - 60;
  return true;
}

// The lesson's views that are cut at their right, and what reaches furthest.
function overflowing() {
  return [...pane().querySelectorAll(".ws")].filter(
    view => view.clientWidth && view.scrollWidth > view.clientWidth + 1)
    .map(view => `${view.scrollWidth} of ${view.clientWidth}: `
      + [...view.querySelectorAll("*")].sort((a, b) =>
        b.getBoundingClientRect().right - a.getBoundingClientRect().right
      )[0]?.outerHTML.slice(0, 120));
}

// What is cut or broken in the notebook's outputs, all of it unfolded: what is
// wider than its place, words and numbers that go on in the next line, and
// lines of columns that do. least: how many words there have to be.
function broken(least) {
  const folds = [...pane().querySelectorAll(
    ".jp-OutputArea-output details:not([open])")];
  folds.forEach(fold => fold.open = true);
  const found = [], tell = (what, words) =>
    found.push(`${what}: ${words.trim().slice(0, 60)}`);
  const lines = (node, begin, end) => {
    const range = document.createRange();
    range.setStart(node, begin);
    range.setEnd(node, end);
    return new Set([...range.getClientRects()].filter(box => box.width)
      .map(box => Math.round(box.top))).size;
  };
  // whether what stands around it without a space is wider than its place
  const wide = (node, begin, end) => {
    const words = node.textContent, range = document.createRange();
    range.setStart(node, words.slice(0, begin).search(/\S*$/));
    range.setEnd(node, end + words.slice(end).search(/\s|$/));
    const sum = [...range.getClientRects()].reduce((a, b) => a + b.width, 0);
    return sum > node.parentElement.closest(
      "p, td, th, pre, summary, div").clientWidth - 24;  // its indentation
  };
  let seen = 0;
  for (const output of pane().querySelectorAll(".jp-OutputArea-output")) {
    for (const one of [output, ...output.querySelectorAll("*:not(.unseen, caption, svg *, .said, .said *)")])
      if (one.clientWidth && one.scrollWidth > one.clientWidth + 1)
        tell(`${one.scrollWidth} of ${one.clientWidth}`, one.innerText ?? "");
    const walk = document.createTreeWalker(output, NodeFilter.SHOW_TEXT);
    while (walk.nextNode()) {
      const node = walk.currentNode, words = node.textContent;
      if (!node.parentElement.getClientRects().length
          || node.parentElement.closest("style, script, .unseen, .code"))
        continue;  // code may be a word that is wider than its place
      for (const word of words.matchAll(
          /\d[\d.,]*(e[-+]\d+)?|[\p{L}\p{N}_]+/gu)) {
        seen += 1;
        const end = word.index + word[0].length;
        if (lines(node, word.index, end) > 1 && !wide(node, word.index, end))
          tell("broken", word[0]);
      }
      if (node.parentElement.closest("pre:not(.code)"))
        for (const line of words.matchAll(/^(\|.*|(.*\S {3,}){2}\S.*)$/gm))
          if (lines(node, line.index, line.index + line[0].length) > 1)
            tell("columns", line[0]);
    }
  }
  folds.forEach(fold => fold.open = false);
  return seen < least ? ["there are too few words"] : found;
}

// The texts whose contrast is below 4.5:1: the colours as the browser computes
// them, over all that is painted beneath. least: how many there have to be.
function faint_texts(least, where = ".ws") {
  const read = colour => {
    const [r, g, b, a = 1] = colour.match(/[\d.]+/g).map(Number);
    return [r, g, b, a];
  };
  const over = (top, below) => [0, 1, 2].map(
    i => top[i] * top[3] + below[i] * (1 - top[3]));
  const light = colour => {
    const [r, g, b] = colour.map(v => v / 255).map(
      v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const page = node => {  // what is painted under it
    const stack = [];
    for (let n = node; n; n = n.parentElement) {
      stack.push(read(getComputedStyle(n).backgroundColor));
    }
    let colour = [255, 255, 255];
    for (const layer of stack.reverse()) colour = over(layer, colour);
    return colour;
  };
  const opacity = node => node
    ? getComputedStyle(node).opacity * opacity(node.parentElement) : 1;
  const faint = [];
  let seen = 0;
  const judge = (words, ink, ground, alpha) => {
    seen += 1;
    ink = over([...ink.slice(0, 3), ink[3] * alpha], ground);
    const [a, b] = [light(ink), light(ground)].sort((x, y) => y - x);
    const ratio = (a + .05) / (b + .05);
    if (ratio < 4.5) faint.push(`${words}: ${ratio.toFixed(2)}`);
  };
  for (const view of document.querySelectorAll(where)) {
    const walk = document.createTreeWalker(view, NodeFilter.SHOW_TEXT);
    while (walk.nextNode()) {
      const node = walk.currentNode.parentElement, words =
        walk.currentNode.textContent.trim();
      if (!words || /^(STYLE|SCRIPT|title|desc)$/.test(node.nodeName)
          || !node.getClientRects().length) continue;
      if (node.nodeName != "text") {
        judge(words, read(getComputedStyle(node).color), page(node),
              opacity(node));
        continue;
      }
      const svg = node.closest("svg"), box = node.getBoundingClientRect();
      const x = box.x + box.width / 2, y = box.y + box.height / 2;
      let ground = page(svg);
      for (const one of svg.querySelectorAll("rect, text")) {
        if (one === node) break;
        const r = one.getBoundingClientRect(), s = getComputedStyle(one);
        if (one.nodeName == "rect" && s.fill != "none" && r.left <= x
            && x <= r.right && r.top <= y && y <= r.bottom) {
          const fill = read(s.fill);
          ground = over([...fill.slice(0, 3), fill[3] * s.fillOpacity],
                        ground);
        }
      }
      judge(words, read(getComputedStyle(node).fill), ground, opacity(node));
    }
  }
  return seen < least ? ["there is too little text"] : faint;
}

Object.assign(window, {
  readable, overflowing, broken, faint_texts, kernels_are_idle,
  scroll_to_its_end });
