"""The site that `make docs` builds: it is complete, refers to nothing outside, and works in a browser."""

from __future__ import annotations

import functools
import http.server
import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from header_names import public_names
from test_pages import PAGES

from opwright import cpp_extension

ROOT = Path(__file__).parents[3]
has_zensical = importlib.util.find_spec("zensical") and importlib.util.find_spec("mkdocstrings_handlers")
needs_zensical = pytest.mark.skipif(not has_zensical, reason="no Zensical; `make docs` installs it")
ATTRIBUTE = re.compile(r'<(\w+)[^>]*?\s(href|src)="?([^"\s>]+)"?')


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the site as `make docs` does, in a folder of its own."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copy(ROOT / "mkdocs.yml", folder)
    (folder / "src").symlink_to(ROOT / "src")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([f"{ROOT}/src", f"{ROOT}/ops/src", *sys.path[1:]])}
    for command in (
        [sys.executable, ROOT / "docs/generate.py", folder / "build/docs"],
        [sys.executable, "-m", "zensical", "build", "--clean", "--strict"],
    ):
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder / "site"


@functools.cache
def read(page: Path) -> str:
    return page.read_text()


def ids_of(page: Path) -> set[str]:
    return set(re.findall(r'\bid="?([^"\s>]+)', read(page)))


@needs_zensical
def test_every_link_leads_somewhere_in_the_site(site: Path) -> None:
    lost = []
    for page in site.rglob("*.html"):
        for _, _, target in ATTRIBUTE.findall(read(page)):
            parts = urlsplit(target)
            if parts.scheme or page.name == "404.html":
                continue
            found = Path(os.path.normpath(page.parent / unquote(parts.path))) if parts.path else page
            found = found / "index.html" if found.is_dir() else found
            is_there = found.exists() and (not parts.fragment or unquote(parts.fragment) in ids_of(found))
            if not is_there and parts.fragment not in ("__toc", "__skip"):
                lost.append(f"{page.relative_to(site)}: {target}")
    assert lost == []


@needs_zensical
def test_no_page_loads_anything_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        loaded = [target for tag, kind, target in ATTRIBUTE.findall(read(page)) if kind == "src" or tag == "link"]
        assert len(loaded) > 1
        assert [target for target in loaded if urlsplit(target).netloc] == []
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?(?:https?:)?//", sheet.read_text())


@needs_zensical
def test_every_public_name_of_python_has_an_entry(site: Path) -> None:
    ids = ids_of(site / "reference/python/index.html")
    names = ["opwright.bench.where_a_call_goes", "opwright.package.setuptools.wheel_commands"]
    names += [f"opwright.cpp_extension.{name}" for name in ("load", "load_inline", *cpp_extension._OWN)]
    for module in ("opwright", "opwright.testing"):
        names += [f"{module}.{name}" for name in importlib.import_module(module).__all__]
    assert set(names) - ids == {"opwright.__version__", "opwright.errors"}  # a text; a page of its own
    for method in ("backward", "samples", "sweep", "cost", "baseline", "sharding"):
        assert f"opwright.dispatch.record.Operator.{method}" in ids


@needs_zensical
def test_every_command_error_and_variable_has_an_entry(site: Path) -> None:
    commands = read(site / "reference/commands/index.html")
    overview = subprocess.run(
        [sys.executable, "-c", "from opwright.cli import main; main()", "--help"], capture_output=True, text=True
    ).stdout
    verbs = re.findall(r"^  ([a-z]+) ", overview, re.MULTILINE)
    assert len(verbs) > 10
    for name in [*verbs, "cache prune", "cache clean", "cache size", "cache dir", "pack record", "pack build"]:
        assert f'id="opwright-{name.replace(" ", "-")}"' in commands, name
        assert f"Usage: opwright {name}" in commands, name
    codes = set(re.findall(r'code = "(OPW\d+)"', (ROOT / "src/opwright/errors.py").read_text()))
    assert {code.lower() for code in codes} <= ids_of(site / "reference/errors/index.html")
    variables = set()
    for source in (ROOT / "src/opwright").rglob("*"):
        if source.suffix in (".py", ".cpp", ".h"):
            pattern = r'(?:environ\.get\(|getenv\(|environment\(|_is_on\()"(OPWRIGHT_\w+)"'
            variables |= set(re.findall(pattern, source.read_text()))
    internal = {"OPWRIGHT_LOADS"}  # set for a library while it is loaded
    page = read(site / "reference/environment/index.html")
    assert len(variables) > 6
    assert [name for name in variables - internal if f"<code>{name}</code>" not in page] == []


