"""Build the documentation as a site with search in `site/`, to read without a network, from a
server or from the disk.

    make site        or, with zensical installed: python docs/make_site.py

The pages are those of `soren_align.core.shipped.NAVIGATION`, and GENERATED, which the site alone
has: they repeat `soren-align schema`, `--help` and the docstrings. A copy of each goes into
`build/site/pages` with its pictures: docs/x.md becomes x.md, a README.md becomes the index of its
folder. Links between pages are changed accordingly, and a link to a file that is not a page becomes
its text. Zensical builds the site from the copy, and fails on a broken link. llms.txt has a line
for each page.
"""

import importlib
import re
import shutil
import subprocess
import sys
from os.path import normpath, relpath
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from soren_align.core.shipped import NAVIGATION, title  # noqa: E402

BUILD, SITE = ROOT / "build/site", ROOT / "site"
HOME = "docs/index.md"
GENERATED = {
    "docs/recipe.md": ("make_reference", "The recipe"),
    "docs/commands.md": ("make_commands", "Commands"),
    "docs/files.md": ("make_architecture", "The files"),
}
"""Pages of the site alone: the script beside this one whose `page` returns the text, and the
title."""
GROUPS = {
    group: [file for file in files if file != "README.md"] for group, files in NAVIGATION.items()
}
GROUPS["Reference"] = [*GENERATED, *GROUPS["Reference"]]
"""README.md is the first page of the repository, HOME that of the site."""
LINK = re.compile(r"(!?)\[([^\[\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
PICTURE = re.compile(
    r'<picture>\s*<source[^>]* srcset="([^"]+)">\s*<img src="([^"]+)"([^>]*)>\s*</picture>'
)
DESCRIPTION = "Fine-tune language models with AdamW, Muon or Soren, and find out whether it helped"
CONFIG = """\
[project]
site_name = "soren-align"
site_description = "{description}"
docs_dir = "pages"
site_dir = "html"
use_directory_urls = false
nav = [
{nav}
]

[project.theme]
font = false
features = ["content.code.copy", "navigation.footer", "navigation.sections", "navigation.top", "search.highlight"]

[[project.theme.palette]]
media = "(prefers-color-scheme: light)"
scheme = "default"
toggle = {{icon = "lucide/sun", name = "Switch to dark mode"}}

[[project.theme.palette]]
media = "(prefers-color-scheme: dark)"
scheme = "slate"
toggle = {{icon = "lucide/moon", name = "Switch to light mode"}}

[project.extra]
polyfills = ["iframe-worker.js"]  # with this name, or the offline plugin links a script of another server

[project.plugins.offline]

[project.plugins.search]

[project.markdown_extensions]
md_in_html = {{}}
sane_lists = {{}}
tables = {{}}
toc.permalink = true
pymdownx.betterem = {{}}
pymdownx.highlight = {{}}
pymdownx.superfences = {{}}
"""
WORKER = """\
// Browsers refuse workers to pages that they read from the disk: there, search runs in a hidden frame.
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inside = this.frame.contentWindow;
      inside.postMessage = data => {
        const event = new MessageEvent("message", { data });
        this.dispatchEvent(event);
        this.onmessage?.(event);
      };
      const script = inside.document.createElement("script");
      script.src = new URL(url, location);
      this.ready = new Promise(done => (script.onload = done));
      inside.document.body.append(script);
    }
    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {
      this.frame.remove();
    }
  };
"""


def main() -> None:
    """Build the site; exits with 1 if zensical is missing or finds a broken link."""
    shutil.rmtree(BUILD, ignore_errors=True)
    for files in GROUPS.values():
        for file in files:
            page = BUILD / "pages" / place(file)
            page.parent.mkdir(parents=True, exist_ok=True)
            text, pictures = site_page(file, page_text(file))
            page.write_text(text, encoding="utf-8")
            for picture in pictures:
                shutil.copy(ROOT / picture, BUILD / "pages" / place(picture))
    (BUILD / "pages/iframe-worker.js").write_text(WORKER, encoding="utf-8")
    (BUILD / "zensical.toml").write_text(
        CONFIG.format(description=DESCRIPTION, nav=nav()), encoding="utf-8"
    )
    command = [
        sys.executable,
        "-m",
        "zensical",
        "build",
        "--strict",
        "--config-file",
        BUILD / "zensical.toml",
    ]
    if subprocess.run(command).returncode:
        sys.exit("the site was not built: see above, or install zensical (make site)")
    shutil.rmtree(SITE, ignore_errors=True)
    shutil.copytree(BUILD / "html", SITE)
    (SITE / "llms.txt").write_text(llms(), encoding="utf-8")
    print(f"written   {SITE / 'index.html'}, {SITE / 'llms.txt'}")


def page_text(file: str) -> str:
    """The text of a page of the repository, or of GENERATED."""
    if file not in GENERATED:
        return (ROOT / file).read_text(encoding="utf-8")
    sys.path.insert(0, str(ROOT / "docs"))
    return importlib.import_module(GENERATED[file][0]).page()


def page_title(file: str) -> str:
    """The title of a page, generated or not."""
    return GENERATED[file][1] if file in GENERATED else title(ROOT / file)


def place(file: str) -> str:
    """Where the site has a page or a picture of the repository: 'data.md' for 'docs/data.md'."""
    path = PurePosixPath(file.removeprefix("docs/"))
    path = path.with_name("index.md") if path.name == "README.md" else path
    return str(path) if len(path.parts) > 1 else path.name.lower()


def site_page(file: str, text: str) -> tuple[str, list[str]]:
    """The page `file` as the site has it, and its pictures; paths are relative to the
    repository.
    """
    pictures: list[str] = []
    pages = {page for files in GROUPS.values() for page in files}

    def moved(target: str) -> str | None:
        """The path in the site, relative to the page; None if the site does not have this file."""
        path = normpath(PurePosixPath(file).parent / target)
        path = HOME if path == "README.md" else path
        if path.endswith((".png", ".svg")):
            pictures.append(path)
        elif path not in pages:
            return None
        return relpath(place(path), PurePosixPath(place(file)).parent)

    def link(match: re.Match[str]) -> str:
        mark, words, target, heading = match.groups()
        if "://" in target:
            return match[0]
        new = moved(target)
        return f"{mark}[{words}]({new}{heading or ''})" if new else words

    def picture(match: re.Match[str]) -> str:
        dark, light, rest = match.groups()
        return f'<img src="{moved(light)}#only-light"{rest}>\n<img src="{moved(dark)}#only-dark"{rest}>'

    # code blocks stay as they are
    parts = re.split(r"(^ *```.*?^ *```$)", text, flags=re.DOTALL | re.MULTILINE)
    parts[::2] = [PICTURE.sub(picture, LINK.sub(link, part)) for part in parts[::2]]
    return "".join(parts), pictures


def nav() -> str:
    """The groups and their pages, in TOML."""
    groups = [
        [f'{{"{page_title(file)}" = "{place(file)}"}}' for file in files]
        for files in GROUPS.values()
    ]
    lines = zip(GROUPS, groups, strict=True)
    return "\n".join(f'  {{"{group}" = [{", ".join(pages)}]}},' for group, pages in lines)


def llms() -> str:
    """llms.txt: title, description, and for each page a link with its first sentence
    (llmstxt.org).
    """
    lines = ["# soren-align", "", f"> {DESCRIPTION}", ""]
    for group, files in GROUPS.items():
        lines += [f"## {group}", ""]
        for file in files:
            address = place(file).removesuffix(".md") + ".html"
            sentence = first_sentence(page_text(file))
            lines.append(f"- [{page_title(file)}]({address}): {sentence}")
        lines.append("")
    return "\n".join(lines)


def first_sentence(text: str) -> str:
    """The first sentence of a page, without links."""
    paragraphs = re.split(
        r"\n\s*\n",
        re.sub(r"```.*?```|<!--.*?-->|<picture>.*?</picture>", "", text, flags=re.DOTALL),
    )
    prose = next((part for part in paragraphs[1:] if re.match(r"[\w`*\"]", part)), paragraphs[0])
    prose = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(prose.split())).replace("**", "")
    return re.sub(r"(?<=[^.][.?])\s.*", "", prose).rstrip(":")


if __name__ == "__main__":
    main()
