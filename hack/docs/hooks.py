"""Hooks of MkDocs: the navigation, the headline of the README, and links out of docs/."""

import os
import re

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

# The folders of docs/, in the order of the navigation.
SECTIONS = [
    ("tutorials", "Tutorials"),
    ("how-to", "How-to"),
    ("runbooks", "Runbooks"),
    ("reference", "Reference"),
    ("explanation", "Explanation"),
    ("adr", "Decisions"),
    ("contributing", "Contributing"),
]

# Pages that come first in their section. The others follow by name.
FIRST = ["index.md", "README.md", "lab.md", "first-fault.md", "stalls.md", "conntrack.md", "architecture.md"]

LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
HEADLINE = re.compile(r"<!-- headline -->.*?<!-- /headline -->", re.S)


def on_config(config):
    """Lists every page of docs/, so that a new one needs no entry anywhere."""
    nav = [{"Home": "index.md"}]
    for folder, title in SECTIONS:
        names = [n for n in os.listdir(os.path.join(config.docs_dir, folder)) if n.endswith(".md")]
        names.sort(key=lambda n: (FIRST.index(n) if n in FIRST else len(FIRST), n))
        nav.append({title: [folder + "/" + n for n in names]})
    config.nav = nav
    return config


def on_page_markdown(markdown, page, config, **_):
    if page.file.src_uri == "index.md":
        with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as f:
            block = HEADLINE.search(f.read())
        if block is None:
            raise ValueError("README.md has no headline between its markers")
        markdown = HEADLINE.sub(lambda _: block.group().replace("docs/", ""), markdown)
    folder = os.path.dirname(page.file.abs_src_path)

    def link(match):
        text, target = match.groups()
        if "://" in target or target.startswith("#"):
            return match.group()
        path = os.path.normpath(os.path.join(folder, target.partition("#")[0]))
        if path.startswith(config.docs_dir + os.sep) and not os.path.isdir(path):
            return match.group()
        # The file is in the repository and not on the site.
        if config.repo_url:
            return f"[{text}]({config.repo_url.rstrip('/')}/blob/main/{os.path.relpath(path, ROOT)})"
        return text

    return LINK.sub(link, markdown)
