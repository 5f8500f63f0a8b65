#!/usr/bin/env python3
"""Checks that the modules of a crate do not depend on each other in cycles.

A module is a file together with all modules below it. The modules that one file declares (`mod a; mod b;`) are siblings. `a`
refers to `b` if any code in or below `a` names an item in or below `b`, by `use`, by a path or through an import, also if an
ancestor re-exports the item (`pub use`). Siblings must not refer to each other in a cycle. A file and its children may refer to
each other: the file declares and re-exports its children, and they use its types. A module of a crate in `ORDER` may only use
modules before it, and a module in `USERS` may only be used by the modules given there. Modules under `#[cfg(test)]`, and the
`tests/` and `examples/` folders, are not checked.

    modules.py               checks all crates of this tree
    modules.py self-test     checks that cycles in synthetic crates are refused
"""

import re
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

CRATES = {
    "protocol": "protocol/src/lib.rs",
    "web": "web/src/lib.rs",
    "kernels": "worker/kernels/src/lib.rs",
    "host": "worker/host/src/lib.rs",
    "comm": "worker/comm/src/lib.rs",
    "data": "worker/data/src/lib.rs",
    "engine": "worker/engine/src/lib.rs",
    "worker": "worker/src/lib.rs",
    "server": "server/src/lib.rs",
    "lockstep": "src/main.rs",
}

# The modules of a crate in order: each may use only the modules before it.
ORDER = {
    "server": (
        "util config lifecycle store events webhooks auth agents checkpoints datasets metrics scheduler ingest http app api boot"
    ).split(),
}

# (crate, module): the modules that may use it.
USERS = {("server", "app"): {("api", "router"), ("boot",), ("boot", "wire")}}

ITEMS = set("async const enum extern fn impl let macro_rules mod pub static struct trait type union unsafe use".split())
TOKEN = re.compile(r"[A-Za-z_]\w*|::|[{}()\[\]<>,;*#=!]|\S")


def without_comments(text):
    """The source with comments and literals replaced by blanks of the same length; newlines are kept."""
    out, i, n = [], 0, len(text)

    def blank(upto):
        nonlocal i
        out.append("".join(c if c == "\n" else " " for c in text[i:upto]))
        i = upto

    while i < n:
        two = text[i : i + 2]
        if two == "//":
            end = text.find("\n", i)
            blank(n if end < 0 else end)
        elif two == "/*":
            depth, j = 1, i + 2
            while j < n and depth:
                step = text[j : j + 2]
                depth += (step == "/*") - (step == "*/")
                j += 2 if step in ("/*", "*/") else 1
            blank(j)
        elif raw := re.compile(r'\b(?:b|c)?r(#*)"').match(text, i):
            end = text.find('"' + raw[1], raw.end())
            blank(n if end < 0 else end + 1 + len(raw[1]))
        elif text[i] == '"':
            j = i + 1
            while j < n and text[j] != '"':
                j += 2 if text[j] == "\\" else 1
            blank(j + 1)
        elif quoted := re.compile(r"'(?:\\(?:u\{[^}]*\}|x..|.)|[^\\'])'", re.S).match(text, i):
            blank(quoted.end())
        else:
            word = re.compile(r"\w+|.", re.S).match(text, i)
            out.append(word[0])
            i = word.end()
    return "".join(out)


def end_of_item(tokens, at):
    """The index after the item or element that begins at `at`: after an item's `;` or closing brace, or an element's comma."""
    depth, is_use = 0, False
    is_item = at < len(tokens) and tokens[at][0] in ITEMS
    while at < len(tokens):
        word = tokens[at][0]
        is_use = is_use or (word == "use" and depth == 0)
        if word in "([{":
            depth += 1
        elif word in ")]}":
            depth -= 1
            if depth < 0:
                return at
            if depth == 0 and word == "}" and not is_use:
                return at + 1
        elif depth == 0 and (word == ";" or (word == "," and not is_item)):
            return at + 1
        at += 1
    return at


def end_of_attribute(tokens, at):
    depth = 0
    while at < len(tokens):
        depth += (tokens[at][0] == "[") - (tokens[at][0] == "]")
        at += 1
        if depth == 0 and tokens[at - 1][0] == "]":
            break
    return at


