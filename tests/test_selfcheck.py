"""The check that users run on their GPU: what it calls wrong, what it survives, and what it covers."""

import importlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from efla_jax import selfcheck, selfcheck_attention, selfcheck_cases, selfcheck_log_linear
from efla_jax.ops.chunked import chunked
from efla_jax.selfcheck_attention import AttentionCase
from efla_jax.selfcheck_cases import Case, Sizes
from efla_jax.selfcheck_log_linear import LogLinearCase
from tests.lowering import lower_cuda, mosaic_calls

TINY = Sizes(1, 24, 1, 2, 4, 3)
CASE = Case("delta_rule", "random", TINY)
SLOW = pytest.mark.slow


@pytest.fixture
def kernel(monkeypatch):
    """kernel(function): what "pallas" is for both operators, instead of a GPU's programs."""

    def replace(function):
        for op in ("delta_rule", "linear_attention"):
            monkeypatch.setitem(importlib.import_module(f"efla_jax.ops.{op}").TABLE, "pallas", function)

    selfcheck.program.cache_clear()
    yield replace
    selfcheck.program.cache_clear()


def failing(error):
    def function(x, chunk_size):
        raise error

    return function


@pytest.mark.parametrize("op", ("delta_rule", "linear_attention"))
@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
def test_a_right_kernel_passes(kernel, op, dtype, monkeypatch):
    kernel(chunked)
    monkeypatch.setitem(selfcheck.FLOOR, "float32", 0.0)
    monkeypatch.setitem(selfcheck.BAR, "float32", 2.0)
    # Where key heads are shared, "chunked" is measured with a copy of the key for every value head.
    result = selfcheck.check(Case(op, "random", TINY._replace(key_heads=2), "documents", dtype))
    assert result.complaint is None and result.declined is None
    assert result.errors == result.chunked and max(result.errors.values()) < 1e-2
    assert ("derase" in result.errors) == (op == "delta_rule")


def test_a_wrong_output_and_its_gradients_fail(kernel):
    kernel(lambda x, size: (chunked(x, size)[0] * 1.02, chunked(x, size)[1]))
    complaint = selfcheck.check(CASE).complaint
    assert complaint is not None and complaint.startswith("beyond the bar: o, ")


def test_a_wrong_gradient_alone_fails(kernel):
    @jax.custom_jvp
    def same(x):
        return x

    same.defjvp(lambda primals, tangents: (primals[0], 1.05 * tangents[0]))
    kernel(lambda x, size: chunked(x._replace(log_decay=same(x.log_decay)), size))
    assert selfcheck.check(CASE).complaint == "beyond the bar: dlog_decay"


def test_what_is_not_a_number_fails(kernel):
    kernel(lambda x, size: (chunked(x, size)[0], chunked(x, size)[1] + jnp.nan))
    assert "state" in selfcheck.check(CASE).complaint


def test_other_bits_on_repetition_fail(monkeypatch):
    honest, count = selfcheck.program, itertools.count()

    def wavering(op, implementation, interpret=None):
        run = honest(op, "chunked" if implementation == "pallas" else implementation)
        last_bit = (1 + 2.0**-23 * next(count)) if implementation == "pallas" else 1
        return lambda *a: {n: x * (last_bit if n == "dinitial" else 1) for n, x in run(*a).items()}

    def twice(*arguments):
        def run(*given):
            return wavering(*arguments)(*given)

        return run

    monkeypatch.setattr(selfcheck, "program", twice)
    assert selfcheck.check(CASE).complaint == "another run gave other bits: dinitial"


def test_one_failure_does_not_hide_the_next_case(kernel, capsys):
    def function(x, size):
        if x.k.shape[-1] == 4:
            raise RuntimeError("ptxas said no")
        return chunked(x, size)

    kernel(function)
    assert selfcheck.check_all([CASE, CASE._replace(sizes=TINY._replace(key_dim=5))]) == 1
    text = capsys.readouterr().out
    assert "FAILED      | delta_rule, random, B1 T24 G1 H2 K4 V3" in text and "RuntimeError: ptxas said no" in text
    assert "ok          | delta_rule, random, B1 T24 G1 H2 K5 V3" in text and "2 cases, 2 covered, 1 failed" in text


