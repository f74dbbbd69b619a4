r"""Checkpoints of Hugging Face's format (safetensors) in and out.

    python -m experiments.convert import --source=FOLDER_OR_HUB_NAME --run=runs/mamba2
    python -m experiments.convert export --run=runs/mamba2 --to=FOLDER --dtype=bfloat16

Families: delta_net, gated_deltanet, mamba2, log_linear_mamba2 and transformer of flash-linear-attention; mamba2, llama,
mistral and qwen3 of transformers. Their tables are in efla_jax/checkpoint/interchange_tables.py. A tensor that is
missing, or that nothing uses, is an error that lists them all; so is a field of config.json that ours cannot do.

`import` writes a run: config.json, checkpoints/0 (float32, as all parameters here are) and the tokenizer's files, so
that experiments.evaluate, experiments.generate and --init_from of experiments.train take it. --source is a folder, one
safetensors file beside its config.json, or a name on the hub (extra `hf`). --dtype is that of the run's products;
without it, the checkpoint's.

`export` writes model.safetensors (several, with an index, from --shard_bytes on), config.json and the tokenizer's files
of any run whose model the family can express; bytes get a tokenizer.json, which is known as theirs when it comes back.
Every tensor is read back and compared. Without --dtype tensors have the dtypes that they were imported with, else
float32. Where the other library would compute slightly otherwise the differences are listed as an error, and --inexact
exports all the same.

--tie and --untie say whether the head is the embedding's table; without them that stays as it is.

Memory: see efla_jax/checkpoint/interchange_steps.py; `import` takes as much disk again as the checkpoint for a while.
Nothing appears under its name before it is complete: begun conversions lie in FOLDER.partial and are made anew.
"""

import argparse
import dataclasses
import hashlib
import json
import pathlib
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp

from configs import common
from efla_jax.checkpoint import interchange_steps as steps
from efla_jax.checkpoint.interchange import Layout, Tensor, check_names, lay_out
from efla_jax.checkpoint.interchange_families import FAMILIES, Family, check_config, check_model, required
from efla_jax.checkpoint.interchange_files import DTYPES, Reader, create
from efla_jax.checkpoint.interchange_tables import HEAD, TABLE
from efla_jax.data.byte_tokenizer import tokenizer_json
from efla_jax.data.tokenizer import BYTES, TokenizerSpec, load_tokenizer
from efla_jax.model import LanguageModel, mixer_fields
from efla_jax.train import settings
from experiments import runs
from experiments.language_runs import positive

ORIGIN = "interchange.json"  # in a run's folder: family, dtypes and config.json of what was imported
# What lies beside the tensors and is carried along as it is.
CARRIED = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
           "vocab.json", "merges.txt", "chat_template.jinja", "generation_config.json")  # fmt: skip
TOKENIZERS = {"tokenizer.json": "tokenizers", "tokenizer.model": "sentencepiece", "tokenizer.tiktoken": "tiktoken"}
# Fields of config.json that ours do not have, or write in another way: where they are known they stay as they were.
NEUTRAL = ("residual_in_fp32", "time_step_limit", "dt_limit", "time_step_min", "time_step_max", "time_step_floor",
           "time_step_rank", "chunk_size", "hidden_act", "fuse_cross_entropy")  # fmt: skip
PRODUCTS = ("float32", "bfloat16", "float16")
NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
OLD_NAMES = {"backbone.embedding.weight": "backbone.embeddings.weight"}  # of the first Mamba checkpoints


class Renamed:
    """The tensors of files under the names of a table: a head for a table of embeddings, or the other way round."""

    def __init__(self, reader: Reader, names: Mapping[str, str]):
        self._reader, self._names = reader, names

    def __getitem__(self, name: str):
        return self._reader[self._names[name]]


