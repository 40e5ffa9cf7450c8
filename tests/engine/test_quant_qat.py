"""Fine-tuning through rounded weights: the gradient goes straight through, and the rounded model gets better."""

from __future__ import annotations

import pytest
import torch
from test_models_logits import VOCAB, tiny_model
from torch import nn

from headrace.base.errors import HeadraceError, InvalidInput
from headrace.engine.quant.formats import form
from headrace.engine.quant.policy import Policy
from headrace.engine.quant.qat import RoundedLinear, fine_tune, prepare, restore, straight_through


def language(count, seed):
    """Batches in which each token determines the next."""
    generator = torch.Generator().manual_seed(seed)
    successor = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))
    for _ in range(count):
        tokens = [torch.randint(0, VOCAB, (8,), generator=generator)]
        for _ in range(15):
            tokens.append(successor[tokens[-1]])
        yield torch.stack(tokens, 1)


def loss(model, batch):
    return model(batch, labels=batch).loss


def test_the_gradient_is_that_of_the_unrounded_weight():
    weight = torch.randn(8, 64, requires_grad=True)
    x, f = torch.randn(5, 64), form("int4_g32")
    y = nn.functional.linear(x, straight_through(weight, f))
    torch.testing.assert_close(y, x @ f.quantize(weight).dequantize().t())
    y.sum().backward()
    torch.testing.assert_close(weight.grad, x.sum(0).expand(8, 64))


def test_fine_tuning_recovers_what_rounding_lost(tmp_path):
    model, _ = tiny_model(tmp_path, "llama", num_hidden_layers=2)
    f = form("int4_g64")
    fine_tune(model, language(60, seed=2), loss, learning_rate=3e-3)
    held = next(language(1, seed=9))

    def rounded_loss():
        names = prepare(model, f)
        with torch.no_grad():
            found = float(loss(model, held))
        restore(model)
        return found, names

    before, names = rounded_loss()
    assert len(names) == 14
    assert not any("lm_head" in name or "embed" in name for name in names)
    prepare(model, f)
    losses = fine_tune(model, language(60, seed=3), loss, learning_rate=1e-3)
    restore(model)
    after, _ = rounded_loss()
    assert after < before
    assert losses[-1] < losses[0]
    assert not any(isinstance(m, RoundedLinear) for m in model.modules())


def test_what_cannot_be_trained_is_refused():
    with pytest.raises(InvalidInput, match="no linear layer"):
        prepare(nn.Sequential(nn.Linear(4, 4)), form("int8"), Policy(modules=("re:.*",)))
    model = nn.Linear(4, 4)
    with pytest.raises(HeadraceError, match="step 0"):
        fine_tune(model, [torch.ones(1, 4)], lambda m, b: m(b).sum() * float("nan"))
