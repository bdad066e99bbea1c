"""OptimType is a real enum, apart from FBGEMM's, and agrees with its type stub."""

import ast
import copy
import enum
import pickle
from pathlib import Path

import pytest
from fbgemm_gpu.split_embedding_configs import EmbOptimType

import torchrec_ext
from torchrec_ext import OptimType


def test_is_a_real_enum() -> None:
    assert issubclass(OptimType, enum.Enum)
    assert OptimType("ftrl") is OptimType.FTRL is OptimType["FTRL"]
    for member in OptimType:
        assert pickle.loads(pickle.dumps(member)) is member
        assert copy.deepcopy(member) is member
        assert {member: 1}[member] == 1
        assert str(member) == member.value


def test_is_not_fbgemms() -> None:
    for member in OptimType:
        assert all(member != other for other in EmbOptimType)
        assert not isinstance(member, EmbOptimType)


def test_names_and_values_are_fbgemms_where_it_has_them() -> None:
    for member in OptimType:
        counterpart = member.counterpart
        if counterpart is not None:
            assert (counterpart.name, counterpart.value) == (member.name, member.value)
    assert OptimType.EXACT_ADAGRAD.counterpart is EmbOptimType.EXACT_ADAGRAD


def test_counterpart_follows_the_installed_fbgemm(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (OptimType.FTRL.counterpart is None) == ("FTRL" not in EmbOptimType.__members__)
    newer = enum.Enum("EmbOptimType", {"FTRL": "ftrl"})
    monkeypatch.setattr("fbgemm_gpu.split_embedding_configs.EmbOptimType", newer)
    assert OptimType.FTRL.counterpart is newer["FTRL"]


def test_type_stub_has_the_members() -> None:
    stub = ast.parse((Path(torchrec_ext.__file__).parent / "_C.pyi").read_text())
    (optim_type,) = [node for node in stub.body if getattr(node, "name", "") == "OptimType"]
    assert isinstance(optim_type, ast.ClassDef)
    members = [
        (node.targets[0].id, ast.literal_eval(node.value))
        for node in optim_type.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    ]
    assert members == [(member.name, member.value) for member in OptimType]
