"""Training that changes its library half way goes on as if it had stayed."""

import numpy as np
import pytest
import torch

from torchrec_ext import converters
from torchrec_ext.converters.tables import load_table, read_table

from .libraries import CASES, LIBRARIES, float64, tensorflow_step
from .training import error, initial_weights, module_for, steps, train_here, train_there

STEPS = 6
TOLERANCE = 1e-6

cases = pytest.mark.parametrize(("name", "given"), CASES.values(), ids=CASES)


@cases
def test_there_then_here_then_there(name: str, given: dict) -> None:
    library = LIBRARIES[name]
    stays = library.start(initial_weights(), given)
    batches = steps(3 * STEPS)
    train_there(library, stays, given, batches[:STEPS])
    weights, states, hyperparameters = library.to_ours(stays, given)
    module = module_for(hyperparameters)
    load_table(module, "t", weights, states, hyperparameters)

    train_there(library, stays, given, batches[STEPS : 2 * STEPS])
    before = read_table(module, "t")[0]
    train_here(module, batches[STEPS : 2 * STEPS])
    weights, states = read_table(module, "t")
    assert error(weights, library.weights(stays)) <= TOLERANCE
    assert error(before, library.weights(stays)) > 1e-3  # the steps were no small ones

    moved, arguments = library.from_ours(weights, states, module.hyperparameters)
    train_there(library, stays, given, batches[2 * STEPS :])
    train_there(library, moved, arguments, batches[2 * STEPS :])
    assert error(library.weights(moved), library.weights(stays)) <= TOLERANCE


@cases
def test_round_trip_gives_what_was_there(name: str, given: dict) -> None:
    library = LIBRARIES[name]
    state = library.start(initial_weights(), given)
    train_there(library, state, given, steps(STEPS))
    state = {key: value.astype(np.float32).astype(np.float64) for key, value in state.items()}
    found, arguments = library.from_ours(*library.to_ours(state, given))
    assert arguments == pytest.approx(given, rel=1e-15, abs=0)
    assert found.keys() == state.keys()
    exact = {key for key in state if (name, key) != ("hugectr", "n")}
    assert all(np.array_equal(found[key], state[key]) for key in exact)
    # n + FLT_EPSILON and back is rounded twice.
    assert all(np.allclose(found[key], state[key], rtol=2e-7, atol=0) for key in state)


def test_small_accumulators_of_hugectr_keep_its_epsilon() -> None:
    # The root of n + 2**-23, in which n = 2**-23 has a share of one half.
    n = np.array([[2.0**-23, 0.0]])
    states, given = converters.from_hugectr(n, np.ones((1, 2)), lr=0.1)
    assert states["accum"].tolist() == [[2.0**-22, 2.0**-23]]
    assert given["initial_accumulator_value"] == 2.0**-23
    found, _ = converters.to_hugectr(states, given)
    assert found["n"].tolist() == [[2.0**-23, 0.0]]
    # Ours may start at 0, which HugeCTR takes for its own start.
    states["accum"][0, 0] = 0.0
    found, _ = converters.to_hugectr(states, {**given, "initial_accumulator_value": 0.0})
    assert found["n"].tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("power", [-0.5, -0.7])
def test_tensorflow_ops_with_linear_times_the_learning_rate(power: float) -> None:
    given = {
        "learning_rate": 0.1,
        "learning_rate_power": power,
        "l1_regularization_strength": 0.2,
        "l2_regularization_strength": 0.3,
        "l2_shrinkage_regularization_strength": 0.1,
        "beta": 0.0,
        "multiply_linear_by_lr": True,
    }
    library = LIBRARIES["tensorflow"]
    stays = library.start(initial_weights(), {"initial_accumulator_value": 0.1})
    batches = steps(3 * STEPS)
    train_there(library, stays, given, batches[:STEPS])
    states, hyperparameters = converters.from_tensorflow(
        stays["accumulator"], stays["linear"], **given
    )
    assert hyperparameters["multiply_linear_by_lr"] is True
    module = module_for({**hyperparameters, "ftrl_beta": 0.0})
    load_table(module, "t", stays["var"], states, hyperparameters)
    train_there(library, stays, given, batches[STEPS : 2 * STEPS])
    train_here(module, batches[STEPS : 2 * STEPS])
    weights, states = read_table(module, "t")
    assert error(weights, library.weights(stays)) <= TOLERANCE

    as_op, op = converters.to_tensorflow_op(states, module.hyperparameters)
    assert torch.equal(as_op["linear"], states["linear"])
    assert op["multiply_linear_by_lr"] is True
    # Keras has the plain form only.
    slots, keras = converters.to_tensorflow(states, module.hyperparameters)
    moved = float64(var=weights, **slots)
    train_there(library, stays, given, batches[2 * STEPS :])
    for rows, gradients in batches[2 * STEPS :]:
        tensorflow_step(moved, rows, gradients.astype(np.float64), keras)
    assert error(moved["var"], library.weights(stays)) <= TOLERANCE


def test_beta_is_folded_into_the_ops_l2() -> None:
    # By hand: l2 = .6 / 2 + 1 / (2 * .25) = 2.3; a quadratic of sqrt(4) / .25 + 2 * 2.3 = 12.6 is
    # (1 + 2) / .25 + .6.
    states = {"linear": torch.tensor([[3.0]]), "accum": torch.tensor([[4.0]])}
    ours = {"learning_rate": 0.25, "ftrl_beta": 1.0, "l2_reg": 0.6, "l1_reg": 0.5}
    _, op = converters.to_tensorflow_op(states, ours)
    assert op == {
        "lr": 0.25,
        "l1": 0.5,
        "l2": pytest.approx(2.3),
        "l2_shrinkage": 0.0,
        "lr_power": -0.5,
        "multiply_linear_by_lr": False,
    }
    _, keras = converters.to_tensorflow(states, ours)
    assert (keras["l2_regularization_strength"], keras["beta"]) == (0.3, 1.0)
    _, back = converters.from_tensorflow(
        states["accum"],
        states["linear"],
        learning_rate=op["lr"],
        l1_regularization_strength=op["l1"],
        l2_regularization_strength=op["l2"],
    )
    assert back["l2_reg"] == pytest.approx(0.6 + 1.0 / 0.25)


@pytest.mark.parametrize("l21_reg", [0.0, 0.05])
def test_seeded_rows_start_elsewhere_from_their_weights(l21_reg: float) -> None:
    given = {
        "learning_rate": 0.1,
        "ftrl_beta": 1.0,
        "l1_reg": 0.05,
        "initial_accumulator_value": 0.1,
        "preserve_initial_weight": True,
        "l21_reg": l21_reg,
    }
    module, once = module_for(given), module_for({**given, "preserve_initial_weight": False})
    for each in (module, once):
        each.split_embedding_weights()[0].copy_(torch.from_numpy(initial_weights()))
    first, second = steps(2)
    train_here(module, [first])
    weights, states = read_table(module, "t")
    seeded = converters.seed_new_rows(weights, states, module.hyperparameters)
    new = torch.ones(len(weights), dtype=torch.bool)
    new[first[0]] = False
    assert torch.equal(seeded["linear"][~new], states["linear"][~new])
    assert bool((seeded["linear"][new].abs() > 0.01).all())

    load_table(once, "t", weights, seeded, once.hyperparameters)
    train_here(module, [second])
    train_here(once, [second])
    assert error(read_table(once, "t")[0], read_table(module, "t")[0].double().numpy()) <= TOLERANCE
