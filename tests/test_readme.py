"""README.md is nbs/index.ipynb in Markdown: `python tests/test_readme.py` writes it, pytest compares."""
import re
from pathlib import Path

import nbformat
from nbconvert import MarkdownExporter

ROOT = Path(__file__).parents[1]


def readme() -> str:
    "The index notebook as Markdown; `#| hide` drops a cell, `#| echo: false` its code"
    notebook = nbformat.read(ROOT / "nbs" / "index.ipynb", as_version=4)
    notebook.cells = [cell for cell in notebook.cells if not cell.source.startswith("#| hide")]
    exporter = MarkdownExporter()
    exporter.exclude_input_prompt = exporter.exclude_output_prompt = True
    for cell in notebook.cells:
        if cell.source.startswith("#| echo: false"):
            cell.source = ""
    body = exporter.from_notebook_node(notebook)[0]
    body = re.sub(r"```\w*\n\s*```\n", "", body).replace("](../", "](")
    return re.sub(r"\n{3,}", "\n\n", body).strip() + "\n"


def test_readme_equals_index():
    assert (ROOT / "README.md").read_text(encoding="utf-8") == readme(), "run: make export"


def test_links_of_readme_exist():
    links = re.findall(r"\]\((?!http|#)([^)]+)\)", readme())
    assert len(links) >= 6
    assert [link for link in links if not (ROOT / link).exists()] == []


if __name__ == "__main__":
    (ROOT / "README.md").write_text(readme(), encoding="utf-8")
