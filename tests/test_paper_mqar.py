"""The recipes of the papers' recall figures: sizes, rates and layers as published, for every mixer and width."""

import jax
import jax.numpy as jnp
import pytest

from configs import paper_mqar
from efla_jax import train
from efla_jax.data.recall import Size
from efla_jax.layers import MIXERS
from efla_jax.train import settings
from experiments import sweep


def built(arg):
    """(config, dataset, shapes of the parameters)."""
    config = train.plain(paper_mqar.get_config(arg))
    dataset = settings.build_dataset(config)
    model = settings.build_model(config, dataset)
    settings.check_train(config["train"])
    return config, dataset, jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]


def count(params):
    return sum(leaf.size for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize("figure", paper_mqar.FIGURES)
def test_every_setting_of_a_figure_is_a_model(figure):
    arguments = paper_mqar.settings(figure)
    assert {argument.split("-")[1] for argument in arguments} == set(MIXERS)
    for argument in arguments[:: len(paper_mqar.WIDTHS[figure.split("_")[0]])]:
        config, dataset, params = built(argument)
        assert config["train"]["steps"] % dataset.steps_per_epoch == 0
        assert config["train"]["eval_every"] == dataset.steps_per_epoch
        assert "lm_head" not in params and params["embed"]["embedding"].shape[0] == 8192
        assert not any("mlp" in name for name in params["groups"]["block_0"])


def test_sizes_and_rates_are_the_published_ones():
    config, dataset, _ = built("zoology_256x16-delta_net-64")
    assert (config["data"]["batch_size"], config["train"]["steps"]) == (256, 64 * 391) and not dataset.task.fill
    assert dataset.task.train_sizes == dataset.task.test_sizes == (Size(256, 16),)
    config, dataset, _ = built("based-delta_net-64")
    assert (config["data"]["batch_size"], config["train"]["steps"]) == (256, 32 * (391 + 4 * 79)) and dataset.task.fill
    assert dataset.task.test_sizes == tuple(Size(*size) for size in paper_mqar.TEST)
    assert dataset.task.examples_of_sizes == (100_000, *[20_000] * 4)
    config, dataset, _ = built("log_linear-mamba2-16")
    assert [size.pairs for size in dataset.task.train_sizes] == [4, 8, 16, 32, 64] and dataset.lengths == (256,) * 5
    assert sum(dataset.task.examples_of_sizes) == 10_000 and config["train"]["stop_at"] == 0.99
    assert [round(1e6 * rate) for rate in paper_mqar.RATES["zoology"]] == [100, 464, 2154, 10000]
    assert [round(1e6 * rate) for rate in paper_mqar.RATES["based"]] == [1000, 3162, 10000, 31623]
    optim = {"weight_decay": 0.1, "decay": "all", "clip_norm": 0.0, "beta2": 0.999, "warmup_steps": 0}
    assert optim.items() <= config["optim"].items()


def test_states_of_the_log_linear_figure_are_of_one_size():
    """One head of width x width; a level per bit of 256 positions and the token itself."""
    for mixer in ("mamba2", "gated_delta_net", "delta_net", "efla"):
        config, dataset, _ = built(f"log_linear-{mixer}-32")
        assert settings.build_model(config, dataset).init_cache(1)[0].state.shape == (2, 1, 1, 32, 32)
    config, dataset, _ = built("log_linear-log_linear_mamba2-32")
    assert settings.build_model(config, dataset).init_cache(1)[0].state.states.shape == (2, 1, 1, 9, 32, 32)
    config, _, _ = built("based-log_linear_efla-64")
    assert config["model"]["mixer_options"]["log_linear_efla"]["levels"] == 11  # 1024 tokens are held out


def test_parameters_by_hand():
    """Embeddings and three norms; per layer q, k, v, o, three convolutions of 4 taps, beta, and the norm of a head."""
    _, _, params = built("based-delta_net-64")
    assert count(params) == 8192 * 64 + 2 * 64 + 2 * (2 * 64 + 4 * 64**2 + 3 * 4 * 64 + 2 * 64 + 32)
    _, _, hybrid = built("based_hybrid-delta_net-64")
    conv = 64**2 + 64 + 3 * 64 + 64
    assert count(hybrid) == count(params) - (4 * 64**2 + 3 * 4 * 64 + 2 * 64 + 32) + conv
    assert set(hybrid["groups"]["block_0"]["mixer"]) == {"x_conv", "z_proj"}


def test_the_sweep_is_the_log_linear_figure():
    own = paper_mqar.get_sweep()
    assert len(own["arguments"]) == 33 and own["grid"] == {
        "optim.learning_rate": paper_mqar.RATES["log"], "seed": (0, 1, 2),
    }  # fmt: skip
    assert len(sweep.crossed({name: list(map(str, values)) for name, values in own["grid"].items()})) == 12
    with pytest.raises(ValueError, match="'log_linear-mamba2-48' is not one of"):
        paper_mqar.get_config("log_linear-mamba2-48")
