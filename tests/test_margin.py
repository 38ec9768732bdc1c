"""Margin losses on bad input, at the ends of the cosine, in half precision, and against published numbers."""
import math

import numpy as np
import pytest
import torch

from facenb.interface import LOSSES
from facenb.margin import ArcFace, CombinedMargin, CosFace, SphereFace, add_margin, angle
from facenb.norms import AdaFace, MagFace
from facenb.subcentre import SubCentreArcFace

NAMES = ["softmax", "normface", "sphereface", "sphereface_r", "cosface", "arcface", "combined", "adaface",
         "magface", "subcentre"]
VARIANTS = {name: (name, {}) for name in NAMES} | {
    "arcface easy": ("arcface", {"easy_margin": True}),
    "arcface straight-through": ("arcface", {"straight_through": True}),
    "magface without easy margin": ("magface", {"easy_margin": False}),
    "combined times": ("combined", {"m1": 1.35, "m2": 0.2}),
    "sphereface three": ("sphereface", {"margin": 3, "ease": 0.0, "ease_floor": 0.0}),
}
RISING = {"arcface easy", "arcface straight-through", "magface"}  # documented: their logit rises somewhere
DETACHED = {"sphereface_r", "arcface straight-through"}  # gradient replaced by that of the cosine
every = pytest.mark.parametrize("variant", VARIANTS)


def build(variant, num_people, dim, **more):
    name, settings = VARIANTS[variant]
    return LOSSES[name].make(num_people, dim, **settings, **more)


def set_centres(head, rows):
    "Each row is the first centre of its person, the others of that person are opposite"
    spread = torch.stack([rows] + [-rows] * (head.sub_centres - 1), dim=1).flatten(0, 1)
    head.load_state_dict(head.state_dict() | {"weight": spread})
    return head


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def test_all_are_entered():
    assert {name for name in NAMES if name in LOSSES} == set(NAMES)
    for name in NAMES:
        entry = LOSSES[name]
        assert entry.family == "margin" and entry.has_centres() and "\n" not in entry.equation
        head = entry.make(30, 16, **entry.demo)
        assert head.weight.shape == (30 * head.sub_centres, 16) and head.num_people == 30 and head.scale > 0
        for setting, default in entry.settings().items():
            assert getattr(entry.make(30, 16), setting) == default
            assert setting in repr(head)


def test_published_settings():
    assert LOSSES["arcface"].settings() == {"scale": 64.0, "margin": 0.5, "easy_margin": False, "straight_through": False}
    assert LOSSES["cosface"].settings() == {"scale": 64.0, "margin": 0.35}
    assert LOSSES["sphereface_r"].settings() == {"scale": 30.0, "margin": 1.7}
    assert (SphereFace(3, 3).margin, AdaFace(3, 3).margin, AdaFace(3, 3).h) == (4, 0.4, 0.333)
    assert (MagFace(3, 3).lambda_g, MagFace(3, 3).easy_margin) == (35, True)
    assert SubCentreArcFace(3, 3).sub_centres == 3
    assert (AdaFace(3, 3).length_mean.item(), AdaFace(3, 3).length_spread.item()) == (20, 100)


@every
def test_logit_never_rises(variant):
    head = build(variant, 2, 2).double().eval()
    turn = torch.deg2rad(torch.arange(181).double())
    for length in (0.5, 15, 60, 200):
        z = length * torch.stack([turn.cos(), turn.sin()], dim=1)
        if variant == "softmax":
            logit = z[:, 0]
        else:
            logit = head.target(head.inputs(z)[:, 0], *head.extras(z))
        rises = bool((logit.diff() > 1e-9).any())
        assert rises == (variant in RISING), (length, logit)


