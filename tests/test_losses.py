"""What holds for every loss: labels of any type, batches nobody wishes for, copies, and InfoNCE at full size."""
import copy
import math

import pytest
import torch
import torch.nn.functional as F

from facenb.losses import InfoNCE, info_nce
from facenb.margin import ArcFace
from facenb.registry import LOSSES, build_loss, loss_settings

NAMES = [*LOSSES, "cosface+supcon", "adaface+triplet"]
PEOPLE, DIM = 6, 8


def batch(name, seed=0):
    "Two images of each of six people; CoReFace sees all twice"
    z = torch.randn(2 * PEOPLE, DIM, generator=torch.Generator().manual_seed(seed))
    labels = torch.arange(PEOPLE).repeat_interleave(2)
    return (torch.cat([z, z + 0.1]), labels.repeat(2)) if name == "coreface" else (z, labels)


def build(name):
    torch.manual_seed(0)
    return build_loss(name, PEOPLE, DIM, **loss_settings(name, demo=True))


def run(loss, z, labels):
    z = z.clone().requires_grad_()
    value, seen = loss(z, labels)
    value.backward()
    return value.detach(), z.grad, seen


@pytest.mark.parametrize("kind", [torch.uint8, torch.int8, torch.int16, torch.int32])
@pytest.mark.parametrize("name", NAMES)
def test_labels_of_any_whole_type(name, kind):
    z, labels = batch(name)
    assert torch.equal(build(name)(z, labels.to(kind))[0], build(name)(z, labels)[0])


def test_small_label_types_with_many_people():
    head, z = ArcFace(300, DIM), torch.randn(3, DIM)
    for labels in ([0, 50, 200], [0, 1, 255]):
        assert head(z, torch.tensor(labels, dtype=torch.uint8))[0].isfinite()
    with pytest.raises(ValueError, match="label 300 in row 1"):
        head(z, torch.tensor([0, 300, 1], dtype=torch.int16))


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_that_is_no_number_leaves_no_trace(name):
    (z, labels), loss = batch(name), build(name)
    first = copy.deepcopy(loss)
    run(first, z, labels)
    broken = z.clone()
    broken[1, 2] = math.nan
    assert run(loss, broken, labels)[0].isnan()
    loss.zero_grad()
    value, gradient, _ = run(loss, z, labels)
    assert value.isfinite() and gradient.isfinite().all()
    if name not in ("sphereface",):  # it counts batches
        assert torch.allclose(value, build(name)(z, labels)[0])