@needs_zensical
def test_every_operator_has_a_page_with_its_contract(site: Path) -> None:
    import opwright_ops

    from opwright.target import find_operators

    found = {path.name for path in (site / "operators").iterdir() if path.is_dir()}
    assert found == {operator.declaration.name for operator in find_operators("opwright_ops")}
    # What is called in Python without being an operator is in the reference.
    declared = {id(operator.function) for operator in find_operators("opwright_ops")}
    functions = {name for name in opwright_ops.__all__ if id(getattr(opwright_ops, name)) not in declared}
    reference = read(site / "reference/python/index.html")
    assert {"AdamW", "cross_entropy", "rope", "softmax"} < functions
    assert [name for name in functions if f'id="opwright_ops.{name}"' not in reference] == []
    page = read(site / "operators/softmax/index.html")
    assert "softmax(Tensor input) -&gt; Tensor" in page
    assert "cuda" in page


@needs_zensical
def test_llms_txt_names_pages_that_are_there(site: Path) -> None:
    text = (site / "llms.txt").read_text()
    assert text.startswith("# Opwright\n\n> ")
    links = re.findall(r"^- \[.+\]\((.*)\)$", text, re.MULTILINE)
    assert len(links) > 40
    assert [link for link in links if not (site / link / "index.html").exists()] == []
    assert len(text) < 8000


def test_every_public_name_of_the_headers_has_an_entry() -> None:
    page = PAGES["reference/headers.md"]
    sections = dict.fromkeys(re.findall(r"<opwright/([\w./]+)>", page), "")
    internal = {"triton/integers.h", "triton/operator.h", "triton/torch_dtype.h"}  # for translated launch functions
    macros = {"OPWRIGHT_ENTRY_SYMBOL", "OPWRIGHT_VECTOR_FORM", "OPWRIGHT_SIMD_FMA"}
    missing = []
    for header, names in public_names().items():
        if header in internal:
            continue
        assert header in sections or header.startswith("triton/"), header
        missing += [f"{header}: {name}" for name in names - macros if not re.search(rf"\b{name}\b", page)]
    assert missing == []


# --- in a browser -------------------------------------------------------------------------------------


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def browse(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator:
    """Opens a page in a window of some width; returns what an expression of JavaScript gives there."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    spec = importlib.util.spec_from_file_location("benchmark_of_the_report", ROOT / "benchmarks/report.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    browser = module.Browser()

    def value(expression: str):
        answer = browser.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        return answer["result"].get("value")

    def open_page(path: str, width: int = 1280, scheme: str = "light"):
        browser.ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 500
        )
        browser.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        browser.events.clear()
        browser.ask("Page.navigate", url=f"http://127.0.0.1:{server.server_address[1]}/{path}")
        browser.wait_for(lambda event: event.get("method") == "Page.loadEventFired")
        return value

    yield open_page
    browser.close()
    server.shutdown()


def wait_until(value, expression: str, seconds: float = 60) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value(expression):
            return True
        time.sleep(0.2)
    return False


@pytest.mark.chromium
@needs_zensical
def test_a_page_shows_its_text_and_navigation(browse) -> None:
    value = browse("start/first-operator/")
    assert "Your first operator" in value("document.querySelector('h1').innerText")
    assert value("document.querySelector('.highlight code').innerText").startswith("import torch.nn.functional")
    assert value("document.querySelectorAll('nav a[href]').length") > 20


# The search has a tree of its own below an element without a name.
IN_SEARCH = (
    "query => [...document.querySelectorAll('*')]"
    ".map(e => e.shadowRoot && e.shadowRoot.querySelector(query)).find(e => e)"
)


@pytest.mark.chromium
@needs_zensical
def test_the_search_finds_an_error_code(browse) -> None:
    value = browse("")
    assert wait_until(value, f"(document.querySelector('.md-search__button').click(), !!({IN_SEARCH})('input'))")
    entering = "i => { i.focus(); i.value = 'OPW104'; i.dispatchEvent(new Event('input', {bubbles: true})); }"
    value(f"({entering})(({IN_SEARCH})('input'))")
    assert wait_until(value, f"!!({IN_SEARCH})('a[href*=\"reference/errors\"]')")


@pytest.mark.chromium
@needs_zensical
def test_dark_mode_follows_the_system(browse) -> None:
    lightness = """(() => {
        const [r, g, b] = getComputedStyle(document.body).backgroundColor.match(/[0-9.]+/g).map(Number);
        return (r + g + b) / 3; })()"""
    assert browse("", scheme="light")(lightness) > 200
    value = browse("", scheme="dark")
    assert wait_until(value, f"{lightness} < 80", seconds=10), value(lightness)


@pytest.mark.chromium
@needs_zensical
@pytest.mark.parametrize(
    "path", ["", "start/first-operator/", "reference/python/", "reference/headers/", "operators/lstm/", "guides/bench/"]
)
def test_a_phone_scrolls_no_page_sideways(path: str, browse) -> None:
    assert browse(path, width=375)("document.documentElement.scrollWidth") <= 375