def without_tests(tokens):
    kept, at = [], 0
    while at < len(tokens):
        if tokens[at][0] == "#" and at + 1 < len(tokens) and tokens[at + 1][0] == "[":
            end = end_of_attribute(tokens, at + 1)
            words = [word for word, _ in tokens[at:end]]
            if words[2:3] == ["cfg"] and "test" in words and "not" not in words:
                while end < len(tokens) and tokens[end][0] == "#":
                    end = end_of_attribute(tokens, end + 1)
                at = end_of_item(tokens, end)
                continue
            kept += tokens[at:end]
            at = end
            continue
        kept.append(tokens[at])
        at += 1
    return kept


class Module:
    def __init__(self, path, file):
        self.path, self.file = path, file
        self.children = {}  # name -> Module
        self.imports = {}  # name in this file -> (path, whether it is re-exported)
        self.globs = []  # paths of `use path::*`
        self.paths = []  # (path, line) of each reference
        self.tokens = []


def is_name(word):
    return word[0].isalpha() or word[0] == "_"


def tree(tokens, at, prefix, found):
    """Parses one tree of a `use` from `at`: appends (path, name or None, line) to `found`. Returns the index after it."""
    path = list(prefix)
    line = tokens[at][1]
    while at < len(tokens):
        word = tokens[at][0]
        if word == "{":
            at += 1
            while tokens[at][0] != "}":
                at = tree(tokens, at, path, found) if tokens[at][0] != "," else at + 1
            return at + 1
        if word == "*":
            found.append((tuple(path) + ("*",), None, line))
            return at + 1
        if word == "::":
            at += 1
            continue
        if not is_name(word):
            return at
        path.append(word)
        line = tokens[at][1]
        at += 1
        if tokens[at][0] == "::":
            continue
        name = path[-1]
        if path[-1] == "self" and len(path) > 1:
            path.pop()
            name = path[-1]
        if tokens[at][0] == "as":
            name = tokens[at + 1][0]
            at += 2
        found.append((tuple(path), name, line))
        return at
    return at


class Crate:
    def __init__(self, name, root):
        self.name, self.modules = name, {}
        root = Path(root)
        self.root = self.load((), root, root.parent)

    def load(self, path, file, folder):
        module = Module(path, file)
        self.modules[path] = module
        text = file.read_text()
        clean = without_comments(text)
        lines, line = [], 1
        for token in re.finditer(r"\n|" + TOKEN.pattern, clean):
            if token[0] == "\n":
                line += 1
            else:
                lines.append((token[0], line))
        elsewhere = dict(
            (name, at) for at, name in re.findall(r'#\[path\s*=\s*"([^"]+)"\]\s*(?:pub(?:\([^)]*\))?\s+)?mod\s+(\w+)\s*;', text)
        )
        tokens = module.tokens = without_tests(lines)
        for i in range(len(tokens) - 2):
            if tokens[i][0] == "mod" and tokens[i + 2][0] == ";":
                name = tokens[i + 1][0]
                if name in elsewhere:
                    child = file.parent / elsewhere[name]
                    below = child.parent
                else:
                    child, below = folder / f"{name}.rs", folder / name
                    if not child.exists():
                        child = folder / name / "mod.rs"
                module.children[name] = self.load(path + (name,), child, below)
        self.scan(module)
        return module

    @staticmethod
    def scan(module):
        """Records the names that the file refers to: in a `use`, or in a path that begins with a name of this crate."""
        tokens, at = module.tokens, 0
        # Paths in an inline module are relative to that module.
        inside, depth = [], 0
        while at < len(tokens):
            word, line = tokens[at]
            if word == "mod" and at + 2 < len(tokens) and tokens[at + 2][0] == "{":
                inside.append(depth)
            depth += (word == "{") - (word == "}")
            if inside and word == "}" and depth == inside[-1]:
                inside.pop()
            before = tokens[at - 1][0] if at else ";"
            if word == "use" and before != "(":
                found = []
                at = tree(tokens, at + 1, (), found)
                public = before in ("pub", ")")
                for path, name, where in found:
                    path = Crate.outward(path, len(inside))
                    module.paths.append((path, where))
                    if name is None:
                        module.globs.append((path[:-1], public))
                    elif not inside:
                        module.imports[name] = (path, public)
            elif is_name(word) and before != "::" and at + 1 < len(tokens) and tokens[at + 1][0] == "::":
                path = [word]
                while at + 2 < len(tokens) and tokens[at + 1][0] == "::" and is_name(tokens[at + 2][0]):
                    path.append(tokens[at + 2][0])
                    at += 2
                module.paths.append((Crate.outward(tuple(path), len(inside)), line))
                at += 1
            else:
                at += 1

    @staticmethod
    def outward(path, inside):
        """Converts a path in an inline module, nested in `inside` inline modules, to a path relative to the file."""
        while inside and path[:1] == ("super",):
            path, inside = path[1:], inside - 1
        return path if path else ("self",)

    def resolve(self, start, path, through=0):
        """The module of the item that `path` names, resolved from module `start`. None if the item is not in this crate."""
        at, rest = self.modules[start], list(path)
        if not rest or through > 20:
            return at.path
        first = True
        while rest:
            word = rest[0]
            if word in ("$crate", "crate"):
                at = self.root
            elif word == "self":
                pass
            elif word == "super":
                at = self.modules.get(at.path[:-1], self.root)
            elif word in at.children:
                at = at.children[word]
            elif word in at.imports and (first or at.imports[word][0][:1] not in (("std",),)):
                target = at.imports[word][0]
                if target == (word,) and first and word not in at.children:
                    return None
                found = self.resolve(at.path, target, through + 1)
                if found is None:
                    return None
                # The name is a module itself, or an item of the module found.
                at = self.modules[found]
                if not at.path or at.path[-1] != target[-1]:
                    return at.path
            else:
                if first:
                    return None
                for target, public in at.globs:
                    found = self.resolve(at.path, target, through + 1) if public else None
                    if found is not None and self.defines(self.modules[found], word):
                        return found
                return at.path
            rest.pop(0)
            first = False
        return at.path

    @staticmethod
    def defines(module, name):
        kinds = {"fn", "struct", "enum", "trait", "type", "const", "static", "union"}
        words = [word for word, _ in module.tokens]
        return name in module.imports or any(a in kinds and b == name for a, b in zip(words, words[1:]))

    def references(self):
        """(from, to, file, line) of every reference from one module to another."""
        for module in self.modules.values():
            for path, line in module.paths:
                path = path[:-1] if path[-1] == "*" else path
                target = self.resolve(module.path, path)
                if target is not None and target != module.path:
                    yield module.path, target, module.file, line

    def levels(self):
        """For each module with children: the references between its children, each with its first location."""
        levels = defaultdict(dict)
        for source, target, file, line in self.references():
            common = 0
            while common < min(len(source), len(target)) and source[common] == target[common]:
                common += 1
            if common < len(source) and common < len(target):
                edge = (source[: common + 1], target[: common + 1])
                levels[source[:common]].setdefault(edge, (file, line))
        return levels