@pytest.mark.parametrize("name", NAMES)
def test_zero_embeddings_copies_and_opposites(name):
    z, labels = batch(name)
    zero = z.clone()
    zero[3] = 0
    value, gradient, seen = run(build(name), zero, labels)
    assert value.isfinite() and gradient.isfinite().all() and seen["zeros"] == 1
    for other in (torch.ones_like(z), z * torch.tensor([1.0, -1.0]).repeat(len(z) // 2)[:, None], 1e4 * z, 1e-4 * z):
        for kind in (torch.float32, torch.bfloat16, torch.float16):
            if kind == torch.float16 and other.abs().max() > 6e4:
                continue
            value, gradient, _ = run(build(name), other.to(kind), labels)
            assert value.isfinite(), (kind, value)
            assert kind != torch.float32 or gradient.isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_twice_scaled_and_accumulated(name):
    z, labels = batch(name)
    value, gradient, _ = run(build(name), z, labels)
    again = z.clone().requires_grad_()
    loss = build(name)(again, labels)[0]
    (1024 * loss).backward(retain_graph=True)
    assert torch.allclose(again.grad, 1024 * gradient, rtol=1e-5, atol=1e-6)
    loss.backward()
    assert torch.allclose(again.grad, 1025 * gradient, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        assert torch.allclose(build(name)(z, labels)[0], value)


@pytest.mark.parametrize("name", NAMES)
def test_state_goes_round(name):
    (z, labels), loss = batch(name), build(name)
    run(loss, z, labels)
    other = build(name)
    for p in other.parameters():
        p.data += 1
    other.load_state_dict(loss.state_dict())
    assert torch.equal(other.eval()(z, labels)[0], loss.eval()(z, labels)[0])
    assert torch.equal(copy.deepcopy(loss)(z, labels)[0], loss(z, labels)[0])


@pytest.mark.parametrize("name", NAMES)
def test_diagnostics_are_detached_numbers(name):
    seen = build(name)(*batch(name))[1]
    assert seen and all(value.ndim == 0 and not value.requires_grad for value in seen.values())
    if "negatives" in seen and name not in ("npair", "siglip") and "triplet" not in name:
        assert seen["negatives"] == 2 * PEOPLE - 2


def test_arcface_stays_exact_close_to_its_centre():
    "There an angle is little more than the rounding of a length"
    draw = torch.Generator().manual_seed(0)
    weight, labels = torch.randn(500, 64, generator=draw), torch.arange(64)
    aside = F.normalize(torch.randn(64, 64, generator=draw))
    for angle, most in [(0.1, 2e-6), (0.03, 5e-6), (0.01, 2e-5)]:
        centre = F.normalize(weight[labels])
        z = math.cos(angle) * centre + math.sin(angle) * F.normalize(aside - (aside * centre).sum(1, keepdim=True) * centre)
        gradients = []
        for kind in (torch.float32, torch.float64):
            head = ArcFace(500, 64, 16, 0.2).to(kind)
            head.weight.data = weight.to(kind)
            gradients.append(run(head, z.to(kind), labels)[1].double())
        assert (gradients[0] - gradients[1]).norm() < most * gradients[1].norm(), angle


def full_matrix(z, temperature):
    logits = (z @ z.T / temperature).masked_fill(torch.eye(len(z), dtype=torch.bool), -math.inf)
    return F.cross_entropy(logits, torch.arange(len(z)) ^ 1)


@pytest.mark.parametrize("temperature", [2.0, 0.3, 0.1, 0.06, 0.045, 0.035, 0.031])
def test_info_nce_keeps_its_gradient_where_the_full_matrix_loses_it(temperature):
    draw = torch.Generator().manual_seed(0)
    anchors = F.normalize(torch.randn(700, 256, generator=draw))
    partners = F.normalize(anchors + 0.2 * F.normalize(torch.randn(700, 256, generator=draw)))
    z = torch.stack([anchors, partners], 1).flatten(0, 1)

    def gradient(loss, z):
        z = z.clone().requires_grad_()
        value = loss(z, temperature)
        value.backward()
        return value.item(), z.grad.double()
    value, exact = gradient(info_nce, z.double())
    relative = lambda found: ((found - exact).norm() / exact.norm()).item()
    assert 1e-11 < value < 10
    assert relative(gradient(info_nce, z)[1]) < 1e-5
    if value < 1e-8:
        assert relative(gradient(full_matrix, z)[1]) > 0.1


def test_temperature_may_be_any_tensor_of_one_number():
    z = F.normalize(torch.randn(8, 4, dtype=torch.float64))
    for shape in ((), (1,), (1, 1)):
        tau = torch.full(shape, 0.2, dtype=torch.float64, requires_grad=True)
        info_nce(z, tau).backward()
        assert tau.grad.shape == shape and tau.grad.abs().sum() > 1e-3


def test_info_nce_in_half_precision_is_a_module_like_others():
    z, labels = batch("infonce")
    assert InfoNCE(0.2, learn_temperature=True).half()(z.half(), labels)[0].dtype == torch.float32
    assert InfoNCE(0.2).bfloat16()(z, labels)[0].isfinite()


@pytest.mark.parametrize("z, identities, words", [
    (torch.ones(4, 0), None, "partners stand in rows"), (torch.ones(4, 2, dtype=torch.long), None, "partners stand in rows"),
    (torch.ones(4, 2), torch.tensor([0.0, 0, 1, 1]), "whole numbers"), (torch.ones(4, 2), torch.tensor([0, 0, 1]), "as many identities"),
])
def test_info_nce_names_what_is_wrong(z, identities, words):
    with pytest.raises(ValueError, match=words):
        info_nce(z, 0.1, identities)


def test_info_nce_of_32768_images_in_the_memory_it_states():
    "Forward and backward within 3 N d floats + 16 MiB; the full matrix alone would take 4,096 MiB"
    from facenb.bench import fresh
    count, dim = 32_768, 512
    _, _, memory = fresh("""
import torch, torch.nn.functional as F
from facenb.losses import info_nce
count, dim = map(int, sys.argv[1:])
info_nce(F.normalize(torch.randn(600, dim)).requires_grad_()).backward()
z = F.normalize(torch.randn(count, dim)).requires_grad_()
""", "info_nce(z).backward()\nassert z.grad.isfinite().all()", count, dim)
    assert count * dim * 4 / 2**20 < memory < 3 * count * dim * 4 / 2**20 + 16
