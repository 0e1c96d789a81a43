"""Sphinx settings of the documentation: `make docs`. The sources are the Markdown files of the whole repository."""

import importlib.metadata
import re

from docutils import nodes
from sphinx.util import logging

from jaxcomm._request import NATIVE, STARTS

logger = logging.getLogger(__name__)

project = "jaxcomm"
author = "the jaxcomm authors"
copyright = "the jaxcomm authors"
release = version = importlib.metadata.version("jaxcomm")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
include_patterns = [
    "docs/**.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "benchmarks/README.md",
    "examples/*/README.md",
    "integrations/*/README.md",
    "models/README.md",
    "models/*/README.md",
    "tests/mutation/README.md",
    "tools/simulator/README.md",
]
exclude_patterns = [".*", "build", "dist", "runs"]

# The order of pages, by caption. It is kept here so that docs/index.md stays readable outside of the site.
NAVIGATION = {
    "User guide": [
        "quickstart",
        "guide/install",
        "guide/operations",
        "guide/choosing",
        "guide/collective-matmul",
        "guide/overlap",
        "guide/moe",
        "guide/reshard",
        "guide/transfer",
        "guide/serving",
        "guide/interoperation",
        "configuration",
        "guide/processes",
        "guide/clusters",
        "guide/gpu-install",
        "guide/gpus",
        "guide/gpu-limits",
        "guide/device-kernels",
        "guide/what-if",
        "guide/failures",
        "guide/observing",
        "guide/limits",
        "guide/security",
        "Training scripts </models/README>",
        "Model: mixture of experts </models/moe/README>",
        "Model: tensor parallelism </models/tp/README>",
        "Model: ZeRO </models/zero/README>",
        "Model: context parallelism </models/cp/README>",
        "Model: pipeline parallelism </models/pp/README>",
        "Model: all on one mesh </models/mesh/README>",
        "Example: jobs of serving </examples/disaggregated/README>",
        "Integration: Tunix </integrations/tunix/README>",
        "Integration: sglang-jax </integrations/sglang_jax/README>",
        "Integration: vLLM </integrations/vllm/README>",
        "Example: device kernel </examples/fused_rmsnorm/README>",
        "Example: a ring that feeds a product </examples/all_gather_matmul/README>",
    ],
    "Reference": [
        "reference/api",
        "reference/algorithms",
        "reference/device-api",
        "reference/commands",
        "glossary",
    ],
    "Internals": [
        "internals/architecture",
        "internals/plans",
        "internals/cost-model",
        "internals/simulate",
        "internals/cpu",
        "internals/overlap",
        "internals/cuda",
        "internals/cuda-staging",
        "internals/cuda-bandwidth",
        "internals/cuda-moe",
        "internals/transports",
        "internals/tried",
    ],
    "Development": [
        "/CONTRIBUTING",
        "development/tests",
        "/tests/mutation/README",
        "/tools/simulator/README",
        "development/gpu-tests",
        "development/gpu-status",
        "/benchmarks/README",
        "/CHANGELOG",
    ],
}


def add_navigation(app, docname, source):
    if docname == root_doc:
        for caption, pages in NAVIGATION.items():
            listed = "\n".join(pages)
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{listed}\n```\n"


def add_collectives(app, docname, source):
    """Two comments of the page of the Python API become the public functions of the collectives."""
    if docname == "docs/reference/api":
        for mark, ops in ((".. collectives\n", NATIVE), (".. start functions\n", STARTS)):
            assert mark in source[0], mark
            source[0] = source[0].replace(mark, "".join(f".. autofunction:: {op}\n" for op in ops))


def separate_notes(app, what, name, obj, options, lines):
    """Cost and source of a collective are paragraphs of their own."""
    for i, line in reversed(list(enumerate(lines))):
        if line.startswith(("Cost: ", "Source: ")):
            title, text = line.split(": ", 1)
            lines[i : i + 1] = ["", f"**{title}:** {text}"]


def link_references(app, what, name, obj, options, lines):
    """References of docstrings become links, so that Sphinx finds the dead ones: "docs/x.md", "See jaxcomm.x"."""
    for i, line in enumerate(lines):
        line = re.sub(r"\b(docs/[\w/-]+)\.md\b", r":doc:`/\1`", line)
        lines[i] = re.sub(r"\b([Ss]ee) `*(jaxcomm(?:\.\w+)*)`*", r"\1 :py:obj:`\2`", line)


def refuse_return_types(app, what, name, obj, options, lines):
    """Napoleon takes the text before a colon in the first line of "Returns" for a type. Docstrings have none."""
    if any(line.startswith(":rtype:") for line in lines):
        logger.warning("%s: the first line of Returns has a colon", name)


def refuse_dead_references(app, env, node, contnode):
    if node["reftype"] == "obj":
        logger.warning("%s is not documented", node["reftarget"], location=node)


def refuse_comments(app, doctree):
    """MyST drops lines that begin with %."""
    for comment in doctree.findall(nodes.comment):
        logger.warning("dropped as a comment: %s", comment.astext(), location=comment)


def setup(app):
    app.connect("source-read", add_navigation)
    app.connect("source-read", add_collectives)
    app.connect("autodoc-process-docstring", separate_notes)
    app.connect("autodoc-process-docstring", link_references)
    app.connect("autodoc-process-docstring", refuse_return_types, priority=900)  # after Napoleon
    app.connect("missing-reference", refuse_dead_references)
    app.connect("doctree-read", refuse_comments)
    return {"parallel_read_safe": True}


# Docstrings are written as plain text with names in `backticks`.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "none"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
python_maximum_signature_line_length = 88

myst_enable_extensions = ["fieldlist"]
myst_heading_anchors = 3
suppress_warnings = ["myst.header"]  # a README may begin its sections below the second level

# Nothing is loaded from other hosts: the theme uses the fonts of the system, and search runs in the browser.
html_theme = "furo"
html_title = f"jaxcomm {release}"
html_copy_source = False
html_show_sphinx = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["lists.js"]
html_additional_pages = {"index": "redirect.html"}
templates_path = ["_templates"]