@contextmanager
def building(folder: pathlib.Path, flag: str, size: int) -> Iterator[pathlib.Path]:
    """A folder to write `size` bytes to that becomes `folder` when all went well."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"--{flag}={folder}: is there already; name another folder, or remove this one.")
    partial = folder.absolute().with_name(f"{folder.absolute().name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    # A full disk would end the program without a word: pages of a mapped file are written behind its back.
    free = shutil.disk_usage(partial).free
    if size > free:
        raise OSError(f"--{flag}={folder}: {size / 1e9:.1f} GB are written there at most and {free / 1e9:.1f} GB are"
                      " free; make room, or name a folder on another disk.")  # fmt: skip
    try:
        yield partial
    except OSError as error:
        if error.strerror is None or error.filename is not None:  # in our words, or of a file that it names
            raise
        raise OSError(f"--{flag}={folder}: {error.strerror} while {partial} was written; begin again.") from error
    if folder.exists():
        folder.rmdir()
    partial.rename(folder.absolute())


def located(source: str) -> pathlib.Path:
    """The folder of a checkpoint, or its file; a name on the hub is fetched."""
    path = pathlib.Path(source).expanduser()
    if path.exists():
        return path
    if source.count("/") != 1 or source.startswith((".", "/", "~")):
        raise ValueError(f"--source={source}: neither a file or folder, nor a name on the hub, as OWNER/NAME.")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ImportError(f"--source={source}: no such folder, and fetching it from the hub needs huggingface_hub,"
                          " which is not installed: pip install 'efla_jax[hf]'.") from None  # fmt: skip
    try:
        return pathlib.Path(snapshot_download(source, allow_patterns=["*.safetensors", "*.safetensors.index.json",
                                                                      "config.json", *CARRIED]))  # fmt: skip
    except Exception as error:  # of several packages below it
        raise OSError(f"--source={source}: no such folder, and the hub gave no checkpoint ({error}).") from error


def family_of(name: str, config: Mapping[str, Any]) -> Family:
    """The family of that name, or the one that a config.json names."""
    told = f"--family: {name!r}" if name else f"config.json: model_type {config.get('model_type')!r}"
    name = name or str(config.get("model_type", ""))
    if name not in FAMILIES:
        raise ValueError(f"{told} is not one of {', '.join(FAMILIES)}; name the one it is made like as --family.")
    return FAMILIES[name]


def table_of(family: Family, tie: bool, table_is_head: bool) -> tuple[Tensor, ...]:
    """The family's table; where the head is made of the table of embeddings, with that as its leaf."""
    rows = tuple(row for row in family.table if row.leaves != (HEAD,))
    if tie:
        return rows
    return (*rows, Tensor("lm_head.weight", (TABLE if table_is_head else HEAD,)))


def embeddings_of(family: Family) -> str:
    """What the family calls the table of embeddings."""
    return next(row.name for row in family.table if row.leaves == (TABLE,))


def names_in(reader: Reader, family: Family, layout: Layout, tied: bool) -> dict[str, str]:
    """{name in the table: name in the files} of every tensor. Raises ValueError listing what does not fit.

    A head and a table of embeddings that are one may be in the files once, under either name, or twice, equal."""
    shapes = {OLD_NAMES.get(name, name): shape for name, shape in reader.shapes.items()
              if not family.is_buffer(name)}  # fmt: skip
    back = {OLD_NAMES.get(name, name): name for name in reader.shapes}
    names = {name: back.get(name, name) for name in layout.tensors}
    table, head = embeddings_of(family), "lm_head.weight"
    if head not in layout.tensors and table in shapes and head in shapes:
        if not steps.same(reader[back[table]], reader[head]):
            raise ValueError(f"{head} and {table} differ, so they cannot be tied; --untie keeps both.")
        del shapes[head]
    for absent, other in ((table, head), (head, table)):
        if tied and absent not in shapes and other in shapes and absent in layout.tensors:
            names[absent] = back[other]
            shapes[absent] = shapes[other] if other in layout.tensors else shapes.pop(other)
    check_names(layout.tensors, shapes)
    return names


