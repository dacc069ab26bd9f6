"""The parts of a script, with links to their lines."""

import ast
import html
import re


def script_map(source, path):
    """Sections, classes and functions of a script, with links to their lines.
    """
    heads = [(number, match[1]) for number, row in
             enumerate(source.splitlines(), 1)
             if (match := re.fullmatch(r"# -{3,} (.+)", row))]
    heads = [(0, "beginning"), *heads, (source.count("\n") + 2, "")]
    items = [node for node in ast.parse(source).body
             if isinstance(node, (ast.ClassDef, ast.FunctionDef))]
    out = []
    for (begin, name), (end, _) in zip(heads, heads[1:]):
        rows = [describe(node, path) for node in items
                if begin < node.lineno < end]
        if rows:
            out.append(f"<h3>{html.escape(name)}</h3>{''.join(rows)}")
    return "".join(out)


def describe(node, path):
    """A class or function in a row: its line, name, methods, purpose."""
    kind = "class" if isinstance(node, ast.ClassDef) else "def"
    methods = [child.name for child in node.body
               if isinstance(child, ast.FunctionDef)
               and not child.name.startswith("__")]
    about = (ast.get_docstring(node) or "").split("\n")[0]
    inside = f": {', '.join(methods)}" if methods and kind == "class" else ""
    return (f'<p><a href="{path}#line={node.lineno - 1}">line '
            f"{node.lineno}</a> {kind} "
            f"<strong>{node.name}</strong>{inside} "
            f'<span class="place">{html.escape(about)}</span></p>')
