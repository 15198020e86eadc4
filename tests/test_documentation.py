"""What README and notebooks show runs as it stands, and what test tables name exists."""

import ast
import functools
import pathlib
import re

import nbclient
import nbformat
import pytest

ROOT = pathlib.Path(__file__).parents[1]
TESTS = ROOT / "tests"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_blocks_run_in_order(page, monkeypatch, tmp_path):
    """One namespace a page, in a directory where the repository's configs are found."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        exec(compile(block, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page):
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        assert "://" in link or (page.parent / link).exists(), f"{page.name} links to {link}"


def placeholders(markdown):
    """Names such as OUR_FIGURE outside code, left by whoever meant to fill in a figure later."""
    prose = re.sub(r"^```.*?^```|`[^`]*`", "", markdown, flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"\b[A-Z]{4,}_[A-Z_]+\b", prose)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_placeholder_is_left(page):
    assert placeholders(page.read_text()) == []


def test_placeholders_are_found_in_prose_alone():
    page = (
        "takes OUR_TIME or FORWARD_RATIO times, XLA_FLAGS as in `SOME_NAME`\n```\nMORE_NAMES=1\n```\nand LAST_ONE_LEFT."
    )
    assert placeholders(page) == ["FORWARD_RATIO", "LAST_ONE_LEFT"]


@functools.cache
def modules():
    return {path: ast.parse(path.read_text()) for path in sorted(TESTS.rglob("test_*.py"))}


@functools.cache
def names_of_tests():
    nodes = (node for module in modules().values() for node in ast.walk(module))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def missing(docstring):
    """What the rows of tables in a docstring name and the tests lack: tests (name* is a prefix) and files of tests."""
    rows = "\n".join(line for line in docstring.splitlines() if line.startswith("|"))
    files = re.findall(r"\btests/[\w/]+\.py\b", rows)
    tests = re.findall(r"(?<![\w/])test_\w+\b\*?(?!\.py)", rows)

    def exists(test):
        prefix = test.removesuffix("*")
        return any(name.startswith(prefix) for name in names_of_tests()) if prefix != test else test in names_of_tests()

    return [file for file in files if not (ROOT / file).exists()] + [test for test in tests if not exists(test)]


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(TESTS)))
def test_tables_name_tests_that_exist(path):
    assert missing(ast.get_docstring(modules()[path]) or "") == []


def test_wrong_names_in_tables_are_found():
    table = """test_outside_of_a_table is not looked at
    |---|---|
    | a case | test_links_lead_to_files, gpu: test_links_* and test_no_such_* |
    | another | test_gone[with-id]; tests/test_documentation.py, tests/gone/test_gone.py |"""
    found = missing(table.replace("    |", "|"))
    assert found == ["tests/gone/test_gone.py", "test_no_such_*", "test_gone"]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.name)
def test_notebooks_run(notebook):
    cells = nbformat.read(notebook, as_version=4)
    nbclient.NotebookClient(cells, timeout=300, resources={"metadata": {"path": str(ROOT)}}).execute()
    printed = "".join(output.get("text", "") for cell in cells.cells for output in cell.get("outputs", []))
    assert "equal in every bit" in printed and "active=True" in printed