@every
@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("length", [1.0, 20.0])
def test_ends_of_the_cosine(variant, kind, length):
    cosines = torch.tensor([1, -1, 1 - 1e-7, 1e-7 - 1, 0])
    head = set_centres(build(variant, 5, 2), torch.stack([cosines, (1 - cosines**2).sqrt()], dim=1))
    z = torch.tensor([[length, 0.0]]).repeat(5, 1).to(kind).requires_grad_()
    loss, seen = head(z, torch.arange(5))
    loss.backward()
    assert loss.dtype == torch.float32 and loss.isfinite()
    assert z.grad.dtype == kind and z.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in head.parameters())
    assert set(seen) >= {"hits", "zeros"} and not any(value.requires_grad for value in seen.values())


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name not in DETACHED])
def test_gradcheck(variant):
    head = build(variant, 4, 5).double().eval()
    lengths = 12 + torch.arange(8).double()[:, None] * 5
    y = torch.arange(4).repeat_interleave(2)
    weight = random(len(head.weight), 5, seed=1).requires_grad_()

    def loss(u, w):
        z = u
        if variant == "adaface":  # quality is a number to it, so lengths are held
            z = lengths * u / u.norm(dim=1, keepdim=True)
        return torch.func.functional_call(head, {"weight": w}, (z, y))[0]
    z = lengths * torch.nn.functional.normalize(random(8, 5))
    assert torch.autograd.gradcheck(loss, [z.requires_grad_(), weight], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("variant", sorted(DETACHED))
def test_replaced_gradient(variant):
    "Equals that of sum_c s (p_c - [c = y]) cos(theta_c), with p of the loss itself"
    head = build(variant, 4, 5, scale=8.0).double()
    z, w, y = random(6, 5).requires_grad_(), head.weight, torch.tensor([0, 1, 2, 3, 0, 1])
    loss = head(z, y)[0]
    cosine = torch.nn.functional.normalize(z) @ torch.nn.functional.normalize(w).T
    logits = head.scale * cosine.detach()
    logits[range(6), y] = head.scale * head.target(cosine[range(6), y]).detach()
    error = logits.softmax(1) - torch.nn.functional.one_hot(y, 4)
    surrogate = (error * head.scale * cosine).sum(1).mean()
    assert loss.item() == pytest.approx(torch.nn.functional.cross_entropy(logits, y).item(), abs=1e-12)
    for got, wanted in zip(torch.autograd.grad(loss, [z, w]), torch.autograd.grad(surrogate, [z, w])):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)


@every
def test_bad_labels_are_named(variant):
    head, z = build(variant, 4, 5), random(3, 5, dtype=torch.float32)
    for labels, words in [([0, 1, 4], "label 4 in row 2 has no class centre: there are 4"),
                          ([0, 9, 5], "label 9 in row 1"), ([0, -1, 2], "label -1 stands in row 1"),
                          ([0, 1], "as many labels"), ([0.0, 1.0, 2.0], "whole numbers")]:
        with pytest.raises(ValueError, match=words):
            head(z, torch.tensor(labels))
    with pytest.raises(ValueError, match="at least one"):
        head(z[:0], torch.zeros(0, dtype=torch.long))


@every
def test_bad_labels_leave_statistics_alone(variant):
    head = build(variant, 4, 5)
    before = {name: value.clone() for name, value in head.named_buffers()}
    with pytest.raises(ValueError):
        head(random(3, 5, dtype=torch.float32), torch.tensor([0, 1, 4]))
    assert all(torch.equal(before[name], value) for name, value in head.named_buffers())


@every
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_stays_nan(variant, value):
    head, z = build(variant, 4, 5), random(4, 5, dtype=torch.float32)
    z[2, 1] = value
    assert not head(z, torch.arange(4))[0].isfinite()
    assert head(random(4, 5, dtype=torch.float32), torch.arange(4))[0].isfinite()


