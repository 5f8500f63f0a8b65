"""The `lockstep` commands that comments and pages have, and whether the program has their subcommands and options."""

import functools
import pathlib
import re
import shlex
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[2]
# A line's beginning, or what runs it in a container or in a shell's list; elsewhere the word may be a namespace, a service or prose.
COMMAND = re.compile(r"(?P<begins>^(?:   *)?|-- |(?:&&|\|\||;|do|then) )?(?<![\w/.:=-])lockstep (?P<rest>\S.*?)(?= lockstep |$)", re.MULTILINE)


@functools.cache
def help_of(program, *words):
    return subprocess.run([program, *words, "--help"], check=True, capture_output=True, text=True).stdout


def subcommands(program, *words):
    listed = re.search(r"^Commands:\n((?:  .*\n)+)", help_of(program, *words), re.MULTILINE)
    return set(re.findall(r"^  (\w\S*)", listed[1], re.MULTILINE)) if listed else set()


def options(program, *words):
    """The options of a command, by its help."""
    return set(re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", "\n".join(re.findall(r"^ +(-.*)$", help_of(program, *words), re.MULTILINE))))


def check_command(program, where, arguments, sure=True):
    """Whether the program has this command with these options. One that may be no command at all (`sure`) is left out if it is unknown."""
    words = []
    while len(words) < len(arguments) and arguments[len(words)] in subcommands(program, *words):
        words.append(arguments[len(words)])
    if not words:
        assert not sure or arguments[:1] in ([], ["--help"], ["--version"]), f"{where}: lockstep has no command {arguments[0]}"
        return 0
    takes_more = re.search(r" <(?!COMMAND)[A-Z|]+>(\.\.\.)?$", help_of(program, *words), re.MULTILINE)
    if subcommands(program, *words) and not takes_more and arguments[len(words) :]:
        assert arguments[len(words)].startswith("-"), f"{where}: lockstep {' '.join(words)} has no {arguments[len(words)]}"
    known = options(program, *words)
    for argument in arguments[len(words) :]:
        if argument == "--":
            break
        if re.match(r"--[a-z]|-[a-zA-Z]$", argument):
            assert argument.split("=")[0] in known, f"{where}: lockstep {' '.join(words)} has no {argument}"
    return 1


def split(text):
    """A command's words up to its end: a redirection, a pipe, the next command, a remark."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars="<>|;&()")
    lexer.whitespace_split = True
    words = []
    try:
        for word in lexer:
            if set(word) <= set("<>|;&()"):
                break
            words.append(word)
    except ValueError:  # An apostrophe of prose.
        words = text.split()
    return [word.rstrip(",.:") for word in words]


def check_text(program, where, text):
    """All commands of a text; their number."""
    lines = re.sub(r"\\\n\s*", " ", text).replace("`", "\n")
    return sum(check_command(program, where, split(found["rest"]), found["begins"] is not None) for found in COMMAND.finditer(lines))


def comments(text):
    return "\n".join(found[1] for found in re.finditer(r"(?:^|\s)#(.*)$", text, re.MULTILINE))


def code(page):
    """What a page has in blocks for a shell, and between single backticks."""
    blocks = re.findall(r"^```sh\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    prose = re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL)
    return "\n".join([*blocks, *(" ".join(found.split()) for found in re.findall(r"`([^`]+)`", prose))])


def check_all(program):
    checked = 0
    for path in [ROOT / "docker-compose.yml", ROOT / "Dockerfile", *sorted((ROOT / "deploy").rglob("*.yaml"))]:
        # Keys, too: a shell's text in them.
        found = check_text(program, path.name, comments(path.read_text())) + check_text(program, path.name, re.sub(r"#.*", "", path.read_text()))
        assert found or path.name == "Dockerfile", f"{path.name}: no command in it was found"
        checked += found
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        checked += check_text(program, path.name, code(path.read_text()))
    # What is wrong is found.
    for wrong in ("kubectl exec pod -- lockstep tokn create", "lockstep ca sho", "lockstep token create --scop agent > file", "x lockstep serve --lisen a"):
        try:
            check_text(program, "a comment", wrong)
        except AssertionError:
            continue
        raise AssertionError(f"passes: {wrong}")
    return checked
