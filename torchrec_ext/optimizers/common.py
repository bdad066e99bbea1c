"""Hyperparameters that several optimizers share."""

from torchrec_ext.optimizers.spec import Hyperparameter

LEARNING_RATE = Hyperparameter("learning_rate", default=0.01, minimum=0.0, aliases=("lr",))
EPS = Hyperparameter("eps", default=1e-8, minimum=0.0)
INITIAL_ACCUMULATOR_VALUE = Hyperparameter(
    "initial_accumulator_value", default=0.0, minimum=0.0, in_kernel=False
)
