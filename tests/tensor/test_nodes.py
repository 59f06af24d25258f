"""The ONNX project's node tests of every op that Hornito claims, on a device."""

from __future__ import annotations

import pytest

from hornito.errors import UnsupportedError
from hornito.importers.onnx_generic.table import handlers
from hornito.vk.device import Device
from tensor.node_tests import EXCEPTIONS, array, check, claimed, node_tests, ops_of, refused
from tensor.onnx_backend import HornitoBackend


@pytest.mark.gpu
@pytest.mark.parametrize("name", [n for n in claimed() if n not in EXCEPTIONS])
def test_node(name: str, device: Device) -> None:
    HornitoBackend.device = device
    test = node_tests()[name]
    prepared = HornitoBackend.prepare(test.model)
    for inputs, outputs in test.data_sets:
        results = prepared.run([array(value) for value in inputs])
        for expected, actual in zip(outputs, results, strict=True):
            check(array(expected), actual, test.rtol, test.atol)


def test_exceptions_are_few_and_real() -> None:
    assert set(EXCEPTIONS) <= set(node_tests())
    excepted = [name for name in EXCEPTIONS if name in claimed()]
    assert len(excepted) <= 0.02 * len(claimed())
    assert len(claimed()) >= 1080


@pytest.mark.gpu
@pytest.mark.parametrize("name", [n for n, why in EXCEPTIONS.items() if "computed" not in why])
def test_what_is_excepted_is_refused(name: str, device: Device) -> None:
    HornitoBackend.device = device
    test = node_tests()[name]
    with pytest.raises(UnsupportedError):
        HornitoBackend.prepare(test.model).run([array(v) for v in test.data_sets[0][0]])


@pytest.mark.gpu
def test_other_element_types_are_refused(device: Device) -> None:
    HornitoBackend.device = device
    assert len(refused()) > 50
    for name in refused():
        test = node_tests()[name]
        with pytest.raises(UnsupportedError, match="type"):
            HornitoBackend.prepare(test.model).run([array(v) for v in test.data_sets[0][0]])


def test_every_standard_op_has_a_node_test() -> None:
    tested = set().union(*(ops_of(node_tests()[name].model) for name in claimed()))
    own = {name for name in handlers() if not name.startswith("com.microsoft:")}
    assert own - tested <= {"SimplifiedLayerNormalization"}
