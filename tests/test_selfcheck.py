"""The check that users run on their GPU: what it calls wrong, what it survives, and what it covers."""

import functools
import importlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from efla_jax import (
    selfcheck,
    selfcheck_attention,
    selfcheck_cases,
    selfcheck_conv,
    selfcheck_log_linear,
    selfcheck_recurrences,
    selfcheck_routed,
)
from efla_jax.ops.chunked import chunked
from efla_jax.selfcheck_attention import AttentionCase
from efla_jax.selfcheck_cases import Case, Sizes
from efla_jax.selfcheck_conv import ConvCase
from efla_jax.selfcheck_log_linear import LogLinearCase
from efla_jax.selfcheck_routed import RoutedCase
from tests.lowering import lower_cuda, mosaic_calls

TINY = Sizes(1, 24, 1, 2, 4, 3)
CASE = Case("delta_rule", "random", TINY)
RECURRENCES = selfcheck_recurrences
SLOW = pytest.mark.slow


@pytest.fixture
def kernel(monkeypatch):
    """kernel(function): what "pallas" is for both operators, instead of a GPU's programs."""

    def replace(function):
        for op in ("delta_rule", "linear_attention"):
            monkeypatch.setitem(importlib.import_module(f"efla_jax.ops.{op}").TABLE, "pallas", function)

    RECURRENCES.program.cache_clear()
    yield replace
    RECURRENCES.program.cache_clear()


def failing(error):
    def function(x, chunk_size):
        raise error

    return function


@pytest.mark.parametrize("op", ("delta_rule", "linear_attention"))
@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
def test_a_right_kernel_passes(kernel, op, dtype, monkeypatch):
    kernel(chunked)
    monkeypatch.setitem(selfcheck_cases.FLOOR, "float32", 0.0)
    monkeypatch.setitem(selfcheck_cases.BAR, "float32", 2.0)
    # Where key heads are shared, "chunked" is measured with a copy of the key for every value head.
    result = selfcheck.check(RECURRENCES, Case(op, "random", TINY._replace(key_heads=2), "documents", dtype))
    assert result.complaint is None and result.declined is None
    assert result.errors == result.beside and max(result.errors.values()) < 1e-2
    assert ("derase" in result.errors) == (op == "delta_rule")


def test_a_wrong_output_and_its_gradients_fail(kernel):
    kernel(lambda x, size: (chunked(x, size)[0] * 1.02, chunked(x, size)[1]))
    complaint = selfcheck.check(RECURRENCES, CASE).complaint
    assert complaint is not None and complaint.startswith("beyond the bar: o, ")


def test_a_wrong_gradient_alone_fails(kernel):
    @jax.custom_jvp
    def same(x):
        return x

    same.defjvp(lambda primals, tangents: (primals[0], 1.05 * tangents[0]))
    kernel(lambda x, size: chunked(x._replace(log_decay=same(x.log_decay)), size))
    assert selfcheck.check(RECURRENCES, CASE).complaint == "beyond the bar: dlog_decay"


def test_what_is_not_a_number_fails(kernel):
    kernel(lambda x, size: (chunked(x, size)[0], chunked(x, size)[1] + jnp.nan))
    assert "state" in selfcheck.check(RECURRENCES, CASE).complaint


def test_other_bits_on_repetition_fail(monkeypatch):
    honest, count = RECURRENCES.program, itertools.count()

    def wavering(op, implementation, interpret=None):
        run = honest(op, "chunked" if implementation == "pallas" else implementation)
        last_bit = (1 + 2.0**-23 * next(count)) if implementation == "pallas" else 1
        return lambda *a: {n: x * (last_bit if n == "dinitial" else 1) for n, x in run(*a).items()}

    def twice(*arguments):
        def run(*given):
            return wavering(*arguments)(*given)

        return run

    monkeypatch.setattr(RECURRENCES, "program", twice)
    assert selfcheck.check(RECURRENCES, CASE).complaint == "another run gave other bits: dinitial"


def test_one_failure_does_not_hide_the_next_case(kernel, capsys):
    def function(x, size):
        if x.k.shape[-1] == 4:
            raise RuntimeError("ptxas said no")
        return chunked(x, size)

    kernel(function)
    assert selfcheck.check_all([(RECURRENCES, CASE), (RECURRENCES, CASE._replace(sizes=TINY._replace(key_dim=5)))]) == 1
    text = capsys.readouterr().out
    assert "FAILED      | delta_rule, random, B1 T24 G1 H2 K4 V3" in text and "RuntimeError: ptxas said no" in text
    assert "ok          | delta_rule, random, B1 T24 G1 H2 K5 V3" in text and "2 cases, 2 covered, 1 failed" in text