def run_config(section: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of a run that has this section `model`, as experiments.train would write it."""
    run = common.base()
    run.data.kind, run.data.path = "tokens", ""
    run.mesh.data = 1
    if config.get("max_position_embeddings"):
        run.data.window = int(config["max_position_embeddings"])
    return {**settings.plain(run), "model": {**section, "scan": True}}


def adds_bos(folder: pathlib.Path) -> bool:
    """Whether the tokenizer in a folder begins every text with BOS: its own word, or its template."""
    file = folder / "tokenizer_config.json"
    told = runs.json_object(file).get("add_bos_token") if file.is_file() else None
    if told is not None:
        return bool(told)
    file = folder / "tokenizer.json"
    after = (runs.json_object(file).get("post_processor") or {}) if file.is_file() else {}
    first = [(one.get("single") or [{}])[0] for one in (after, *after.get("processors", ()))]
    return any("SpecialToken" in one for one in first if isinstance(one, dict))


def vocabulary_in(folder: pathlib.Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """What the checkpoint's metadata say of its tokens: as `Tokenizer.describe`, with the rows of the table."""

    def token(name: str) -> int:
        value = config.get(f"{name}_token_id")
        value = value[0] if isinstance(value, list) else value
        return -1 if value is None or not 0 <= value < config["vocab_size"] else value

    kind, file = next(((kind, folder / name) for name, kind in TOKENIZERS.items() if (folder / name).is_file()),
                      ("", None))  # fmt: skip
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest() if file else ""
    if file and file.read_bytes() == tokenizer_json().encode():  # of a run of bytes, see `export_run`
        return load_tokenizer(TokenizerSpec(BYTES)).describe() | {"vocab_size": config["vocab_size"]}
    return {"kind": kind, "sha256": sha256, "vocab_size": config["vocab_size"], "eos_id": token("eos"),
            "bos_id": token("bos") if adds_bos(folder) else -1, "pattern": ""}  # fmt: skip


def shapes_of(model: LanguageModel) -> dict[str, tuple[int, ...]]:
    """The shape of each leaf by its path."""
    variables = jax.eval_shape(model.init, jax.random.key(0), jax.ShapeDtypeStruct((1, 1), jnp.int32))
    return {path: leaf.shape for path, leaf in steps.flat(variables).items()}


def carry(source: pathlib.Path, target: pathlib.Path) -> None:
    """Copy the files that lie beside the tensors: those of a folder, or one tokenizer under its usual name."""
    if source.is_file():
        shutil.copyfile(source, target / f"tokenizer{source.suffix}")
    elif not source.is_dir():
        raise FileNotFoundError(f"--tokenizer={source}: neither a file nor a folder.")
    for name in CARRIED:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def import_run(chosen: argparse.Namespace) -> None:
    """The command `import`."""
    source = located(chosen.source)
    beside = source if source.is_dir() else source.parent
    if not (beside / "config.json").is_file():
        raise ValueError(f"--source={source}: no config.json there; fetch it, the tensors alone do not say enough.")
    config = runs.json_object(beside / "config.json")
    family = family_of(chosen.family, config)
    check_config(family, config)
    required(config, "vocab_size")
    section = family.fields(config)
    tied = section["tie_embeddings"]
    if chosen.tie is not None:
        section["tie_embeddings"] = chosen.tie
    known = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    section["dtype"] = chosen.dtype or (known if known in PRODUCTS else "float32")
    record = run_config(section, config)
    model = settings.section(record, "model", LanguageModel, {"vocab_size": config["vocab_size"]})
    reader, shapes = Reader(source), shapes_of(model)
    layout = lay_out(table_of(family, model.tie_embeddings, False), shapes)
    names = names_in(reader, family, layout, tied or model.tie_embeddings)
    dtypes = {name: reader.dtypes[there] for name, there in names.items()}
    count = steps.size_of({leaf: shapes[leaf] for leaf in layout.by_leaf()})
    with building(chosen.run, "run", 8 * count) as folder:  # float32, once in scratch files and once in the checkpoint
        scratch = folder / "scratch"
        scratch.mkdir()
        leaves = steps.gather(layout, shapes, Renamed(reader, names), scratch)
        carry(beside, folder)
        if chosen.tokenizer:
            carry(chosen.tokenizer, folder)
        vocabulary = vocabulary_in(folder, config)
        about = {"config": json.loads(json.dumps(record)), "tokenizer": vocabulary["sha256"], "vocabulary": vocabulary}
        steps.save(folder / "checkpoints", leaves, about)
        shutil.rmtree(scratch)
        origin = {"family": family.name, "source": chosen.source, "dtypes": dtypes, "config": config}
        (folder / ORIGIN).write_text(json.dumps(origin, indent=2) + "\n")
        (folder / "config.json").write_text(json.dumps(record, indent=2) + "\n")
    kinds = ", ".join(f"{number} {code}" for code, number in Counter(dtypes.values()).items())
    if "F64" in dtypes.values():
        print("tensors of 64 bits were rounded to float32, as all parameters here are")
    print(f"imported {family.name}: {count:,} parameters, {len(layout.tensors)} tensors ({kinds})\nrun: {chosen.run}")


def whole_fields(model: LanguageModel, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(fields of the model, fields of its mixer) with every default and size in full."""
    block = model.block_fields(name)
    mixer = block["mixer_class"](**mixer_fields(model, name), parent=None)
    fields = {field.name: getattr(mixer, field.name) for field in dataclasses.fields(mixer)}
    sizes = dict(zip(("key_heads", "heads", "key_dim", "value_dim"), mixer.sizes(), strict=False))
    fields["head_dim"] = sizes["value_dim" if "state_dim" in fields else "key_dim"]
    fields |= {name: sizes["key_heads"] for name in ("num_key_heads", "num_kv_heads") if name in fields}
    whole = {field.name: getattr(model, field.name) for field in dataclasses.fields(model)}
    return whole | {"mlp_width": block["mlp_width"]}, fields


def origin_of(folder: pathlib.Path, family: str) -> dict[str, Any]:
    """What an import of this family wrote beside a run, {} for other runs."""
    file = folder / ORIGIN
    found = runs.json_object(file) if file.is_file() else {}
    return found if found.get("family") == family else {}


def exported_config(
    family: Family, model: LanguageModel, origin: Mapping[str, Any], vocabulary: Mapping[str, Any]
) -> dict[str, Any]:
    """config.json of a run for the other library: over what was imported, if it was."""
    name, known = model.mixers[0], origin.get("config", {})
    tokens = {f"{name}_token_id": vocabulary.get(f"{name}_id", -1) for name in ("bos", "eos")}
    tokens = {name: None if token < 0 else token for name, token in tokens.items()} | {"pad_token_id": None}
    return {
        **tokens,
        **known,
        **family.config(*whole_fields(model, name)),
        **{field: known[field] for field in NEUTRAL if field in known},
        "vocab_size": model.vocab_size,
        "model_type": family.name,
        "architectures": [family.architecture],
    }


def export_run(chosen: argparse.Namespace) -> None:
    """The command `export`."""
    folder, config = runs.recorded(chosen.run, "run")
    runs.require_sections(chosen.run, config, "model", "optim")
    stored = steps.StoredParams(chosen.run, "ema" if config["optim"].get("ema_decay") else "params")
    if TABLE not in stored.shapes:
        raise ValueError(f"--run={chosen.run}: not a language model; there is no table of embeddings to export.")
    model = settings.section(config, "model", LanguageModel, {"vocab_size": stored.shapes[TABLE][0]})
    imported = runs.json_object(folder / ORIGIN).get("family", "") if (folder / ORIGIN).is_file() else ""
    mixers = set(model.mixers)
    matching = [family.name for family in FAMILIES.values() if {family.mixer} == mixers]
    if not (chosen.family or imported or matching):
        known = ", ".join(sorted({one.mixer for one in FAMILIES.values()}))
        raise ValueError(f"--run={chosen.run}: no family is made of {' and '.join(sorted(mixers))}; models that can be"
                         f" exported have one mixer, of {known}.")  # fmt: skip
    family = family_of(chosen.family or imported or matching[0], {})
    check_model(family, *whole_fields(model, model.mixers[0]), mixers, chosen.inexact)
    tie = model.tie_embeddings if chosen.tie is None else chosen.tie
    if tie and HEAD in stored.shapes and not steps.same(stored.read(TABLE), stored.read(HEAD).T):
        raise ValueError("--tie: the head and the table of embeddings differ; export without it.")
    shapes = {path: shape for path, shape in stored.shapes.items() if not (tie and path == HEAD)}
    layout = lay_out(table_of(family, tie, model.tie_embeddings), shapes)
    origin = origin_of(folder, family.name)
    vocabulary = stored.metadata.get("vocabulary") or {}
    written = exported_config(family, model, origin, vocabulary) | {"tie_word_embeddings": tie}
    known = origin.get("dtypes", {}) if not chosen.dtype else {}
    dtypes = {name: known.get(name, NAMES[chosen.dtype or "float32"]) for name in layout.tensors}
    usual = Counter(dtypes.values()).most_common(1)[0][0]
    written |= {name: DTYPES[usual].name for name in ("dtype", "torch_dtype")}  # of transformers 5 and 4
    count = steps.size_of(layout.tensors)
    with building(chosen.to, "to", count * DTYPES[usual].itemsize) as target:
        files = {name: (dtypes[name], shape) for name, shape in layout.tensors.items()}
        steps.scatter(layout, stored, create(target, files, chosen.shard_bytes))
        (target / "config.json").write_text(json.dumps(written, indent=2) + "\n")
        carry(folder, target)
        if stored.metadata.get("tokenizer") == BYTES:
            (target / "tokenizer.json").write_text(tokenizer_json(), encoding="utf-8")
            (target / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}\n')
        if chosen.tokenizer:
            carry(chosen.tokenizer, target)
        Reader(target)  # the files as another program will find them
    print(f"exported {family.name}: {count:,} numbers, {len(layout.tensors)} tensors, mostly {usual}\nto: {chosen.to}")


def existing(word: str) -> pathlib.Path:
    """A path that is there: said before anything is converted."""
    if not pathlib.Path(word).exists():
        raise argparse.ArgumentTypeError(f"{word}: neither a file nor a folder")
    return pathlib.Path(word)


def parser() -> argparse.ArgumentParser:
    """Of both commands, each with what it runs as `command`."""
    shared = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    shared.add_argument("--run", type=pathlib.Path, required=True, help="folder of the run, or of a step to export")
    shared.add_argument("--family", default="", help=f"one of {', '.join(FAMILIES)}; else as the config says")
    shared.add_argument("--dtype", default="", choices=("", *PRODUCTS), help="of products (import), tensors (export)")
    shared.add_argument("--tokenizer", type=existing, help="file, or folder of files, to carry along")
    for name, value in (("tie", True), ("untie", False)):
        shared.add_argument(f"--{name}", dest="tie", action="store_const", const=value, help="embeddings and head")
    whole = argparse.ArgumentParser(allow_abbrev=False, prog="python -m experiments.convert")
    commands = whole.add_subparsers(required=True, metavar="import|export")
    one = commands.add_parser("import", parents=[shared], allow_abbrev=False, help="a checkpoint into a run")
    one.set_defaults(command=import_run)
    one.add_argument("--source", required=True, help="folder, safetensors file, or name on the hub")
    one = commands.add_parser("export", parents=[shared], allow_abbrev=False, help="a run into a checkpoint")
    one.set_defaults(command=export_run)
    one.add_argument("--to", type=pathlib.Path, required=True, help="folder to write")
    one.add_argument("--shard_bytes", type=positive, default=5 * 10**9, help="most bytes of one file")
    one.add_argument("--inexact", action="store_true", help="also where the other library computes otherwise")
    return whole


def main(words: list[str] | None = None) -> None:
    """Run a command line (None: the program's); wrong input, files and a missing extra are one line, exit status 1."""
    chosen = parser().parse_args(words)
    try:
        chosen.command(chosen)
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