def test_what_is_declined_is_no_failure_unless_everything_is(kernel, capsys):
    kernel(failing(NotImplementedError("not this size")))
    assert selfcheck.check(CASE).declined == "not this size"
    assert selfcheck.check_all([CASE]) == 1
    assert "not covered | delta_rule" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", ([], ["--times"], ["--interpret", "--only=no such case"]))
def test_without_a_gpu_or_a_case_the_status_is_2(arguments, capsys):
    assert selfcheck.main(arguments) == 2
    message = capsys.readouterr().err
    assert ("need an NVIDIA Hopper GPU" in message) == ("--interpret" not in arguments)


def test_cases_are_awkward():
    found = selfcheck.cases()
    assert len({case.name for case in found}) == len(found)
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
    plain, other = (selfcheck.draw(CASE._replace(inputs=name))[0] for name in ("random", inputs))
    assert any(not np.array_equal(a, b) for a, b in zip(plain, other, strict=True))
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in other)


def test_documents_and_padding_stand_where_they_hurt():
    case = CASE._replace(sizes=TINY._replace(batch=2, time=200))
    documents = np.asarray(selfcheck.segment_ids(case._replace(documents="documents")))
    assert documents.min() > 0 and documents[0, 63] != documents[0, 64]
    lengths = [len(list(group)) for _, group in itertools.groupby(documents[1])]
    assert len(lengths) > 2 and np.array_equal(np.sort(documents[1]), documents[1])
    padding = np.asarray(selfcheck.segment_ids(case._replace(documents="padding")))
    assert not padding[:, 0].any() and not padding[:, -1].any() and 0 < (padding[:, 30:150] == 0).mean() < 0.5


def test_times_go_on_where_one_implementation_fails(kernel, capsys, monkeypatch):
    kernel(failing(RuntimeError("out of memory")))
    monkeypatch.setattr(selfcheck, "TIMED", [("delta_rule", TINY)])
    milliseconds = selfcheck.milliseconds
    monkeypatch.setattr(selfcheck, "milliseconds", lambda *a: milliseconds(*a, launches=1, repeats=1))
    selfcheck.print_times()
    *_, forward, both = capsys.readouterr().out.strip().splitlines()
    for name, row in (("forward", forward), ("forward+backward", both)):
        *_, measured, failed, time, _ = row.split(" | ".strip())
        assert (measured.strip(), failed.strip()) == (name, "RuntimeError")
        device, queued = time.replace("(", " ").replace(")", " ").split()
        assert np.isnan(float(device)) and float(queued) > 0  # no stream of a GPU in a trace made here


@pytest.mark.parametrize(
    "case",
    (
        AttentionCase("softmax_attention", Sizes(1, 70, 1, 2, 4, 3), documents="documents"),
        AttentionCase("block_sparse_attention", Sizes(1, 70, 1, 2, 4, 3), 2),
        pytest.param(AttentionCase("block_sparse_attention", Sizes(1, 3, 1, 2, 4, 3), 2, before=70), marks=SLOW),
        AttentionCase("softmax_attention", Sizes(1, 1, 1, 2, 4, 3), before=70),
    ),
    ids=str,
)
def test_attention_passes_where_it_is_right_and_fails_where_not(case, monkeypatch):
    honest = selfcheck_attention.program

    def with_error(factor):
        def program(op, implementation, gradients):
            run = honest(op, "chunked", gradients)
            factors = {"o": factor} if implementation == "pallas" else {}
            return lambda *a: {k: x * factors.get(k, 1) for k, x in run(*a).items()}

        monkeypatch.setattr(selfcheck_attention, "program", program)
        return selfcheck.check(case)

    right = with_error(1)
    assert right.complaint is None and right.errors == right.chunked
    assert all(error < (0.2 if name == "dselected" else 1e-2) for name, error in right.errors.items())
    assert len(right.errors) == (1 if case.before else 5 if case.op == "block_sparse_attention" else 4)
    assert with_error(1.05).complaint == "beyond the bar: o"