def test_what_is_declined_is_no_failure_unless_everything_is(kernel, capsys):
    kernel(failing(NotImplementedError("not this size")))
    assert selfcheck.check(RECURRENCES, CASE).declined == "not this size"
    assert selfcheck.check_all([(RECURRENCES, CASE)]) == 1
    assert "not covered | delta_rule" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", ([], ["--times"], ["--interpret", "--only=no such case"]))
def test_without_a_gpu_or_a_case_the_status_is_2(arguments, capsys):
    assert selfcheck.main(arguments) == 2
    message = capsys.readouterr().err
    assert ("need an NVIDIA Hopper GPU" in message) == ("--interpret" not in arguments)


def test_cases_are_awkward():
    every = [case.name for module in selfcheck.MODULES for case in (*module.cases(), *module.tiny_cases())]
    assert len(set(every)) == len(every)
    found = RECURRENCES.cases()
    sizes = [case.sizes for case in found]
    for awkward in (
        lambda s: s.time % 64 and s.time > 64,
        lambda s: 1 < s.time < 64,
        lambda s: s.time == 1,
        lambda s: s.key_dim != s.value_dim,
        lambda s: s.heads > s.key_heads > 1,
        lambda s: s.batch * s.heads < 8 and s.time > 1000,
    ):
        assert any(map(awkward, sizes))
    for op in ("delta_rule", "linear_attention"):
        mine = [case for case in found if case.op == op]
        assert {case.documents for case in mine} == {None, "documents", "padding"}
        assert {"parallel keys", "zero keys", "decay -1e4"} <= {case.inputs for case in mine}
    assert {"beta 1", "erase up to 2"} <= {case.inputs for case in found}


@pytest.mark.parametrize("inputs", [name for name in selfcheck_cases.AWKWARD if name != "random"])
def test_every_kind_of_input_is_its_own(inputs):
    plain, other = (selfcheck_cases.draw(CASE._replace(inputs=name))[0] for name in ("random", inputs))
    assert any(not np.array_equal(a, b) for a, b in zip(plain, other, strict=True))
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in other)


def test_documents_and_padding_stand_where_they_hurt():
    case = CASE._replace(sizes=TINY._replace(batch=2, time=200))
    documents = np.asarray(selfcheck_cases.segment_ids(case._replace(documents="documents")))
    assert documents.min() > 0 and documents[0, 63] != documents[0, 64]
    lengths = [len(list(group)) for _, group in itertools.groupby(documents[1])]
    assert len(lengths) > 2 and np.array_equal(np.sort(documents[1]), documents[1])
    padding = np.asarray(selfcheck_cases.segment_ids(case._replace(documents="padding")))
    assert not padding[:, 0].any() and not padding[:, -1].any() and 0 < (padding[:, 30:150] == 0).mean() < 0.5


def test_times_go_on_where_one_implementation_fails(kernel, capsys, monkeypatch):
    kernel(failing(RuntimeError("out of memory")))
    monkeypatch.setattr(RECURRENCES, "TIMED", [("delta_rule", TINY)])
    milliseconds = selfcheck.milliseconds
    monkeypatch.setattr(selfcheck, "milliseconds", lambda *a: milliseconds(*a, launches=1, repeats=1))
    selfcheck.print_times([RECURRENCES])
    *_, forward, both = capsys.readouterr().out.strip().splitlines()
    for name, row in (("forward", forward), ("forward+backward", both)):
        *_, measured, failed, time, _ = row.split("|")
        assert measured.strip().endswith(f", {name}") and failed.strip() == "RuntimeError"
        device, queued = time.replace("(", " ").replace(")", " ").split()
        assert np.isnan(float(device)) and float(queued) > 0  # no stream of a GPU in a trace made here


SMALL, SHARED = Sizes(1, 70, 2, 2, 4, 3), Sizes(1, 70, 1, 2, 4, 3)
LEVELS = LogLinearCase("log_linear_attention", "random", SHARED._replace(time=24), 4)
# A case, what a kernel of it has wrong, and how many quantities there are.
WRONG = (
    (selfcheck_attention, AttentionCase("softmax_attention", SHARED, documents="documents"), "o", 4),
    (selfcheck_attention, AttentionCase("block_sparse_attention", SHARED, 2), "dselected", 5),
    pytest.param(
        selfcheck_attention, AttentionCase("block_sparse_attention", SHARED, 2, before=70), "o", 1, marks=SLOW
    ),
    (selfcheck_attention, AttentionCase("softmax_attention", SHARED._replace(time=1), before=70), "o", 1),
    pytest.param(selfcheck_log_linear, LEVELS, "dlevel_weights", 7, marks=SLOW),
    (selfcheck_log_linear, LEVELS._replace(before=7, documents="padding"), "dlevel_weights", 8),
    pytest.param(selfcheck_log_linear, LEVELS._replace(op="log_linear_delta_rule", before=7), "derase", 9, marks=SLOW),
    (selfcheck_routed, RoutedCase("any number", SMALL), "dkeep", 9),
    pytest.param(selfcheck_routed, RoutedCase("none kept", SMALL, before=7), "dstart", 11, marks=SLOW),
    (selfcheck_conv, ConvCase(2, 70, 3, documents="padding", state=True), "dstate", 5),
    (selfcheck_conv, ConvCase(1, 70, 3, 2, None, bias=False), "dweight", 3),
)