def shortest_cycle(edges):
    """The shortest cycle among `edges`, as a list of nodes. None if there is none."""
    after = defaultdict(list)
    for a, b in sorted(edges):
        after[a].append(b)
    best = None
    for start in sorted(after):
        back, queue, seen = {}, [start], set()
        while queue:
            node = queue.pop(0)
            for following in after[node]:
                if following == start:
                    cycle = [node]
                    while cycle[0] != start:
                        cycle.insert(0, back[cycle[0]])
                    if best is None or len(cycle) < len(best):
                        best = cycle
                    queue = []
                    break
                if following not in seen:
                    seen.add(following)
                    back[following] = node
                    queue.append(following)
    return best


def named(path):
    return "::".join(path)


def problems(crate):
    """A sentence for each cycle and for each reference that ORDER or USERS forbids."""
    messages, levels = [], crate.levels()
    for _, edges in sorted(levels.items()):
        remaining = dict(edges)
        while cycle := shortest_cycle(remaining):
            ring = list(zip(cycle, cycle[1:] + cycle[:1]))
            places = "; ".join(f"{named(a)} names {named(b)} at {remaining[(a, b)][0]}:{remaining[(a, b)][1]}" for a, b in ring)
            messages.append(f"{crate.name}: cycle {' -> '.join(map(named, cycle + cycle[:1]))} ({places})")
            # Removes one reference of this cycle, to find other cycles of this level.
            del remaining[ring[-1]]
    if order := ORDER.get(crate.name):
        place = {name: n for n, name in enumerate(order)}
        for name in sorted(set(crate.root.children) ^ set(order)):
            messages.append(f"{crate.name}: {name} must be a module and in ORDER of .ci/modules.py")
        for ((a,), (b,)), (file, line) in sorted(levels[()].items()):
            if place.get(a, 0) < place.get(b, 0):
                messages.append(f"{crate.name}: {a} must not use {b}, which comes after it ({file}:{line})")
    for (name, module), users in USERS.items():
        for source, target, file, line in crate.references() if name == crate.name else ():
            if named(target) != module or source in users:
                continue
            messages.append(f"{crate.name}: {named(source)} must not use {named(target)} ({file}:{line})")
    return messages


