"""Wheel, sdist, editable install and bare checkout all import `efla_jax.kernels`, from another folder."""

import json
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = (".ci", "efla_jax", "kernels", "experiments", "configs", "docs", "tests")

INSTALL = ("-m", "pip", "install", "-qq", "--no-deps", "--no-index")
EDITABLE = """
import sys
from setuptools import build_meta
build_meta.build_editable(sys.argv[1], {"editable_mode": sys.argv[2]})
"""

# -I and -S keep the environment, the current folder and the tests' own editable install out; other packages come last.
LOOK = """
import json, site, sys
folder, others = sys.argv[1:]
sys.path.insert(0, folder)
site.addsitedir(folder)
sys.path.append(others)
import efla_jax, efla_jax.kernels
found = {name: list(sys.modules[name].__path__) for name in ("efla_jax", "efla_jax.kernels")}
try:
    import efla_jax.kernels.probe as probe
    found["probe"] = probe.__file__
except ModuleNotFoundError:
    found["probe"] = None
print(json.dumps({**found, "version": efla_jax.__version__, "backend": "jax._src.xla_bridge" in sys.modules
    and sys.modules["jax._src.xla_bridge"].backends_are_initialized()}))
"""


WITHOUT_KERNELS = """
import sys
sys.path.insert(0, sys.argv[1])
import jax.numpy as jnp
import efla_jax
from efla_jax import ops
assert efla_jax.__path__ == [sys.argv[1] + "/efla_jax"]
x = jnp.ones((1, 3, 1, 2))
print(ops.delta_rule(x, x, x, jnp.ones((1, 3, 1)))[0].shape)
"""


def run(*command, cwd: Path) -> str:
    result = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def import_from(folder: Path, elsewhere: Path) -> dict:
    """What a Python that knows only `folder` and the installed dependencies imports, started in another folder."""
    return json.loads(run(sys.executable, "-I", "-S", "-c", LOOK, folder, sysconfig.get_path("purelib"), cwd=elsewhere))


def copy(source: Path, tree: Path, *without: str) -> None:
    """The files of a checkout, and none of what a user keeps beside them."""
    ignore = shutil.ignore_patterns("__pycache__", *without)
    for folder in filter(lambda name: (source / name).exists(), FOLDERS):
        shutil.copytree(source / folder, tree / folder, symlinks=True, ignore=ignore)
    for file in source.iterdir():
        if file.is_file():
            shutil.copy(file, tree)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A copy of this checkout with one kernel module more, so that the tests hold while kernels/ has none."""
    tree = tmp_path_factory.mktemp("checkout") / "tree"
    copy(ROOT, tree)
    for folder in ("kernels", "efla_jax/kernels"):  # one folder by the link; in an unpacked sdist two
        (tree / folder / "probe.py").write_text('"""A kernel module for the test."""\n')
    return tree


@pytest.fixture(scope="module")
def built(checkout) -> Path:
    """The folder with an sdist and the wheel built from it; without isolation, so that no network is needed."""
    run(sys.executable, "-m", "build", "--no-isolation", cwd=checkout)
    return checkout / "dist"


@pytest.fixture(scope="module")
def version() -> str:
    scope: dict = {}
    line = next(x for x in (ROOT / "efla_jax" / "__init__.py").read_text().splitlines() if x.startswith("__version__"))
    exec(line, scope)
    return scope["__version__"]


def contents(folder: Path, below: str) -> set[str]:
    """The Python files under folder/below, named from `below`."""
    return {file.relative_to(folder).as_posix() for file in (folder / below).rglob("*.py")}


def test_wheel_holds_the_package_and_nothing_else(built, checkout, version):
    (wheel,) = built.glob("*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    kernels = {f"efla_jax/{name}" for name in contents(checkout, "kernels")}
    assert names == contents(checkout, "efla_jax") | kernels | {"efla_jax/py.typed", "efla_jax/kernels/README.md"}
    assert wheel.name == f"efla_jax-{version}-py3-none-any.whl"


def test_wheel_states_licence_python_and_extras(built, version):
    (wheel,) = built.glob("*.whl")
    info = f"efla_jax-{version}.dist-info"
    archive = zipfile.ZipFile(wheel)
    metadata = archive.read(f"{info}/METADATA").decode()
    for line in ("License-Expression: Apache-2.0", "Requires-Python: >=3.12", f"Version: {version}"):
        assert line in metadata.splitlines()
    assert {line.split(": ")[1] for line in metadata.splitlines() if line.startswith("Provides-Extra")} == {
        "cuda", "data", "dev", "eval", "hf", "test", "wandb"}
    assert b"Apache License" in archive.read(f"{info}/licenses/LICENSE")


def test_citation_names_the_version(version):
    assert f"version: {version}" in (ROOT / "CITATION.cff").read_text().splitlines()


def test_every_paper_of_a_mixer_is_cited():
    """Those that the layers name, softmax attention's, and no paper twice."""
    named = {"1706.03762"}
    for file in (ROOT / "efla_jax" / "layers").glob("*.py"):
        named |= set(re.findall(r"arXiv (\d{4}\.\d{5})", file.read_text()))
    cited = re.findall(r'"https://arxiv.org/abs/([0-9.]+)"', (ROOT / "CITATION.cff").read_text())
    assert len(named) > 8 and named <= set(cited) and len(set(cited)) == len(cited)