@pytest.mark.parametrize("module, case, quantity, count", WRONG, ids=lambda x: getattr(x, "name", ""))
def test_an_operator_passes_where_it_is_right_and_fails_where_not(module, case, quantity, count, monkeypatch):
    honest = module.run

    def with_error(factor):
        def run(case, implementation, arguments, interpret=None):
            if implementation != "pallas":
                return honest(case, implementation, arguments)
            found = honest(case, "shifts" if module is selfcheck_conv else "chunked", arguments)
            return found | {quantity: found[quantity] * factor}

        monkeypatch.setattr(module, "run", run)
        return selfcheck.check(module, case)

    right = with_error(1)
    assert right.complaint is None and right.errors == right.beside and len(right.errors) == count
    assert all(error < (0.2 if name == "dselected" else 1e-2) for name, error in right.errors.items())
    assert with_error(1.5 if quantity == "dselected" else 1.05).complaint == f"beyond the bar: {quantity}"


def test_the_convolution_is_not_passed_for_want_of_a_kernel():
    """The operator itself would go on without one."""
    declined = selfcheck.check(selfcheck_conv, ConvCase(1, 70, 128)).declined
    assert declined is not None and declined.startswith("causal_conv: the GPU kernels need an NVIDIA Hopper GPU")


def distinct(cases):
    """Of cases that run the same programs, one."""
    kept = {}
    for case in cases:
        fields = [f for f in case._fields if f not in ("inputs", "kept")]
        kept[tuple(x is None if f == "documents" else x for f in fields for x in [getattr(case, f)])] = case
    return kept.values()


def test_times_of_attention_are_a_table(capsys, monkeypatch):
    small = Sizes(1, 70, 1, 2, 4, 3)
    cases = [AttentionCase("softmax_attention", small), AttentionCase("softmax_attention", small, before=70)]
    monkeypatch.setattr(selfcheck_attention, "TIMED", cases)
    monkeypatch.setattr(selfcheck, "device_milliseconds", lambda run, *arguments: len(run(*arguments)))
    monkeypatch.setattr(selfcheck, "milliseconds", lambda run, *arguments: 1.0)
    selfcheck.print_times([selfcheck_attention])
    *_, forward, both, behind = capsys.readouterr().out.strip().splitlines()
    for row, count in ((forward, 1), (both, 4), (behind, 1)):  # "pallas" has no GPU here
        assert row.endswith(f"| NotImplementedError | {count:.3f} (1.000) |")
    assert ", forward+backward |" in both and "behind 70" in behind


@pytest.mark.slow
@pytest.mark.parametrize("module", selfcheck.MODULES, ids=lambda module: module.__name__)
def test_every_case_lowers_or_is_said_not_to_be_covered(module):
    declined = []
    for case in distinct(module.cases()):
        arguments = jax.eval_shape(lambda case=case: module.arguments_of(case))
        try:
            run = functools.partial(module.run, case, "pallas")
            assert mosaic_calls(lower_cuda(run, arguments)) > 0, case.name
        except NotImplementedError as reason:
            declined.append(f"{case.name}: {reason}")
    assert len(declined) == 2, declined  # each module has two of sizes that no kernel covers


@pytest.mark.slow
@pytest.mark.parametrize("module", selfcheck.MODULES, ids=lambda module: module.__name__)
def test_what_is_timed_lowers(module):
    found = []
    avals = jax.eval_shape(lambda: [found.append(timed) or timed.arguments for timed in module.timed()])
    assert len({timed.name for timed in found}) == len(found)
    for timed, arguments in zip(found, avals, strict=True):
        assert mosaic_calls(lower_cuda(timed.program("pallas"), *arguments)) > 0, timed.name


@pytest.mark.slow
def test_the_kernels_pass_in_the_interpreter():
    assert selfcheck.main(["--interpret"]) == 0
