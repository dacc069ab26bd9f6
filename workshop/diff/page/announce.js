// A live view is replaced as a whole at each save: screen readers would read
// all of it, or nothing. So one line of the page, which stays, tells them what
// is new.
(words => {
  let line = document.getElementById("ws-status");
  if (!line) {
    line = document.createElement("div");
    line.id = "ws-status";
    line.setAttribute("role", "status");
    line.style = "position: fixed; top: 0; clip-path: inset(50%)";
    document.body.append(line);
  }
  if (line.textContent !== words) line.textContent = words;
})(WORDS)
