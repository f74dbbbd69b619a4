"""The rules of the house (CONTRIBUTING.md), each a function of one file and shown files that break it."""

import ast
import importlib.util
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("efla_jax", "kernels", "experiments", "configs", "tests")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)

LEAVES = {"data", "sharding", "optim", "losses", "checkpoint", "metrics"}
MODEL_SIDE = {"shapes", "ops", "layers", "model"}
SELFCHECKED = [f"selfcheck_{name}" for name in ("attention", "conv", "log_linear", "recurrences", "routed")]
# Beside its own room: kernels -> ops -> layers -> model -> generate, evaluate, train -> experiments.
# "index" is the package's own __init__: inside the package a name is imported from the room it lives in.
MAY_IMPORT = {
    "shapes": set(),
    "sharding": {"shapes"},
    "kernels": {"shapes"},
    "ops": {"shapes", "kernels", "sharding"},  # an operator runs on the shards of the mesh that stands around it
    "layers": {"shapes", "ops", "sharding"},
    "model": {"shapes", "ops", "layers", "sharding"},
    "flops": {"shapes", "ops", "layers", "model"},
    "data": set(),
    "optim": {"shapes", "sharding"},
    "losses": {"shapes", "sharding"},
    "checkpoint": {"shapes"},
    "metrics": {"shapes"},
    "generate": MODEL_SIDE | LEAVES,
    "evaluate": MODEL_SIDE | LEAVES | {"generate"},
    "scoring": MODEL_SIDE | LEAVES | {"generate", "evaluate"},
    "train": MODEL_SIDE | LEAVES | {"generate", "evaluate", "flops"},
    "selfcheck": {"selfcheck_cases", *SELFCHECKED},
    **{name: {"ops", "selfcheck_cases"} for name in SELFCHECKED},
    "selfcheck_cases": {"ops"},
    "index": MODEL_SIDE | LEAVES | {"generate", "evaluate", "scoring", "flops", "train", "selfcheck"},
    "experiments": {"index", "shapes", "model", "flops", "generate", "evaluate", "scoring", "train", "selfcheck"}
    | {"configs"}
    | LEAVES,
    "configs": set(),
}
BENCHMARK_MAY_ALSO_IMPORT = {"ops"}
# Worker processes of the data pipeline must not hold a GPU, so data is numpy only.
DATA_MAY_NOT_IMPORT = {"jax", "jaxlib", "flax", "optax", "orbax", "chex"}
CONFIGS_MAY_IMPORT = {"ml_collections", "__future__"}

FORBIDDEN_WORDS = {"util", "utils", "helper", "helpers", "misc", "common", "new"}
FORBIDDEN_CALLS = {"sow": "capture_intermediates of a named sub-module", "variable": "state passed in and returned"}
MOST_LINES, MOST_LINES_OF_A_KERNEL, MOST_LINES_OF_A_FUNCTION, MOST_PARAMETERS_OF_AN_OP = 400, 600, 60, 10
# Written in two pieces, so that this file does not break its own rule.
MACHINE_PATHS = ("/work" "/", "/root" "/", "../" "shared")
REGISTRY_HOSTS = ("pypi" ".org", "python" "hosted.org", "npmjs" ".org", "deb" ".debian.org")
MACHINE_TRACES = MACHINE_PATHS + REGISTRY_HOSTS


def module_name(path: str) -> str:
    """The dotted name under which the file at `path` (relative to the root) is imported."""
    name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return f"efla_jax.{name}" if name.split(".")[0] == "kernels" else name


def room(name: str) -> str | None:
    """The room a dotted name belongs to; None for other people's packages."""
    first, _, rest = name.partition(".")
    if first != "efla_jax":
        return first if first in FOLDERS else None
    second = rest.split(".")[0]
    if second == "__version__":
        return None
    return second if second in MAY_IMPORT and second not in ("experiments", "configs", "index") else "index"


