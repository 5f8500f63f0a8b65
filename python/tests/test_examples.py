"""Finds the Python examples of README.md and of the pages. Tests run each of them as written."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def pages() -> list[str]:
    """Returns the paths of README.md and of the hand-written pages, relative to the root."""
    patterns = ("*.md", "docs/**/*.md", "examples/**/*.md", "python/*.md")
    return [str(path.relative_to(ROOT)) for pattern in patterns for path in sorted(ROOT.glob(pattern))]


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^ *```{language}\w*\n(.*?)^ *```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)


def example(page: str, words: str) -> str:
    """Returns the only example of a page that contains these words, for a test that runs it as written. The test below
    finds such calls in the tests' sources, so both arguments must be literals.
    """
    [found] = [block for block in blocks(page, "py") if words in block]
    return found


def test_every_python_example_of_the_pages_is_run_by_a_test() -> None:
    calls = [
        call
        for path in sorted((ROOT / "python/tests").rglob("*.py"))
        for call in re.findall(r'\bexample\(\s*"([^"]+)", "([^"]+)"\s*\)', path.read_text())
    ]
    # Rust tests run examples that need a server with a small dataset, or onnxruntime. Each is its page's only example.
    pages_of_rust_tests = [
        page
        for path in sorted((ROOT / "tests/it").rglob("*.rs"))
        for page in re.findall(r'pages::blocks\("([^"]+)", "python"\)', path.read_text())
    ]
    all_blocks = [(page, block) for page in pages() for block in blocks(page, "py")]
    assert len(all_blocks) > 10
    not_run = [
        (page, block)
        for page, block in all_blocks
        if page not in pages_of_rust_tests and not any(page == tested and words in block for tested, words in calls)
    ]
    assert not_run == [], "no test runs these examples: add a test that runs example(page, words)"