def self_test():
    def problems_of(files):
        with tempfile.TemporaryDirectory() as folder:
            for name, text in files.items():
                path = Path(folder, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
            messages = problems(Crate("made", Path(folder, "lib.rs")))
            return [line.split(" (")[0] for line in messages]

    root = "pub mod a; mod b; mod c;"
    plain = {"a.rs": "pub struct A;", "b.rs": "pub struct B;", "c.rs": ""}

    def tree_of(**changed):
        return {"lib.rs": root} | plain | {name.replace("__", "/") + ".rs": text for name, text in changed.items()}

    ring = ["made: cycle a -> b -> a"]
    cases = [
        ("none", tree_of(a="use crate::b::B;", b="use crate::c;"), []),
        ("by use", tree_of(a="use crate::b::B;", b="use super::a::A;"), ring),
        ("by a list", tree_of(a="use crate::{c, b::{self, B}};", b="use crate::a::{A as X};"), ring),
        ("by a path", tree_of(a="fn f() { crate::b::f() }", b="fn f() -> super::a::A { crate::a::A }"), ring),
        ("by an import", tree_of(a="use crate::b; fn f() { b::f() }", b="use crate::a;"), ring),
        (
            "of three",
            tree_of(a="use crate::b::B;", b="use crate::c::C;", c="use crate::a::A;"),
            ["made: cycle a -> b -> c -> a"],
        ),
        (
            "through a re-export of the root",
            tree_of(a="use crate::B;", b="use crate::a::A;") | {"lib.rs": root + "pub use b::B;"},
            ring,
        ),
        (
            "through a glob of the root",
            tree_of(a="use crate::B;", b="pub struct B; use crate::a::A;") | {"lib.rs": root + "pub use b::*;"},
            ring,
        ),
        ("below a sibling", tree_of(a="mod x;", b="use crate::a::A;") | {"a/x.rs": "use crate::b::B;"}, ring),
        (
            "between children",
            tree_of(a="mod x; mod y;") | {"a/x.rs": "use super::y;", "a/y.rs": "use crate::a::x::X;"},
            ["made: cycle a::x -> a::y -> a::x"],
        ),
        ("with its parent", tree_of(a="mod x; pub use x::X; struct P;") | {"a/x.rs": "use super::P;"}, []),
        ("in a test", tree_of(a="use crate::b::B;", b="#[cfg(test)] mod tests { use crate::a::A; }"), []),
        (
            "in a test's file",
            tree_of(a="use crate::b::B;", b="#[cfg(test)]\nmod tests;\nfn f() {}") | {"b/tests.rs": "use crate::a::A;"},
            [],
        ),
        ("in comments and literals", tree_of(a="use crate::b::B;", b='// crate::a\nconst X: &str = "crate::a::A"; /* use crate::a; */'), []),
        ("after a test", tree_of(a="use crate::b::B;", b="#[cfg(test)] use crate::c; use crate::a::A;"), ring),
        (
            "after a test's element",
            tree_of(a="use crate::b::B;", b="const X: [u8; 2] = [#[cfg(test)] 1, crate::a::A];"),
            ring,
        ),
    ]
    for what, files, expected in cases:
        found = problems_of(files)
        if found != expected:
            sys.exit(f"modules.py self-test: a cycle {what}: expected {expected}, found {found}")
    ORDER["made"] = ["c", "a", "b"]
    for files, expected in [
        (tree_of(a="use crate::c;", b="use crate::a::A;"), []),
        (tree_of(a="use crate::b::B;"), ["made: a must not use b, which comes after it"]),
        (tree_of() | {"lib.rs": "mod a; mod b;"}, ["made: c must be a module and in ORDER of .ci/modules.py"]),
    ]:
        found = problems_of(files)
        if found != expected:
            sys.exit(f"modules.py self-test: an order: expected {expected}, found {found}")
    USERS["made", "a"] = {("c",)}
    found = problems_of(tree_of(b="use crate::a::A;"))
    if found != ["made: b must not use a"]:
        sys.exit(f"modules.py self-test: a user that is not allowed: found {found}")
    print(f"modules: {len(cases) + 4} synthetic crates were judged correctly")


def main(arguments):
    top = Path(__file__).resolve().parent.parent
    if arguments[:1] == ["self-test"]:
        return self_test()
    messages = []
    for name, root in CRATES.items():
        messages += problems(Crate(name, top / root))
    for line in messages:
        print(f"dependency rule: {line.replace(str(top) + '/', '')}", file=sys.stderr)
    if messages:
        sys.exit(1)
    print("modules: no cycles")


if __name__ == "__main__":
    main(sys.argv[1:])
