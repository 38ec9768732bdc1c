"""The fused margin softmax on bad batches, at extremes, and in memory."""
import math
import subprocess
import sys

import pytest
import torch
from torch.nn import functional as F

from facenb.interface import unit_norm
from facenb.softmax import margin_softmax

CUTS = {"whole": {}, "rows": {"chunk_rows": 3}, "classes": {"chunk_rows": 4, "chunk_classes": 2}}


def arcface(own):
    return torch.cos(torch.arccos(own.clamp(-1 + 1e-12, 1 - 1e-12)) + 0.3)


def whole_matrix(z, weight, labels, target, scale):
    cosine = z @ unit_norm(weight).T
    own = cosine.gather(1, labels[:, None])
    logits = cosine.scatter(1, labels[:, None], target(own[:, 0])[:, None])
    return F.cross_entropy(scale * logits, labels), (cosine.argmax(1) == labels).double().mean()


def gradients(loss, *leaves):
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


def made_up(faces, people, dim, kind=torch.float64):
    draw = torch.Generator().manual_seed(0)
    z = unit_norm(torch.randn(faces, dim, generator=draw, dtype=kind)).requires_grad_()
    return z, torch.randn(people, dim, generator=draw, dtype=kind).requires_grad_()


@pytest.fixture(params=CUTS.values(), ids=CUTS)
def cut(request):
    return request.param


BATCHES = {"one person": [2] * 8, "all different": range(8), "pairs": [0, 0, 1, 1, 5, 5, 7, 7], "one face": [3]}


@pytest.mark.parametrize("labels", BATCHES.values(), ids=BATCHES)
def test_batches(labels, cut):
    labels = torch.tensor(list(labels))
    z, weight = made_up(len(labels), 9, 5)
    loss, seen = margin_softmax(z, weight, labels, arcface, 32, **cut)
    expected, hits = whole_matrix(z, weight, labels, arcface, 32)
    for a, b in zip(gradients(loss, z, weight), gradients(expected, z, weight)):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    assert seen["hits"] == hits


def test_duplicates_and_zeros(cut):
    "Images that are the same, centres that are the same, embeddings and centres of zeros"
    z, weight = made_up(8, 9, 5)
    labels = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
    with torch.no_grad():
        z[1], weight[4], weight[5], z[2] = z[0], weight[3], 0, 0
        z[6] = unit_norm(weight[3])
    loss, seen = margin_softmax(z, weight, labels, arcface, 32, **cut)
    found, expected = gradients(loss, z, weight), gradients(whole_matrix(z, weight, labels, arcface, 32)[0], z, weight)
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    assert (found[2][5] == 0).all()
    cosine = z @ unit_norm(weight).T
    own = cosine.gather(1, labels[:, None])
    nearest = (cosine.scatter(1, labels[:, None], -2) < own).all(1)
    assert not nearest[6] and seen["hits"] == nearest.double().mean()  # its centre has a twin


def test_nobody_else(cut):
    "Loss 0, with a gradient of zeros that is attached"
    z, weight = made_up(8, 1, 5)
    loss, seen = margin_softmax(z, weight, torch.zeros(8, dtype=torch.long), arcface, 32, **cut)
    assert loss == 0 and seen["hits"] == 1
    assert all((g == 0).all() for g in gradients(loss, z, weight)[1:])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["embedding", "centre", "own centre", "rule"])
def test_not_a_number_is_shown(bad, where, cut):
    z, weight = made_up(8, 9, 5)
    if where == "centre" and bad == math.inf:
        bad = -math.inf
    with torch.no_grad():
        if where == "embedding":
            z[5, 1] = bad
        if where.endswith("centre"):
            weight[8 if where == "centre" else 5, 1] = bad
    rule = (lambda own: own * math.nan) if where == "rule" else arcface
    loss, _ = margin_softmax(z, weight, torch.arange(8), rule, 32, **cut)
    assert loss.isnan()


@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("sign", [1, -1])
def test_ends_of_the_cosine(kind, sign, cut):
    "Finite at a cosine of one and minus one, also where rounding takes it past them"
    weight = torch.randn(64, 512, generator=torch.Generator().manual_seed(1)).requires_grad_()
    z = (sign * unit_norm(weight.detach())).to(kind).requires_grad_()
    loss, _ = margin_softmax(z, weight, torch.arange(64), arcface, 64, **cut)
    assert loss.dtype == torch.float32
    assert all(g.isfinite().all() for g in gradients(loss, z, weight))
    assert torch.autograd.grad(margin_softmax(z, weight, torch.arange(64), arcface, 64)[0], z)[0].dtype == kind


def test_no_overflow(cut):
    "Logits of thousands, either sign: each tile has its own maximum"
    z, weight = made_up(8, 9, 5, torch.float32)
    labels = torch.arange(8)
    loss, _ = margin_softmax(z, weight, labels, lambda own: own, 5000.0, **cut)
    expected = whole_matrix(z.double(), weight.double(), labels, lambda own: own, 5000.0)[0]
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=0)
    assert all(g.isfinite().all() for g in gradients(loss, z, weight))


@pytest.mark.parametrize("bonus", [-1, 0, 0.5, 1, 1.5])
def test_float32_at_every_level_of_the_loss(bonus):
    "Gradients within 5e-6 of float64, from a loss of tens to one of 1e-11"
    z, weight = made_up(40, 300, 64)
    labels, rule = torch.arange(40), lambda own: own + bonus
    exact = gradients(margin_softmax(z, weight, labels, rule, 24)[0], z, weight)
    leaves = [x.detach().float().requires_grad_() for x in (z, weight)]
    found = gradients(margin_softmax(*leaves, labels, rule, 24)[0], *leaves)
    for a, b in zip(found, exact):
        assert (a.double() - b).norm() <= 5e-6 * b.norm()
    torch.testing.assert_close(exact[0], whole_matrix(z, weight, labels, rule, 24)[0].detach(), rtol=1e-4, atol=1e-13)


def test_gradients_are_given_away_not_copied():
    "The gradient of the centres is the very memory that the forward pass filled; a kept graph still gives it anew"
    z, weight = made_up(8, 9, 5)
    loss, _ = margin_softmax(z, weight, torch.arange(8), arcface, 32)
    filled = loss.grad_fn.gradients[1].data_ptr()
    loss.backward(retain_graph=True)
    assert weight.grad.data_ptr() == filled
    first = weight.grad.clone()
    loss.backward()
    torch.testing.assert_close(weight.grad, 2 * first, rtol=0, atol=0)


MEMORY = """
import torch
from facenb.softmax import margin_softmax
def kib(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name))
torch.set_num_threads(1)
z, weight = torch.randn(1024, 64).requires_grad_(), torch.randn(40_000, 64).requires_grad_()
labels = torch.arange(1024)
def step(z, weight, labels, **cut):
    margin_softmax(z, weight, labels, lambda own: own - 0.2, 1.0, **cut)[0].backward()
step(z[:8], weight[:8], labels[:8])  # what torch loads once
weight.grad = z.grad = None
open("/proc/self/clear_refs", "w").write("5")
before = kib("VmRSS")
step(z, weight, labels{cut})
print((kib("VmHWM") - before) / 1024 - weight.nbytes / 2**20)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process is read from /proc")
@pytest.mark.parametrize("cut, most", [("", 115), (", chunk_rows=256, chunk_classes=4000", 20)])
def test_memory(cut, most):
    "MiB beyond the gradient of the centres; the whole matrix takes 156, several times"
    run = subprocess.run([sys.executable, "-c", MEMORY.format(cut=cut)], capture_output=True, text=True, check=True)
    assert float(run.stdout) < most
