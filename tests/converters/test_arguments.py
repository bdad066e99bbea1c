"""What converters refuse, and how they say it."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from torchrec_ext import converters
from torchrec_ext.optimizers import HyperparameterError

STATES = {"linear": torch.ones(3, 4), "accum": torch.full((3, 4), 2.0)}
OP = "'s op"
TO = {
    "TensorFlow": converters.to_tensorflow,
    "TensorFlow's op": converters.to_tensorflow_op,
    "HugeCTR": converters.to_hugectr,
    "Vowpal Wabbit": converters.to_vowpal_wabbit,
    "DynamicEmb": lambda states, given: converters.to_dynamicemb(states["linear"], states, given),
}
LACKS = {
    "TensorFlow": {"l21_reg": 0.1},
    "TensorFlow's op": {"l21_reg": 0.1},
    "DynamicEmb": {"l21_reg": 0.1, "l2_shrinkage_reg": 0.1},
    "HugeCTR": {
        "l21_reg": 0.1,
        "l2_shrinkage_reg": 0.1,
        "learning_rate_power": -0.7,
        "initial_accumulator_value": 0.1,
    },
}
LACKS["Vowpal Wabbit"] = LACKS["HugeCTR"]


@pytest.mark.parametrize(
    ("library", "name", "value"),
    [(library, name, value) for library, lacks in LACKS.items() for name, value in lacks.items()],
)
def test_what_a_library_cannot_express_is_refused(library: str, name: str, value: float) -> None:
    states = {key: state[:, :1] for key, state in STATES.items()}
    TO[library](states, {"learning_rate": 0.1})
    expected = f"FTRL: {name}={value!r} has no counterpart in {library.removesuffix(OP)}; "
    with pytest.raises(HyperparameterError) as refused:
        TO[library](states, {"learning_rate": 0.1, name: value})
    assert str(refused.value).startswith(expected)


@pytest.mark.parametrize("library", TO)
def test_rows_that_wait_for_their_initial_weight_are_refused(library: str) -> None:
    given = {"learning_rate": 0.1, "ftrl_beta": 1.0, "preserve_initial_weight": True}
    states = {key: state[:, :1].clone() for key, state in STATES.items()}
    TO[library](states, given)
    states["linear"][1] = -0.0
    with pytest.raises(ValueError, match="preserve_initial_weight=True .* 1 rows .* seed_new_rows"):
        TO[library](states, given)
    seeded = converters.seed_new_rows(torch.ones(3, 1), states, given)
    # -w * (beta + sqrt(accum)) / lr, by hand.
    assert float(seeded["linear"][1]) == pytest.approx(-(1 + 2**0.5) / 0.1)
    TO[library](seeded, given)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: converters.from_tensorflow(
                STATES["accum"], STATES["linear"], l2_regularization_strength=-1.0
            ),
            "FTRL: l2_regularization_strength=-1.0 is not legal",
        ),
        (
            lambda: converters.from_tensorflow(STATES["accum"], STATES["linear"], beta="1"),
            "FTRL: beta='1' is not legal",
        ),
        (
            lambda: converters.from_hugectr(STATES["accum"], STATES["linear"], lr=0.0),
            "FTRL: lr=0.0 is not legal",
        ),
        (
            lambda: converters.from_vowpal_wabbit(
                STATES["linear"][0], STATES["accum"][0], ftrl_alpha=float("nan")
            ),
            "FTRL: ftrl_alpha=nan is not legal",
        ),
        (
            lambda: converters.from_dynamicemb(
                torch.ones(3, 12), learning_rate=0.1, learning_rate_power=0.5
            ),
            "FTRL: learning_rate_power=0.5 is not legal",
        ),
    ],
)
def test_hyperparameters_are_refused_by_the_librarys_name(call, text: str) -> None:
    with pytest.raises(HyperparameterError) as refused:
        call()
    assert str(refused.value).startswith(text)


@pytest.mark.parametrize(
    ("n", "z", "error", "text"),
    [
        ([[1.0]] * 3 + ["x"], np.ones((4, 1)), TypeError, "n is a list; give a numpy array"),
        (
            np.ones((3, 4), dtype=np.int64),
            np.ones((3, 4)),
            TypeError,
            "n has the dtype torch.int64",
        ),
        (np.ones(3), np.ones(3), ValueError, r"z has the shape \[3\].*reshape\(-1, 1\)"),
        (np.ones((3, 4)), np.ones((4, 3)), ValueError, r"z has the shape \[4, 3\], n \[3, 4\]"),
        (np.full((1, 1), -0.5), np.ones((1, 1)), ValueError, r"n has the value -0.5.*exchanged"),
        (np.full((1, 1), np.inf), np.ones((1, 1)), ValueError, "n has values that are NaN"),
        (np.ones((1, 1)), np.full((1, 1), 1e300), ValueError, "z has values .* too large"),
    ],
)
def test_arrays_that_are_no_states_are_refused(n, z, error: type, text: str) -> None:
    with pytest.raises(error, match=text):
        converters.from_hugectr(n, z, lr=0.1)


def test_shapes_of_single_libraries_are_checked() -> None:
    given = {"learning_rate": 0.1}
    with pytest.raises(ValueError, match=r"values has 10 columns; it must have 3 \* D"):
        converters.from_dynamicemb(torch.ones(2, 10), learning_rate=0.1)
    with pytest.raises(ValueError, match=r"z has the shape \[2, 2\]; it must be \[rows\]"):
        converters.from_vowpal_wabbit(torch.ones(2, 2), torch.ones(2, 2))
    with pytest.raises(ValueError, match=r"has the shape \[3, 4\], but Vowpal Wabbit has one weig"):
        converters.to_vowpal_wabbit(STATES, given)
    with pytest.raises(ValueError, match=r"weights has the shape \[2, 4\], states\['linear'\]"):
        converters.to_dynamicemb(torch.ones(2, 4), STATES, given)
    with pytest.raises(ValueError, match=r"states has \['accum'\]; give \['linear', 'accum'\]"):
        converters.to_hugectr({"accum": STATES["accum"]}, given)
    large = {"linear": torch.full((3, 4), 1e6), "accum": STATES["accum"]}
    with pytest.raises(ValueError, match=r"dtype=torch.int32 is not legal; give one of torch\.f"):
        converters.to_dynamicemb(torch.ones(3, 4), STATES, given, torch.int32)
    with pytest.raises(ValueError, match="dtype=torch.float16 cannot hold"):
        converters.to_dynamicemb(torch.ones(3, 4), large, given, torch.float16)


def test_hugectrs_epsilon_is_one_of_two() -> None:
    with pytest.raises(ValueError, match=r"epsilon=1e-06 is not legal; it must be FLT_EPSILON"):
        converters.from_hugectr(np.ones((1, 1)), np.ones((1, 1)), lr=0.1, epsilon=1e-6)
    with pytest.raises(ValueError, match="epsilon=None is not legal"):
        converters.to_hugectr(STATES, {}, epsilon=None)
    with pytest.raises(HyperparameterError, match="initial_accumulator_value=1.1.*e-07 has no cou"):
        converters.to_hugectr(STATES, {"initial_accumulator_value": 2.0**-23}, epsilon=0.0)


def test_rows_of_dynamicemb_are_embedding_linear_accum() -> None:
    values = torch.arange(12.0).view(2, 6)
    weights, states, given = converters.from_dynamicemb(values, learning_rate=0.1, l2_reg=0.5)
    assert weights.tolist() == [[0.0, 1.0], [6.0, 7.0]]
    assert states["linear"].tolist() == [[2.0, 3.0], [8.0, 9.0]]
    assert states["accum"].tolist() == [[4.0, 5.0], [10.0, 11.0]]
    halves, _ = converters.to_dynamicemb(weights, states, given, torch.float16)
    assert halves.dtype == torch.float16 and torch.equal(halves.float(), values)


@pytest.mark.parametrize("convert", [converters.from_hugectr, converters.from_tensorflow])
def test_results_are_copies_without_marks_of_new_rows(convert) -> None:
    z = np.array([[-0.0, 1.0]], dtype=np.float32)
    n = np.array([[0.0, 2.0]], dtype=np.float32)
    learning_rate = {"lr": 0.1} if convert is converters.from_hugectr else {}
    states, _ = convert(n, z, **learning_rate)
    assert not bool(states["linear"].signbit().any())
    states["linear"] += 1.0
    states["accum"] += 1.0
    assert z.tolist() == [[0.0, 1.0]] and n.tolist() == [[0.0, 2.0]]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_float_dtypes_become_float32(dtype: type) -> None:
    states, _ = converters.from_hugectr(np.ones((2, 4), dtype), np.ones((2, 4), dtype), lr=0.1)
    assert all(state.dtype == torch.float32 for state in states.values())


@pytest.mark.filterwarnings("error")
def test_read_only_arrays_are_read() -> None:
    array = np.ones((2, 4), np.float32)
    array.setflags(write=False)
    states, _ = converters.from_hugectr(array, array, lr=0.1, epsilon=0.0)
    assert states["linear"].add_(1.0).eq(2.0).all() and (array == 1.0).all()


def test_importing_the_converters_needs_neither_fbgemm_nor_torchrec() -> None:
    code = (
        "import sys, torchrec_ext.converters;"
        "print([m for m in sys.modules if m.split('.')[0] in ('torchrec', 'fbgemm_gpu')])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
