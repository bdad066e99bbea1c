import enum
from typing import Any, TypedDict

class OptimType(enum.Enum):
    EXACT_SGD = "exact_sgd"
    EXACT_ADAGRAD = "exact_adagrad"
    EXACT_ROWWISE_ADAGRAD = "exact_row_wise_adagrad"
    FTRL = "ftrl"
    ADAM = "adam"
    PARTIAL_ROWWISE_ADAM = "partial_row_wise_adam"
    LAMB = "lamb"

    @property
    def counterpart(self) -> Any: ...

class RegisteredOptimizer(TypedDict):
    hyperparameters: tuple[str, ...]
    states: tuple[tuple[str, bool], ...]

device_layout_sizes: tuple[int, int]

def registered_optimizers() -> dict[str, RegisteredOptimizer]: ...
def build_information() -> dict[str, str]: ...
def set_cpu_capability(name: str) -> None: ...
