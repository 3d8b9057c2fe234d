import logging

import pytest
import torch
from torch import nn

from outrider_kernels import prepacked_linear
from outrider_kernels.prepacked_linear import PrepackedLinear, can_prepack, prepack_linears

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")


@needs_onednn
@pytest.mark.parametrize("shape", [(), (1,), (2,), (1, 7), (0,), (1, 0), (3, 65)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("features", "out"), [(1, 1), (33, 17), (64, 192)])
def test_a_prepacked_linear_equals_the_stock_one(shape: tuple[int, ...], bias: bool, features: int, out: int) -> None:
    torch.manual_seed(0)
    stock = nn.Linear(features, out, bias=bias)
    x = torch.randn(*shape, features)
    with torch.inference_mode():
        found = PrepackedLinear(stock.weight, stock.bias)(x)
        torch.testing.assert_close(found, stock(x), rtol=1e-4, atol=1e-5)


@needs_onednn
def test_every_linear_of_a_model_is_replaced_and_a_tied_embedding_still_embeds() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {"embed": nn.Embedding(11, 8), "mlp": nn.Sequential(nn.Linear(8, 8)), "head": nn.Linear(8, 11)}
    )
    model["head"].weight = model["embed"].weight
    x = torch.tensor([1, 2, 10])
    with torch.inference_mode():
        before = model["head"](model["mlp"](model["embed"](x)))
        assert prepack_linears(model) == 2
        assert not any(isinstance(module, nn.Linear) for module in model.modules())
        torch.testing.assert_close(model["head"](model["mlp"](model["embed"](x))), before, rtol=1e-4, atol=1e-5)


def test_other_number_formats_keep_the_stock_linear() -> None:
    assert not can_prepack(torch.zeros(4, 4, dtype=torch.bfloat16))
    model = nn.Sequential(nn.Linear(4, 4).to(torch.bfloat16))
    assert prepack_linears(model) == 0
    assert isinstance(model[0], nn.Linear)


def test_where_the_operators_are_missing_the_stock_linear_serves_and_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(*_: object) -> None:
        raise AttributeError("no such operator")

    monkeypatch.setattr(prepacked_linear, "PrepackedLinear", missing)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with caplog.at_level(logging.WARNING):
        assert prepack_linears(model) == 0
    assert len(caplog.records) == 1
    assert isinstance(model[1], nn.Linear)