@every
def test_pathological_batches(variant):
    "One person only, all different, duplicates, zeros, one image, one centre: finite, attached to the graph"
    z = 30 * random(4, 5, dtype=torch.float32)
    batches = {"one person": (z, [2, 2, 2, 2]), "all different": (z, [0, 1, 2, 3]),
               "duplicates": (z[:1].repeat(4, 1), [1, 1, 2, 2]), "zeros": (0 * z, [0, 1, 2, 3]),
               "one zero": (z * torch.tensor([1, 0, 1, 1])[:, None], [0, 1, 2, 3]), "one image": (z[:1], [3])}
    for name, (rows, labels) in batches.items():
        head, rows = build(variant, 4, 5), rows.clone().requires_grad_()
        for _ in range(2):
            loss, seen = head(rows, torch.tensor(labels))
        loss.backward()
        assert loss.isfinite() and rows.grad.isfinite().all() and 0 <= seen["hits"] <= 1, name
        if name == "zeros" and variant.split()[0] not in ("softmax", "sphereface"):  # to these, lengths count
            assert rows.grad.abs().max() == 0 and seen["zeros"] == 4
    head, rows = build(variant, 1, 5), z.clone().requires_grad_()
    loss, seen = head(rows, torch.zeros(4, dtype=torch.long))
    loss.backward()
    rest = head.penalty(z) if variant.startswith("magface") else 0
    assert loss.item() == pytest.approx(float(rest)) and seen["hits"] == 1


@every
def test_half_precision_extremes(variant):
    "The largest half, and the smallest: the loss is finite; a gradient of the smallest may pass the range of halves"
    y = torch.arange(4)
    for value, finite in [(65504.0, True), (6e-8, False)]:
        head = build(variant, 4, 5)
        z = (value * random(4, 5, dtype=torch.float32).sign()).half().requires_grad_()
        loss = head(z, y)[0]
        loss.backward()
        assert loss.isfinite() and not z.grad.isnan().any()
        assert z.grad.isfinite().all() or not finite


@every
def test_autocast_changes_nothing(variant):
    z, y = 30 * random(4, 5, dtype=torch.float32), torch.arange(4)
    head = build(variant, 4, 5).eval()
    wanted = head(z, y)[0]
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(head(z, y)[0], wanted)
    assert head.double()(z.double(), y)[0].dtype == torch.float64
    assert head(z.double(), y)[0].item() == pytest.approx(wanted.item(), rel=1e-5)


@every
def test_evaluation_moves_nothing(variant):
    head, z, y = build(variant, 4, 5), random(4, 5, dtype=torch.float32), torch.arange(4)
    head(z, y)
    before = {name: value.clone() for name, value in head.state_dict().items()}
    head.eval()
    head(3 * z, y)
    assert all(torch.equal(before[name], value) for name, value in head.state_dict().items())
    again = build(variant, 4, 5).eval()
    again.load_state_dict(before)
    assert torch.equal(again(z, y)[0], head(z, y)[0])


@every
def test_settings_are_named(variant):
    for settings, words in [((0, 5), "num_people=0"), ((4, 0), "dim=0"), ((2.5, 5), "num_people=2.5 must be a whole")]:
        with pytest.raises(ValueError, match=words):
            LOSSES[VARIANTS[variant][0]].make(*settings)
    for setting, default in LOSSES[VARIANTS[variant][0]].settings().items():
        if not isinstance(default, bool):
            for wrong in (-1, math.nan):
                with pytest.raises(ValueError, match=f"{setting}="):
                    build(variant.split()[0], 4, 5, **{setting: wrong})


def test_learning_brings_hits():
    "Each loss pulls free embeddings to their centres"
    for variant in VARIANTS:
        torch.manual_seed(0)
        head = LOSSES[VARIANTS[variant][0]].make(6, 8, **{**LOSSES[VARIANTS[variant][0]].demo, **VARIANTS[variant][1]})
        z, y = torch.nn.Parameter(torch.randn(24, 8) * 5), torch.arange(6).repeat(4)
        optimiser = torch.optim.Adam([z, *head.parameters()], 0.05)
        first = None
        for _ in range(300):
            loss, seen = head(z, y)
            first = loss.item() if first is None else first
            optimiser.zero_grad(), loss.backward(), optimiser.step()
        assert seen["hits"] == 1 and loss.item() < first, variant


def test_combined_holds_the_others():
    z, w, y = random(8, 5), random(4, 5, seed=1), torch.arange(4).repeat(2)
    for m in (0.0, 0.2, 0.5, 1.5):
        for m123, other in [((1, m, 0), ArcFace(4, 5, 64, m)), ((1, 0, m), CosFace(4, 5, 64, m))]:
            values = []
            for head in (CombinedMargin(4, 5, 64, *m123), other):
                head, moving = set_centres(head.double(), w), z.clone().requires_grad_()
                loss = head(moving, y)[0]
                loss.backward()
                values.append((loss, moving.grad, head.weight.grad))
            for got, wanted in zip(*values):
                assert torch.equal(got, wanted)


