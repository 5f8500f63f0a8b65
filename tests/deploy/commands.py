"""Finds the `lockstep` commands in the manifests, the Compose file and their comments, and checks that the program has their subcommands and
options. Tests in `tests/it/full/examples.rs` check the commands of pages."""

import functools
import pathlib
import re
import shlex
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[2]
# `begins` matches at the beginning of a line, after `--`, and after `&&`, `||`, `;`, `do` and `then`. Elsewhere "lockstep" may be a
# namespace, a service or prose.
COMMAND = re.compile(r"(?P<begins>^(?:   *)?|-- |(?:&&|\|\||;|do|then) )?(?<![\w/.:=-])lockstep (?P<rest>\S.*?)(?= lockstep |$)", re.MULTILINE)


@functools.cache
def help_of(program, *words):
    return subprocess.run([program, *words, "--help"], check=True, capture_output=True, text=True).stdout


def subcommands(program, *words):
    listed = re.search(r"^Commands:\n((?:  .*\n)+)", help_of(program, *words), re.MULTILINE)
    return set(re.findall(r"^  (\w\S*)", listed[1], re.MULTILINE)) if listed else set()


def options(program, *words):
    """Returns the options that a command's help lists."""
    return set(re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", "\n".join(re.findall(r"^ +(-.*)$", help_of(program, *words), re.MULTILINE))))


def check_command(program, where, arguments, is_certain=True):
    """Fails if the program does not have this command with these options. Returns 1 if a command was checked, otherwise 0. `is_certain`: whether
    the text is a command; otherwise an unknown command is ignored, because the text may be prose."""
    words = []
    while len(words) < len(arguments) and arguments[len(words)] in subcommands(program, *words):
        words.append(arguments[len(words)])
    if not words:
        assert not is_certain or arguments[:1] in ([], ["--help"], ["--version"]), f"{where}: lockstep has no command {arguments[0]}"
        return 0
    takes_argument = re.search(r" <(?!COMMAND)[A-Z|]+>(\.\.\.)?$", help_of(program, *words), re.MULTILINE)
    has_more = len(arguments) > len(words)
    if subcommands(program, *words) and not takes_argument and has_more:
        assert arguments[len(words)].startswith("-"), f"{where}: lockstep {' '.join(words)} has no {arguments[len(words)]}"
    known = options(program, *words)
    for argument in arguments[len(words) :]:
        if argument == "--":
            break
        if re.match(r"--[a-z]|-[a-zA-Z]$", argument):
            assert argument.split("=")[0] in known, f"{where}: lockstep {' '.join(words)} has no {argument}"
    return 1


def split_command(text):
    """Returns the words of a command, up to a redirection, a pipe, another command or a comment."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars="<>|;&()")
    lexer.whitespace_split = True
    words = []
    try:
        for word in lexer:
            if set(word) <= set("<>|;&()"):
                break
            words.append(word)
    except ValueError:  # The text is prose with an apostrophe.
        words = text.split()
    return [word.rstrip(",.:") for word in words]


def check_text(program, where, text):
    """Checks all commands of a text and returns their number."""
    lines = re.sub(r"\\\n\s*", " ", text).replace("`", "\n")
    matches = COMMAND.finditer(lines)
    return sum(check_command(program, where, split_command(match["rest"]), match["begins"] is not None) for match in matches)


def comments(text):
    return "\n".join(match[1] for match in re.finditer(r"(?:^|\s)#(.*)$", text, re.MULTILINE))


def check_all(program):
    for path in [ROOT / "docker-compose.yml", ROOT / "Dockerfile", *sorted((ROOT / "deploy").rglob("*.yaml"))]:
        # Commands are in comments and in YAML values, which may be scripts.
        count = check_text(program, path.name, comments(path.read_text())) + check_text(program, path.name, re.sub(r"#.*", "", path.read_text()))
        assert count or path.name == "Dockerfile", f"{path.name}: no command was found"
    # Wrong commands are found.
    for text in ("kubectl exec pod -- lockstep tokn create", "lockstep ca sho", "lockstep token create --scop agent > file", "x lockstep serve --lisen a"):
        try:
            check_text(program, "a comment", text)
        except AssertionError:
            continue
        raise AssertionError(f"accepted: {text}")