def imports(path: str, tree: ast.AST) -> list[tuple[int, str, bool]]:
    """(line, dotted name, whether in a function) of each import; `import_module("...")` and `efla_jax.x` count."""
    own = module_name(path)
    package = own if path.endswith("__init__.py") else own.rpartition(".")[0]
    lazy = {id(node) for function in ast.walk(tree) if isinstance(function, FUNCTIONS) for node in ast.walk(function)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            names = [f"{base}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "efla_jax":
            names = [f"efla_jax.{node.attr}"]
        elif isinstance(node, ast.Call) and called(node) in ("import_module", "__import__") and node.args:
            names = [importlib.util.resolve_name(text, package) for text in leading_text(node.args[0])]
        else:
            continue
        found += [(node.lineno, name, id(node) in lazy) for name in names]
    return found


def leading_text(node: ast.expr) -> list[str]:
    """The constant text a string or f-string begins with, as a list of none or one."""
    if isinstance(node, ast.JoinedStr) and node.values:
        node = node.values[0]
    text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
    return [text] if text.strip(".") else []


def called(node: ast.Call) -> str:
    """The last name of the called function: `exp` of `jnp.exp(x)`."""
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def direction(path: str, source: str) -> list[str]:
    """Imports go one way, and kernels are reached lazily, from ops, under their one name."""
    home = room(module_name(path))
    complaints = []
    if home == "index" and path != "efla_jax/__init__.py":
        complaints.append(f"{path}: not a room in MAY_IMPORT; give it its place in the direction of imports")
    allowed = MAY_IMPORT.get(home, set(MAY_IMPORT)) | {home}
    if path.startswith("experiments/benchmark"):
        allowed = allowed | BENCHMARK_MAY_ALSO_IMPORT
    for line, name, lazy in imports(path, ast.parse(source)):
        first, target = name.split(".")[0], room(name)
        if first == "kernels":
            complaints.append(f"{path}:{line}: imports `kernels`, another package's name; say efla_jax.kernels")
        elif home == "tests":
            continue
        elif home == "configs" and first not in CONFIGS_MAY_IMPORT and not f"{name}.".startswith("configs.common."):
            complaints.append(f"{path}:{line}: imports {name}; configs import ml_collections and configs.common only")
        elif home == "data" and first in DATA_MAY_NOT_IMPORT:
            complaints.append(f"{path}:{line}: imports {name}; data is numpy only")
        elif target == "kernels" and home == "ops" and not lazy:
            complaints.append(f"{path}:{line}: imports {name} at module level; import kernels inside a function")
        elif target is not None and target not in allowed and home != "configs":
            complaints.append(f"{path}:{line}: {home} may not import {name}")
    return complaints


def circles(sources: Mapping[str, str]) -> list[str]:
    """Files of the package that import themselves by way of others, inside functions too."""
    names = {module_name(path): path for path in sources}
    imported: dict[str, set[str]] = {}
    for name, path in names.items():
        found = set()
        for _, other, _ in imports(path, ast.parse(sources[path])):
            while other and other not in names:
                other = other.rpartition(".")[0]
            if other != name and not names.get(other, "__init__.py").endswith("__init__.py"):
                found.add(other)
        imported[name] = found
    reached, before = {name: set(found) for name, found in imported.items()}, -1
    while before != (before := sum(map(len, reached.values()))):
        for found in reached.values():
            found |= {further for other in found for further in imported[other]}
    return [f"{names[name]}: imports itself by way of others" for name, found in reached.items() if name in found]


def size(path: str, source: str) -> list[str]:
    """A file is read in one sitting, a function on one screen; tests may be long, since tables of cases are."""
    home = room(module_name(path))
    if home == "tests":
        return []
    lines, most = len(source.splitlines()), MOST_LINES_OF_A_KERNEL if home == "kernels" else MOST_LINES
    complaints = [f"{path}: {lines} lines, at most {most}"] if lines > most else []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, FUNCTIONS[:2]) and node.end_lineno - node.lineno + 1 > MOST_LINES_OF_A_FUNCTION:
            long = node.end_lineno - node.lineno + 1
            complaints.append(f"{path}:{node.lineno}: {node.name} has {long} lines, at most {MOST_LINES_OF_A_FUNCTION}")
    return complaints


def docstring(path: str, source: str) -> list[str]:
    """The first lines of a file say what it is for."""
    return [] if ast.get_docstring(ast.parse(source)) else [f"{path}: does not start with a docstring"]


def noun(path: str, source: str) -> list[str]:
    """Files and folders are nouns of the field."""
    words = {word for part in Path(path).with_suffix("").parts for word in part.split("_")}
    bad = sorted(word for word in words if word in FORBIDDEN_WORDS or re.fullmatch(r"v\d+", word))
    return [f"{path}: `{word}` does not say what is inside" for word in bad if path != "configs/common.py"]


def signature(path: str, source: str) -> list[str]:
    """No `**kwargs` in the package; an op has few parameters; modules keep no state of their own."""
    home, complaints = room(module_name(path)), []
    if home in ("tests", "experiments", "configs"):
        return []
    for node in ast.walk(ast.parse(source)):
        # `**_` takes what a library hands to a callback; nobody can pass a misspelt option through it.
        if isinstance(node, FUNCTIONS) and node.args.kwarg and node.args.kwarg.arg != "_":
            complaints.append(f"{path}:{node.lineno}: **{node.args.kwarg.arg}; name the parameters")
        if isinstance(node, ast.FunctionDef) and home == "ops" and not node.name.startswith("_"):
            count = len(node.args.posonlyargs + node.args.args + node.args.kwonlyargs)
            if count > MOST_PARAMETERS_OF_AN_OP:
                complaints.append(f"{path}:{node.lineno}: {node.name} has {count} parameters")
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and home in ("layers", "model"):
            owner, method = node.func.value, node.func.attr
            if isinstance(owner, ast.Name) and owner.id == "self" and method in FORBIDDEN_CALLS:
                complaints.append(f"{path}:{node.lineno}: self.{method}; use {FORBIDDEN_CALLS[method]}")
    return complaints


def masked_exponent(path: str, source: str) -> list[str]:
    """`where(mask, exp(x), 0)` has gradient NaN where exp overflows: the exponent is masked, not its exponential."""
    if room(module_name(path)) == "tests":
        return []
    complaints = []
    for statement in ast.parse(source).body:
        assignments = [node for node in ast.walk(statement) if isinstance(node, ast.Assign)]
        masked = {node.targets[0].id for node in assignments
                  if isinstance(node.targets[0], ast.Name) and calls(node.value, "where")}
        for choice in calls(statement, "where", "select"):
            branches = [*choice.args[1:], *(keyword.value for keyword in choice.keywords)]
            for call in [call for branch in branches for call in calls(branch, "exp", "exp2")]:
                names = {node.id for node in ast.walk(call) if isinstance(node, ast.Name)}
                if not calls(call, "where") and not names & masked:
                    complaints.append(f"{path}:{call.lineno}: exp inside where; mask the exponent before exp")
    return complaints


def calls(node: ast.AST, *names: str) -> list[ast.Call]:
    """The calls below `node` of functions with one of these last names."""
    return [call for call in ast.walk(node) if isinstance(call, ast.Call) and called(call) in names]


def machine_traces(path: str, source: str) -> list[str]:
    """Nothing in the project knows on which machine it was written."""
    lines = enumerate(source.splitlines(), 1)
    return [f"{path}:{i}: mentions {trace}" for i, line in lines for trace in MACHINE_TRACES if trace in line]


RULES_OF_PYTHON = (direction, size, docstring, noun, signature, masked_exponent)


def texts() -> dict[str, str]:
    """Every text file of the project, by its path; the folder behind efla_jax/kernels is read once, as kernels/."""
    files = [file for file in ROOT.iterdir() if file.is_file()] + [ROOT / ".ci" / "run"]
    files += [file for folder in FOLDERS for file in (ROOT / folder).rglob("*") if file.is_file()]
    found = {}
    for file in files:
        path = file.relative_to(ROOT).as_posix()
        if "__pycache__" in path or path.startswith("efla_jax/kernels/"):
            continue
        try:
            found[path] = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # a picture or an archive
            continue
    return found


@pytest.fixture(scope="module")
def project() -> dict[str, str]:
    found = texts()
    assert {"efla_jax/__init__.py", "kernels/README.md", "tests/test_house.py", "setup.py", "Makefile"} <= set(found)
    return found


@pytest.mark.parametrize("rule", RULES_OF_PYTHON)
def test_python_files_keep(rule, project):
    complaints = [line for path, text in project.items() if path.endswith(".py") for line in rule(path, text)]
    assert not complaints, "\n".join([rule.__doc__, *complaints])


def test_no_file_imports_itself(project):
    package = {path: text for path, text in project.items() if path.startswith(("efla_jax/", "kernels/"))}
    assert not circles({path: text for path, text in package.items() if path.endswith(".py")})


def test_a_circle_is_seen():
    chain = {"efla_jax/a.py": "from efla_jax import b", "efla_jax/b.py": "def f():\n    from efla_jax.c import x"}
    assert not circles(chain | {"efla_jax/c.py": "import jax", "efla_jax/__init__.py": "from efla_jax import a"})
    assert len(circles(chain | {"efla_jax/c.py": "import efla_jax.a"})) == 3


def test_no_file_knows_its_machine(project):
    complaints = [line for path, text in project.items() for line in machine_traces(path, text)]
    assert not complaints, "\n".join(complaints)


def test_kernels_are_reached_through_the_link():
    inside, outside = ROOT / "efla_jax" / "kernels", ROOT / "kernels"
    assert not (outside / "__init__.py").exists()
    # An unpacked sdist holds the folder twice; a checkout holds a link.
    if (ROOT / ".git").exists():
        assert inside.is_symlink() and inside.readlink() == Path("../kernels")
    assert sorted(file.name for file in inside.glob("*.*")) == sorted(file.name for file in outside.glob("*.*"))


IMPORT_AND_LOOK = """
import importlib, sys
from jax._src import xla_bridge
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in ("jax_triton", "triton"):
            raise
    if xla_bridge.backends_are_initialized():
        sys.exit(f"importing {name} initialised a jax backend")
"""


def import_and_look(names: list[str], folder: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", IMPORT_AND_LOOK, *names]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)


@pytest.mark.identity
def test_importing_the_package_initialises_no_backend():
    files = [*(ROOT / "efla_jax").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")]
    names = sorted({module_name(file.relative_to(ROOT).as_posix()) for file in files})
    result = import_and_look(names, ROOT)
    assert result.returncode == 0, result.stderr


def test_a_module_level_array_is_seen(tmp_path):
    (tmp_path / "eager.py").write_text("import jax.numpy as jnp\n\nTABLE = jnp.zeros(1)\n")
    (tmp_path / "lazy.py").write_text("import jax.numpy as jnp\n\nDTYPE = jnp.float32\n")
    assert import_and_look(["lazy"], tmp_path).returncode == 0
    result = import_and_look(["lazy", "eager"], tmp_path)
    assert result.returncode == 1 and "importing eager initialised" in result.stderr


LONG_FUNCTION = "def f():\n" + "    x = 1\n" * 60
ELEVEN = "a, b, c, d, e, *, f, g, h, i, j, k"

BROKEN = [
    (direction, "efla_jax/shapes.py", "from efla_jax import ops"),
    (direction, "efla_jax/ops/delta_rule.py", "from efla_jax.kernels import delta_rule"),
    (direction, "efla_jax/ops/delta_rule.py", "import kernels"),
    (direction, "efla_jax/ops/delta_rule.py", "def f():\n    from kernels.delta_rule import forward"),
    (direction, "efla_jax/ops/delta_rule.py", "from ..layers import mixer"),
    (direction, "efla_jax/ops/__init__.py", "from ..model import LanguageModel"),
    (direction, "efla_jax/ops/delta_rule.py", "def f():\n    import efla_jax.model"),
    (direction, "efla_jax/ops/delta_rule.py", "KERNEL = importlib.import_module('efla_jax.kernels.x')"),
    (direction, "efla_jax/layers/efla.py", "def f():\n    from efla_jax.kernels import delta_rule"),
    (direction, "efla_jax/layers/efla.py", "def f(n):\n    return import_module(f'efla_jax.kernels.{n}')"),
    (direction, "efla_jax/layers/efla.py", "def f(n):\n    return import_module(f'..kernels.{n}', __package__)"),
    (direction, "efla_jax/layers/efla.py", "from efla_jax import LanguageModel"),
    (direction, "efla_jax/layers/efla.py", "from efla_jax.data import text"),
    (direction, "efla_jax/model.py", "import efla_jax.train"),
    (direction, "efla_jax/data/text.py", "from efla_jax import metrics"),
    (direction, "efla_jax/data/text.py", "import jax.numpy as jnp"),
    (direction, "efla_jax/optim.py", "from efla_jax import checkpoint"),
    (direction, "efla_jax/sharding.py", "from efla_jax.model import LanguageModel"),
    (direction, "efla_jax/generate.py", "from efla_jax import train"),
    (direction, "efla_jax/train.py", "from experiments import report"),
    (direction, "efla_jax/train.py", "from configs import quickstart"),
    (direction, "efla_jax/attic.py", "import jax"),
    (direction, "kernels/delta_rule.py", "from efla_jax import ops"),
    (direction, "experiments/train.py", "from efla_jax import layers"),
    (direction, "experiments/train.py", "import efla_jax\nmixers = efla_jax.layers.MIXERS"),
    (direction, "experiments/train.py", "from efla_jax import ops"),
    (direction, "experiments/benchmark.py", "def f():\n    from efla_jax.kernels import delta_rule"),
    (direction, "configs/quickstart.py", "import os"),
    (direction, "configs/quickstart.py", "from configs import smnist"),
    (direction, "configs/quickstart.py", "from efla_jax import layers"),
    (direction, "tests/test_kernels.py", "import kernels.delta_rule"),
    (size, "efla_jax/train.py", "x = 1\n" * 401),
    (size, "experiments/train.py", "x = 1\n" * 401),
    (size, "kernels/delta_rule.py", "x = 1\n" * 601),
    (size, "efla_jax/train.py", LONG_FUNCTION),
    (docstring, "configs/quickstart.py", "import ml_collections"),
    (docstring, "tests/test_x.py", "# a comment\nx = 1"),
    (noun, "efla_jax/utils.py", ""),
    (noun, "efla_jax/ops/delta_helpers.py", ""),
    (noun, "efla_jax/misc/delta_rule.py", ""),
    (noun, "experiments/common.py", ""),
    (noun, "kernels/delta_rule_v2.py", ""),
    (noun, "tests/test_new.py", ""),
    (signature, "efla_jax/layers/efla.py", "def f(x, **options):\n    return x"),
    (signature, "efla_jax/ops/delta_rule.py", f"def delta_rule({ELEVEN}):\n    return a"),
    (signature, "efla_jax/layers/efla.py", "def f(self, x):\n    self.sow('intermediates', 'x', x)"),
    (signature, "efla_jax/model.py", "def f(self, x):\n    return self.variable('cache', 'x', x)"),
    (masked_exponent, "efla_jax/ops/gates.py", "y = jnp.where(mask, jnp.exp(x), 0)"),
    (masked_exponent, "efla_jax/ops/gates.py", "y = jnp.where(mask, 0, 2 * exp(x - x.max()))"),
    (masked_exponent, "efla_jax/ops/gates.py", "def f(x):\n    y = where(m, x, 0)\n    return where(m, exp(x), y)"),
    (masked_exponent, "kernels/gates.py", "y = where(mask, x=jnp.exp2(x), y=0)"),
    (masked_exponent, "kernels/gates.py", "y = jax.lax.select(mask, jnp.exp(x), zeros)"),
    *((machine_traces, "README.md", f"see {trace} for more") for trace in MACHINE_TRACES),
]
KEPT = [
    (direction, "efla_jax/ops/delta_rule.py", "def f():\n    from efla_jax.kernels import delta_rule"),
    (direction, "efla_jax/ops/delta_rule.py", "from efla_jax.shapes import State\nfrom . import segments\nimport jax"),
    (direction, "efla_jax/layers/efla.py", "from efla_jax import ops, shapes, sharding, __version__"),
    (direction, "efla_jax/train.py", "from efla_jax import data, evaluate, generate, model, optim"),
    (direction, "efla_jax/__init__.py", "def f(name):\n    return import_module(f'.{name}', __name__)"),
    (direction, "experiments/train.py", "import efla_jax\nfrom efla_jax import train\nmodel = efla_jax.LanguageModel"),
    (direction, "experiments/benchmark.py", "from efla_jax import ops\nfrom efla_jax.ops import dispatch"),
    (direction, "configs/quickstart.py", "import ml_collections\nfrom configs.common import text"),
    (direction, "tests/test_kernels.py", "from efla_jax.kernels import delta_rule"),
    (direction, "kernels/delta_rule.py", "from efla_jax.kernels import layout\nfrom jax.experimental import pallas"),
    (size, "efla_jax/train.py", "x = 1\n" * 400),
    (size, "kernels/delta_rule.py", "x = 1\n" * 600),
    (size, "efla_jax/train.py", LONG_FUNCTION.removesuffix("    x = 1\n")),
    (noun, "configs/common.py", ""),
    (noun, "efla_jax/layers/mamba2.py", ""),
    (signature, "efla_jax/ops/delta_rule.py", f"def delta_rule({ELEVEN.removesuffix(', k')}):\n    return a"),
    (signature, "efla_jax/layers/efla.py", "def f(self, x):\n    return self.param('a', x)"),
    (masked_exponent, "efla_jax/ops/gates.py", "y = jnp.exp(jnp.where(mask, x, -jnp.inf))"),
    (masked_exponent, "efla_jax/ops/gates.py", "y = jnp.where(mask, jnp.exp(jnp.where(mask, x, 0)), 0)"),
    (masked_exponent, "efla_jax/ops/gates.py", "def f(x):\n    z = where(m, x, 0)\n    return where(m, exp(-z), 0)"),
    (machine_traces, "README.md", "the framework/ and the root of a tree"),
]


@pytest.mark.parametrize(("rule", "path", "source"), BROKEN)
def test_rule_refuses(rule, path, source):
    assert rule(path, source)


@pytest.mark.parametrize(("rule", "path", "source"), KEPT)
def test_rule_allows(rule, path, source):
    assert rule(path, source) == []