@pytest.mark.parametrize("op", ("log_linear_attention", "log_linear_delta_rule"))
@pytest.mark.parametrize("before", (pytest.param(0, marks=SLOW), 7))
def test_a_log_linear_operator_passes_where_it_is_right_and_fails_where_not(op, before, monkeypatch):
    case = LogLinearCase(op, "random", Sizes(2, 24, 1, 2, 4, 3), 4, "padding" if before else None, before)
    honest = selfcheck_log_linear.program

    def with_error(factor):
        def program(op, implementation, prefix):
            run = honest(op, "chunked" if implementation == "pallas" else implementation, prefix)
            factors = {"dlevel_weights": factor} if implementation == "pallas" else {}
            return lambda *a: {k: x * factors.get(k, 1) for k, x in run(*a).items()}

        monkeypatch.setattr(selfcheck_log_linear, "program", program)
        return selfcheck.check(case)

    right = with_error(1)
    assert right.complaint is None and right.errors == right.chunked and max(right.errors.values()) < 1e-2
    assert len(right.errors) == len(selfcheck_log_linear.NAMES) - (op == "log_linear_attention") - (before == 0)
    assert with_error(1.05).complaint == "beyond the bar: dlevel_weights"


@pytest.mark.slow
def test_every_case_of_the_log_linear_operators_lowers():
    declined = []
    for case in selfcheck_log_linear.cases():
        given = jax.eval_shape(lambda case=case: selfcheck_log_linear.arguments_of(case))
        run = selfcheck_log_linear.program(case.op, "pallas", case.before > 0)
        try:
            assert mosaic_calls(lower_cuda(run, given, selfcheck_log_linear.ids_of(case))) > 0, case.name
        except NotImplementedError:
            declined.append(case)
    assert not [case for case in declined if case.op == "log_linear_attention" and case.sizes.key_dim != 32], declined


def test_times_of_attention_are_a_table(capsys, monkeypatch):
    small = Sizes(1, 70, 1, 2, 4, 3)
    cases = [AttentionCase("softmax_attention", small), AttentionCase("softmax_attention", small, before=70)]
    monkeypatch.setattr(selfcheck_attention, "TIMED", cases)
    monkeypatch.setattr(selfcheck, "device_milliseconds", lambda run, *arguments: len(run(*arguments)))
    selfcheck.print_attention_times()
    *_, forward, both, behind = capsys.readouterr().out.strip().splitlines()
    for row, count in ((forward, 1), (both, 4), (behind, 1)):  # "pallas" has no GPU here
        assert row.endswith(f"| NotImplementedError | {count:.3f} |")
    assert "| forward+backward |" in both and "behind 70" in behind


@pytest.mark.slow
def test_every_case_of_attention_lowers():
    declined = []
    for case in selfcheck_attention.cases():
        given = jax.eval_shape(lambda case=case: selfcheck_attention.draw(case))
        run = selfcheck_attention.program(case.op, "pallas", not case.before)
        try:
            assert mosaic_calls(lower_cuda(run, given[0], selfcheck_attention.ids_of(case), given[1])) > 0, case.name
        except NotImplementedError:
            declined.append(case.sizes.key_dim)
    assert declined == [32, 32]


@pytest.mark.slow
def test_everything_that_runs_on_a_gpu_lowers_for_it():
    declined = []
    for case in {(c.op, c.sizes, c.documents is None, c.dtype): c for c in selfcheck.cases()}.values():
        arguments, cotangents = selfcheck.draw(case)
        try:
            run, ids = selfcheck.program(case.op, "pallas"), selfcheck.segment_ids(case)
            lowered = lower_cuda(run, arguments, ids, cotangents)
        except NotImplementedError:
            declined.append(case.name)
            continue
        assert mosaic_calls(lowered) > 0, case.name
    assert len(declined) == 2, declined  # K = V = 256 of either operator
    for op, sizes in selfcheck.TIMED:
        avals = jax.eval_shape(lambda sizes=sizes: selfcheck.timed_inputs(sizes))
        for name, run in selfcheck.passes(op, "pallas").items():
            assert mosaic_calls(lower_cuda(run, *avals)) > 0, (op, sizes, name)


@pytest.mark.slow
def test_the_kernels_pass_in_the_interpreter():
    assert selfcheck.main(["--interpret"]) == 0
