"""A stage's script, made whole in one file: python -m workshop take-home

The file holds the script and what it needs of the backstage, found in the
syntax trees: the names that the script uses, the names that these use, and so
on. Text is moved, not written anew, so comments and docstrings stay. A name
that two modules have, or that is used as `module.name`, becomes `module_name`.
"""

import ast
import re
from functools import cache
from pathlib import Path

from backstage import ROOT
from backstage.errors import require
from backstage.files import show_path, write_atomically
from workshop.stages import find

PACKAGE = "backstage"
SCOPES = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.Lambda)
IMPORTS = (ast.Import, ast.ImportFrom)


def is_ours(node):
    """Whether a statement imports something of the backstage."""
    return isinstance(node, ast.ImportFrom) and (
        node.module.split(".")[0] == PACKAGE)


def bound_names(nodes):
    """The names that statements bind, without those of inner scopes."""
    found, free, todo = set(), set(), [*nodes]
    while todo:
        node = todo.pop()
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
            continue
        if isinstance(node, IMPORTS):
            if not is_ours(node):
                found |= {alias.asname or alias.name.split(".")[0]
                          for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            found.add(node.name)
        elif isinstance(node, ast.Global):
            free |= {*node.names}
        if not isinstance(node, (*SCOPES, ast.Lambda)):
            todo += ast.iter_child_nodes(node)
    return found - free


def global_uses(node, hidden=frozenset()):
    """The nodes below this one that use a name of the module.

    Each is a Name, an Attribute of one, or a Global. hidden: the names that
    a scope around it has.
    """
    if isinstance(node, ast.Global):
        yield node
    elif isinstance(node, ast.Name):
        if node.id not in hidden:
            yield node
    elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        if node.value.id not in hidden:
            yield node
    elif isinstance(node, FUNCTIONS):
        body = node.body if isinstance(node.body, list) else [node.body]
        arguments = {arg.arg for arg in ast.walk(node.args)
                     if isinstance(arg, ast.arg)}
        inside = hidden | arguments | bound_names(body)
        for child in ast.iter_child_nodes(node):
            yield from global_uses(child, inside if child in body else hidden)
    elif isinstance(node, ast.ClassDef):
        own = bound_names(node.body)  # which its methods do not see
        for child in ast.iter_child_nodes(node):
            own_too = child in node.body and not isinstance(child, FUNCTIONS)
            yield from global_uses(child, hidden | own if own_too else hidden)
    else:
        if isinstance(node, SCOPES):
            hidden = hidden | bound_names(
                [part.target for part in node.generators])
        for child in ast.iter_child_nodes(node):
            yield from global_uses(child, hidden)


class Module:
    """A file's statements, and what each name in it stands for."""

    def __init__(self, path):
        self.path = path
        self.name = (path.parent if path.stem == "__init__" else path).stem
        text = path.read_text("utf-8")
        self.lines = text.encode().splitlines(keepends=True)
        tree = ast.parse(text)
        self.docstring = ast.get_docstring(tree)
        self.statements = [
            node for node in tree.body[bool(self.docstring):]
            if not isinstance(node, IMPORTS)]
        self.definitions = {}  # name -> the statements that bind it
        for node in self.statements:
            for name in bound_names([node]):
                self.definitions.setdefault(name, []).append(node)
        self.imports = {}  # name -> the line that imports it
        self.ours = {}  # name -> (path, its name there, None: all of it)
        for node in ast.walk(tree):
            if is_ours(node):
                for alias in node.names:
                    self.ours[alias.asname or alias.name] = self.locate(
                        node.module, alias.name)
        for node in tree.body:
            if isinstance(node, IMPORTS) and not is_ours(node):
                begin = (f"from {node.module} " if isinstance(
                    node, ast.ImportFrom) else "") + "import "
                for alias in node.names:
                    name = alias.asname or alias.name.split(".")[0]
                    self.imports[name] = begin + ast.unparse(alias)

    def locate(self, module, name):
        folder = ROOT.joinpath(*module.split("."))
        if folder.is_dir():
            file = folder / f"{name}.py"
            return (file, None) if file.exists() else (
                folder / "__init__.py", name)
        return folder.with_suffix(".py"), name

    def uses(self, statement):
        """(node, module, name) for what a statement uses, imports too."""
        for node in global_uses(statement):
            names = (node.names if isinstance(node, ast.Global) else
                     [node.id if isinstance(node, ast.Name)
                      else node.value.id])
            for name in names:
                path, there = self.ours.get(name, (self.path, name))
                if there is None:
                    yield node, read(path), node.attr
                else:
                    part = (node.value if isinstance(node, ast.Attribute)
                            else node)
                    yield part, read(path), there

    def modules(self):
        """The modules of the backstage that it imports, anywhere."""
        return {read(path) for path, _ in self.ours.values()}

    def text(self, statement, names):
        """A statement with the comments above it, and with the new names."""
        above = first = min([statement.lineno] + [
            part.lineno for part in getattr(statement, "decorator_list", [])])
        while above > 1 and self.lines[above - 2][:1] in b"#\n":
            above -= 1
            if self.lines[above - 1].startswith(b"#"):
                first = above
        lines = self.lines[:statement.end_lineno]
        edits = {(node.lineno, node.col_offset, node.end_col_offset):
                 (node, name, names[module, name])
                 for node, module, name in self.uses(statement)
                 if (module, name) in names}
        for (line, begin, end), (node, name, new) in sorted(
                edits.items(), reverse=True, key=lambda edit: edit[0]):
            row, old = lines[line - 1], ast.unparse(node)
            if isinstance(node, ast.Global):
                new = re.sub(rf"\b{name}\b", new, old)
            if old == new:
                continue
            require(row[begin:end] == old.encode(), f"{self.path}:{line}: "
                    f"{old} cannot be renamed here")
            lines[line - 1] = row[:begin] + new.encode() + row[end:]
        new = names.get((self, getattr(statement, "name", None)))
        if new:  # def name, class name
            lines[statement.lineno - 1] = re.sub(
                rb"\w+(?=[(:])", new.encode(), lines[statement.lineno - 1],
                count=1)
        for node in ast.walk(statement):
            if is_ours(node):
                lines[node.lineno - 1:node.end_lineno] = [b""] * (
                    node.end_lineno - node.lineno + 1)
        return b"".join(lines[first - 1:]).decode()


@cache
def read(path):
    """The `Module` of a file."""
    return Module(path)


def collect(script):
    """What the script needs: {module: its statements}, in any order."""
    needed = {}
    todo = [(script, node) for node in script.statements]
    while todo:
        module, statement = todo.pop()
        if statement in needed.setdefault(module, []):
            continue
        if not needed[module]:  # what it does when it is imported
            todo += [(module, node) for node in module.statements
                     if not bound_names([node])]
        needed[module].append(statement)
        for _, other, name in module.uses(statement):
            todo += [(other, node) for node in other.definitions.get(name, [])]
    return needed


def choose_names(needed, imports):
    """{(module, name): its name in the one file}."""
    owners, through = {}, set()
    for module, statements in needed.items():
        for name in bound_names(statements):
            owners.setdefault(name, []).append(module)
        for statement in statements:
            through |= {(other, name) for node, other, name
                        in module.uses(statement)
                        if isinstance(node, ast.Attribute)}
    names = {}
    for name, modules in owners.items():
        for module in modules:
            clear = len(modules) == 1 and name not in imports and (
                (module, name) not in through)
            prefix = module.name.upper() if name.isupper() else module.name
            ours = module.path.parent.name == PACKAGE
            names[module, name] = (
                name if clear or not ours else f"{prefix}_{name}")
    return names


def in_order(modules):
    """The modules, each after those that it imports."""
    done = []

    def visit(module):
        for other in sorted(module.modules(), key=lambda other: other.name):
            visit(other)
        if module in modules and module not in done:
            done.append(module)

    for module in sorted(modules, key=lambda module: module.name):
        visit(module)
    return done


def write_imports(imports):
    """The lines that import; those from one module are joined."""
    joined = {}
    for line in sorted({*imports.values()}):
        begin, _, name = line.partition("import ")
        joined.setdefault(begin or line, []).append(name)
    lines = []
    for begin, names in joined.items():
        line = f"{begin}import {', '.join(names)}"
        if len(line) > 79:
            line = f"{begin}import (\n    " + ",\n    ".join(names) + ",\n)"
        lines.append(line if begin.startswith("from") else begin)
    return "\n".join(sorted(lines, key=lambda line: line[0] != "i"))


def make_whole(path):
    """The text of one file that does what the script does."""
    script = read(path)
    needed = collect(script)
    imports = {}
    for module, statements in needed.items():
        for statement in statements:
            for _, other, name in module.uses(statement):
                if name in other.imports:
                    line = imports.setdefault(name, other.imports[name])
                    require(line == other.imports[name], f"{name} means "
                            f"{line} and {other.imports[name]}")
    names = choose_names(needed, imports)
    parts = [f'"""{script.docstring}\n\nThe parts of {PACKAGE}/ that it needs '
             f'are in this file.\n"""\n\n{write_imports(imports)}']
    for module in in_order(needed):
        if module is not script:
            title = module.docstring or module.name
            parts.append(f"# {'=' * 20} {PACKAGE}/{module.path.name}\n" + "\n"
                         .join(f"# {line}".rstrip()
                               for line in title.splitlines()))
        else:
            parts.append(f"# {'=' * 20} {show_path(path)}")
        parts += [module.text(node, names).rstrip()
                  for node in module.statements if node in needed[module]]
    text = "\n\n\n".join(parts) + "\n"
    # the runs are beside the file, not in a folder above it
    text = text.replace("(__file__).resolve().parent.parent  # the repository",
                        "(__file__).resolve().parent")
    return re.sub(r"(\n\w+ = .*)\n\n\n(?=\w+ = )", r"\1\n", text)


def main(stage, file):
    """Write a stage's script as one file, which must not be there yet."""
    file = Path(file)
    text = make_whole(find(stage).solution)
    require(not file.exists(), f"{file} is there already: name another file")
    write_atomically(file, text.encode())
    print(f"{file}: {text.count(chr(10))} lines, which import nothing of the "
          "course; name its dataset with --data")