def test_sdist_holds_what_a_checkout_has(built, checkout):
    (sdist,) = built.glob("*.tar.gz")
    names = {name.partition("/")[2] for name in tarfile.open(sdist).getnames()}
    sources = {name for folder in ("efla_jax", "kernels", "experiments", "configs", "tests")
               for name in contents(checkout, folder)}
    files = {"README.md", "LICENSE", "Makefile", "constraints.txt", "pyproject.toml", ".ci/run", "kernels/README.md",
             "efla_jax/kernels/README.md", "efla_jax/py.typed"}
    assert sources | files <= names
    assert not [name for name in names if name.endswith(".pyc") or name.startswith(("runs", ".venv"))]


def test_installed_wheel_imports_from_another_folder(built, version, tmp_path):
    (wheel,) = built.glob("*.whl")
    target = tmp_path / "site"
    run(sys.executable, *INSTALL, "--target", target, wheel, cwd=tmp_path)
    assert sorted(path.name for path in target.iterdir()) == ["efla_jax", f"efla_jax-{version}.dist-info"]
    found = import_from(target, tmp_path)
    assert found == {
        "efla_jax": [str(target / "efla_jax")],
        "efla_jax.kernels": [str(target / "efla_jax" / "kernels")],
        "probe": str(target / "efla_jax" / "kernels" / "probe.py"),
        "version": version,
        "backend": False,
    }


@pytest.mark.parametrize("mode", ["lenient", "strict"])
def test_editable_install_imports_from_another_folder(mode, checkout, version, tmp_path):
    run(sys.executable, "-c", EDITABLE, tmp_path, mode, cwd=checkout)
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    found = import_from(tmp_path / "site", tmp_path)
    assert found["version"] == version and not found["backend"]
    assert Path(found["probe"]).samefile(checkout / "efla_jax" / "kernels" / "probe.py")


def test_bare_checkout_imports_from_another_folder(checkout, tmp_path):
    found = import_from(checkout, tmp_path)
    assert found["efla_jax"] == [str(checkout / "efla_jax")]
    assert Path(found["probe"]).samefile(checkout / "efla_jax" / "kernels" / "probe.py")


def test_checkout_that_lost_its_link_still_runs(checkout, tmp_path):
    """Archives and Windows settings may drop links; the operators then work without kernels."""
    shutil.copytree(checkout / "efla_jax", tmp_path / "efla_jax", ignore=shutil.ignore_patterns("kernels"))
    shape = run(sys.executable, "-I", "-c", WITHOUT_KERNELS, tmp_path, cwd=tmp_path.parent)
    assert shape.strip() == "(1, 3, 1, 2)"
