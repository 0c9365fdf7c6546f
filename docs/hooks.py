"""What the site needs beyond its plugins, at build time: equations as MathML, the command line's own help."""

import html
import re
import sys
from pathlib import Path
from typing import Any

import griffe
from latex2mathml.converter import convert

EQUATION = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">\\(?P<open>[(\[])(?P<latex>.*?)\\[)\]]</(?P=tag)>', re.DOTALL
)
PRIME = re.compile(r"<msup>(<mi>\w</mi>)<m[io]>&#x0*2032;</m[io]></msup>")
"""A superscript prime is raised twice where there is no font made for mathematics."""
CELL = re.compile(r"<td[^>]*>.*?</td>", re.DOTALL)
CODE = re.compile(r"<code>[^<]*</code>")
ROOT = Path(__file__).parents[1]
INCLUDED = re.compile(r'^--8<-- "(\w+\.md)"$', re.MULTILINE)
"""A document of the project's root, whose links into docs/ are then links beside it."""
COMMANDS = "<!-- commands -->"
"""Where the help of all subcommands goes."""
WIDE = ("paper_map.md", "results.md")
"""Pages whose tables want the room of the table of contents."""


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    if page.file.src_uri in WIDE:
        page.meta["hide"] = ["toc"]
    markdown = INCLUDED.sub(lambda found: (ROOT / found[1]).read_text().replace("](docs/", "]("), markdown)
    return markdown.replace(COMMANDS, commands()) if COMMANDS in markdown else markdown


def on_page_content(content: str, **_: Any) -> str:
    content = CELL.sub(lambda cell: CODE.sub(breakable, cell[0]), content)
    return EQUATION.sub(mathml, content)


def breakable(code: re.Match[str]) -> str:
    """Long names in a table may end a line after an underscore or a slash."""
    return re.sub(r"(?<=\w)([_/])(?=\w)", r"\1<wbr>", code[0])


def mathml(found: re.Match[str]) -> str:
    """One equation, as browsers draw it by themselves: no script, no font, no network."""
    latex = html.unescape(found["latex"]).strip()
    display = "inline" if found["open"] == "(" else "block"
    drawn = PRIME.sub(r"<mrow>\1<mo>&#x2032;</mo></mrow>", convert(latex, display=display))
    return drawn if display == "inline" else f'<div class="equation">{drawn}</div>'


def commands() -> str:
    """Arguments and options of every subcommand, as `gradsieve COMMAND --help` gives them."""
    import typer

    if (source := str(ROOT / "src")) not in sys.path:
        sys.path.insert(0, source)  # of this checkout, installed or not
    from gradsieve.commands import app

    group = typer.main.get_command(app)
    return "\n\n".join(described(name, command) for name, command in sorted(group.commands.items()))  # type: ignore[attr-defined]


def described(name: str, command: Any) -> str:
    lines = [f"## gradsieve {name}", "", command.help, "", "| option | | default |", "| --- | --- | --- |"]
    for parameter in command.params:
        if parameter.name == "help":
            continue
        argument = parameter.param_type_name == "argument"
        given = (parameter.metavar or parameter.name.upper()) if argument else ", ".join(parameter.opts)
        default = "needed" if parameter.required else parameter.default
        shown = "" if default in (None, False) or callable(default) else str(default)
        text = (parameter.help or "").replace("|", "\\|")
        lines.append(f"| `{given}` | {text} | {shown if shown in ('', 'needed') else f'`{shown}`'} |")
    return "\n".join(lines)


class Docstrings(griffe.Extension):
    """Makes docstrings what the reference wants: Markdown, and one line for each parameter."""

    BLOCK = re.compile(r"^(?P<text>[^\n]*)::\n\n(?P<code>(?: {4}[^\n]*\n?|\n)+)", re.MULTILINE)
    """Code that is announced by two colons."""
    SEVERAL = re.compile(r"^ {4}(?P<names>\w+(?:, \w+)+): (?P<text>.*)$", re.MULTILINE)
    """Parameters that share a line."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            fenced = self.BLOCK.sub(self.fenced, obj.docstring.value)
            obj.docstring.value = self.SEVERAL.sub(self.apart, fenced)

    @staticmethod
    def fenced(found: re.Match[str]) -> str:
        text = f"{found['text']}:\n\n" if found["text"] else ""
        code = re.sub(r"^ {4}", "", found["code"].rstrip(), flags=re.MULTILINE)
        return f"{text}```python\n{code}\n```\n\n"

    @staticmethod
    def apart(found: re.Match[str]) -> str:
        return "\n".join(f"    {name}: {found['text']}" for name in found["names"].split(", "))