def test_insightface_has_no_rule_past_half_a_turn():
    theta = torch.linspace(0, math.pi, 181, dtype=torch.float64)
    cosine = theta.cos().requires_grad_()
    logit = ArcFace(3, 2, straight_through=True).target(cosine)
    torch.testing.assert_close(logit, (theta + 0.5).cos(), rtol=0, atol=1e-12)
    assert torch.equal(torch.autograd.grad(logit.sum(), cosine)[0], torch.ones(181, dtype=torch.float64))


def test_add_margin_in_single_precision():
    cosine = torch.cat([torch.linspace(-1, 1, 20001), torch.tensor([1 - 6e-8, 6e-8 - 1, 1 + 1e-7, -1 - 1e-7])])
    cosine.requires_grad_()
    logit = add_margin(cosine, 0.5)
    logit.sum().backward()
    assert logit.isfinite().all() and cosine.grad.isfinite().all()
    exact = add_margin(cosine.detach().double().clamp(-1, 1), 0.5)
    past = (angle(cosine.detach().double().clamp(-1, 1)) - (math.pi - 0.5)).abs() < 1e-4  # either side of the step
    assert ((logit.detach() - exact).abs() < 1e-6)[~past].all()


# loss / length of the gradient; one embedding in the plane, centres 120 degrees apart, s = 64, m = 0.5
TABLE = {90: ((86.109, 88.17), (86.109, 96)), 149: ((119.922, 28.4), (119.922, 1.94)),
         152: ((126.125, 3.87), (118.271, 3.87)), 165: ((122.416, 28.7), (107.448, 28.7)),
         180: ((112.035, 0), (88.858, 0))}


@pytest.mark.parametrize("degrees", TABLE)
@pytest.mark.parametrize("straight_through", [False, True])
@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_measured_table(degrees, straight_through, kind):
    thirds, turn = torch.arange(3).double() * 2 * math.pi / 3, math.radians(degrees)
    head = set_centres(ArcFace(3, 2, straight_through=straight_through), torch.stack([thirds.cos(), thirds.sin()], dim=1))
    z = torch.tensor([[math.cos(turn), math.sin(turn)]], dtype=kind, requires_grad=True)
    loss = head.to(kind)(z, torch.tensor([0]))[0]
    loss.backward()
    value, gradient = TABLE[degrees][straight_through]
    assert loss.item() == pytest.approx(value, abs=6e-4)
    assert z.grad.norm().item() == pytest.approx(gradient, rel=3e-3, abs=1e-4)


@pytest.mark.parametrize("key, make", [("arcface_s32_m0.2", lambda: ArcFace(11, 32, 32.0, 0.2)),
                                       ("arcface_s64_m0.5", lambda: ArcFace(11, 32)),
                                       ("arcface_s64_m0.5", lambda: CombinedMargin(11, 32, 64, 1, 0.5, 0)),
                                       ("arcface_s64_m0.5", lambda: SubCentreArcFace(11, 32, sub_centres=1)),
                                       ("cosface_s64_m0.35", lambda: CosFace(11, 32)),
                                       ("cosface_s64_m0.35", lambda: CombinedMargin(11, 32, 64, 1, 0, 0.35))])
def test_golden(golden, key, make):
    stored = np.load(golden / "losses_visible.npz")
    head, z = set_centres(make().double(), torch.tensor(stored["W"])), torch.tensor(stored["z"], requires_grad=True)
    loss = head(z, torch.tensor(stored["labels"]))[0]
    loss.backward()
    for found, name in [(loss, "loss"), (z.grad, "gz"), (head.weight.grad, "gW")]:
        wanted = stored[f"{key}_{name}"]
        assert np.linalg.norm(found.detach().numpy() - wanted) < 1e-6 * np.linalg.norm(wanted)
